//! Running cargo from the workspace root.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The folder that holds the workspace `Cargo.toml`.
///
/// Cargo sets `CARGO_MANIFEST_DIR` when it runs xtask. The value from the build is the fallback for
/// a binary that is started by hand.
pub(crate) fn workspace_root() -> Result<PathBuf> {
    let xtask = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let root = xtask
        .parent()
        .with_context(|| format!("{} has no parent folder", xtask.display()))?;
    ensure!(
        root.join("Cargo.toml").is_file(),
        "no Cargo.toml in {}, where the workspace root should be",
        root.display()
    );
    Ok(root.to_path_buf())
}

/// The folder for build results: `CARGO_TARGET_DIR` if set, else `target` in the workspace root.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let root = workspace_root()?;
    // `join` keeps an absolute path as it is.
    Ok(root.join(env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| OsString::from("target"))))
}

/// The cargo that runs xtask, started in the workspace root.
pub(crate) fn cargo(args: &[&str]) -> Result<Command> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root()?).args(args);
    Ok(command)
}

/// Runs `command` with its output shown, and fails with its command line if it fails.
pub(crate) fn run(mut command: Command) -> Result<()> {
    let line = display(&command);
    let status = command
        .status()
        .with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(())
}

/// Runs `command` with its errors shown, fails with its command line if it fails, and returns what it prints.
pub(crate) fn answer(mut command: Command) -> Result<Vec<u8>> {
    let line = display(&command);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{line}`"))?;
    ensure!(
        output.status.success(),
        "`{line}` failed ({})",
        output.status
    );
    Ok(output.stdout)
}

/// Runs a cargo command that builds one program, and returns the program.
pub(crate) fn build_program(mut command: Command) -> Result<PathBuf> {
    command.arg("--message-format=json-render-diagnostics");
    let line = display(&command);
    program(&String::from_utf8_lossy(&answer(command)?))
        .with_context(|| format!("`{line}` named no program"))
}

/// The last program among the messages of cargo.
fn program(messages: &str) -> Option<PathBuf> {
    messages
        .lines()
        .rev()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

/// Whether `command` starts and succeeds. Its output is dropped.
pub(crate) fn succeeds(mut command: Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The command line as a person would type it.
pub(crate) fn display(command: &Command) -> String {
    let program = PathBuf::from(command.get_program());
    let mut line = program
        .file_stem()
        .unwrap_or(program.as_os_str())
        .to_string_lossy()
        .into_owned();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}

/// Removes a folder, if it is there.
pub(crate) fn remove(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_the_workspace() {
        let root = workspace_root().unwrap();
        assert!(root.join("xtask/Cargo.toml").is_file());
    }

    #[test]
    fn the_program_is_read_from_cargos_messages() {
        let messages = r#"not a message
            {"reason":"compiler-artifact","target":{"kind":["custom-build"]},"executable":null}
            {"reason":"compiler-artifact","target":{"kind":["bench"]},"executable":"/t/a\"b","fresh":true}
            {"reason":"build-finished","success":true}"#;
        assert_eq!(program(messages), Some(PathBuf::from("/t/a\"b")));
        assert_eq!(program("{}"), None);
    }

    #[test]
    fn a_failing_command_is_named() {
        let error = run(cargo(&["no-such-subcommand-of-cargo"]).unwrap()).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("cargo no-such-subcommand-of-cargo"),
            "{error}"
        );
    }
}
