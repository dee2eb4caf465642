//! `lowp completions`: the script that teaches a shell the commands and options, by [`clap_complete::generate`].

use crate::output;
use anyhow::Result;
use clap_complete::Shell;

/// Print the completion script of a shell
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp completions bash > ~/.local/share/bash-completion/completions/lowp
  lowp completions zsh > ~/.zfunc/_lowp        # with ~/.zfunc in fpath
  lowp completions fish > ~/.config/fish/completions/lowp.fish")]
pub(crate) struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs the command; `cli` is the whole command line to complete.
pub(crate) fn main(args: &Args, cli: &mut clap::Command) -> Result<()> {
    let mut script = Vec::new();
    let name = cli.get_name().to_owned();
    clap_complete::generate(args.shell, cli, name, &mut script);
    output::print(&String::from_utf8(script)?)
}
