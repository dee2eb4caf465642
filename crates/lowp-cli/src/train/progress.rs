//! A progress bar on a terminal, plain lines elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// Lines that a run prints where there is no terminal.
const LINES: usize = 10;

/// Shows the steps of one run on standard error.
#[derive(Debug)]
pub(crate) struct Progress {
    label: String,
    steps: usize,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// A run of `steps` steps, `label` at the front of its line.
    pub(crate) fn new(label: &str, steps: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let template = "{prefix:14} {bar:30} {pos:>5}/{len} {msg} {eta}";
            // The template is a constant; a bar in the default style is the worst a typo could do.
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(steps as u64)
                .with_style(style)
                .with_prefix(label.to_owned())
        });
        Self {
            label: label.to_owned(),
            steps,
            bar,
        }
    }

    /// Step `step`, counted from zero, is done.
    pub(crate) fn step(&self, step: usize, loss: f64, tokens_per_second: f64) {
        let rate = tokens_per_second / 1000.0;
        if let Some(bar) = &self.bar {
            bar.set_message(format!("loss {loss:.4}  {rate:.1}k tokens/s"));
            bar.set_position(step as u64 + 1);
        } else if (step + 1).is_multiple_of(self.steps.div_ceil(LINES)) || step + 1 == self.steps {
            let (label, steps) = (&self.label, self.steps);
            eprintln!(
                "{label} step {}/{steps} loss {loss:.4} {rate:.1}k tokens/s",
                step + 1
            );
        }
    }

    /// Leaves the finished line in place.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}
