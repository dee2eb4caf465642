//! What a command says on standard error when it is done: one line for people, and what it left as it was.

use crate::output::{note, reason, shown};
use indicatif::HumanBytes;
use lowp_file::dequantize::Overflows;
use lowp_file::dtypes::OutputDtype;
use lowp_file::hub::OtherFiles;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Instant;

/// Tensors that a note names, unless all are asked for.
const NAMED: usize = 3;

/// How much a command says.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Verbosity {
    /// Print the summary also if standard error is not a terminal, and name every tensor that was not quantized
    #[arg(short, long)]
    verbose: bool,
}

/// A tensor that passed through, and why.
pub(super) type Kept<'a> = (&'a str, String);

/// What a command prints at its end.
#[derive(Debug)]
pub(super) struct Summary {
    start: Instant,
    verbose: bool,
}

impl Summary {
    pub(super) fn begin(verbosity: Verbosity) -> Self {
        Self {
            start: Instant::now(),
            verbose: verbosity.verbose,
        }
    }

    /// `what` was done, with so many bytes of input and output files. Scripts get no such line.
    pub(super) fn done(&self, what: &str, read: u64, written: u64) {
        if self.is_watched() {
            note(&format!(
                "{what}: {} in, {} out, {:.1} s",
                HumanBytes(read),
                HumanBytes(written),
                self.start.elapsed().as_secs_f64()
            ));
        }
    }

    /// Whether people are watching.
    pub(super) fn is_watched(&self) -> bool {
        self.verbose || std::io::stderr().is_terminal()
    }

    /// Names tensors that passed through although they are matrices; `what` says what they are, in the plural.
    pub(super) fn kept(&self, what: &str, kept: &[Kept<'_>]) {
        if kept.is_empty() {
            return;
        }
        let named = if self.verbose { 0 } else { NAMED };
        note(&kept_text(what, kept, named));
        if self.verbose {
            for (name, why) in kept {
                note(&format!("  '{}' ({})", shown(name), reason(why)));
            }
        }
    }
}

/// Says what of the folder of the input was left out, if anything was and people are watching.
pub(super) fn left_out(summary: &Summary, files: &OtherFiles) {
    let left_out = files.left_out();
    if left_out.is_empty() || !summary.is_watched() {
        return;
    }
    let names: Vec<String> = left_out
        .iter()
        .take(8)
        .map(|name| format!("'{}'", shown(name)))
        .collect();
    note(&format!(
        "note: {} files or folders are left out: {}",
        left_out.len(),
        names.join(", ")
    ));
}

/// Says how many finite values became infinite as `float`, if any did; `keep` is the option that keeps them.
pub(super) fn warn_of_overflows(overflows: &Overflows, float: OutputDtype, keep: &str) {
    if let Some(name) = overflows.first() {
        note(&format!(
            "warning: {} values exceed the range of {} and became infinite, the first in '{}'; {keep} \
             keeps them",
            overflows.count(),
            float.name(),
            shown(&name)
        ));
    }
}

/// How many tensors passed through; the first `named` of them with the reason, and how many are not named.
fn kept_text(what: &str, kept: &[Kept<'_>], named: usize) -> String {
    let mut text = format!("note: {what} that passed through: {}", kept.len());
    for (i, (name, why)) in kept.iter().take(named).enumerate() {
        let before = if i == 0 { ": " } else { ", " };
        let _ = write!(text, "{before}'{}' ({})", shown(name), reason(why));
    }
    if named > 0 && named < kept.len() {
        let more = kept.len() - named;
        let _ = write!(text, ", and {more} more (--verbose names all)");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::message;

    #[test]
    fn the_first_are_named_and_the_others_counted() {
        let kept: Vec<Kept<'_>> = ["a", "b\n", "c", "d", "e"]
            .into_iter()
            .map(|name| (name, "ragged".to_owned()))
            .collect();
        assert_eq!(
            kept_text("unfit tensors", &kept, 3),
            "note: unfit tensors that passed through: 5: 'a' (ragged), 'b\\n' (ragged), 'c' (ragged), and 2 more (--verbose \
             names all)"
        );
        // A reason keeps its remedy, however long it is; it is cut where it repeats numbers of a file.
        let remedy = "; give it as one matrix of rows and columns that are multiples of 32";
        for axes in [30, 30_000] {
            let why = format!("{:?} cannot be laid out{remedy}", vec![1; axes]);
            let text = kept_text("unfit tensors", &vec![("w", why); 4], 3);
            assert_eq!(text.matches(remedy).count(), 3, "{text}");
            assert_eq!(message(&text), text);
        }
        assert_eq!(
            kept_text("unfit tensors", &kept, 0),
            "note: unfit tensors that passed through: 5"
        );
        assert_eq!(
            kept_text("unfit tensors", &kept[..1], 3),
            "note: unfit tensors that passed through: 1: 'a' (ragged)"
        );
    }
}
