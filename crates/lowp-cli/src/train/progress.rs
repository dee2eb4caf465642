//! A progress bar on a terminal, plain lines elsewhere.

use crate::output;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// Lines that a run prints where there is no terminal.
const LINES: usize = 10;

/// While steps are left, and after the last one.
const RUNNING: &str = "{prefix} {wide_bar} {pos:>5}/{len}  {msg}  {eta} left";
const DONE: &str = "{prefix} {wide_bar} {pos:>5}/{len}  {msg}  in {elapsed}";

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
            ProgressBar::new(steps as u64)
                .with_style(style(RUNNING))
                .with_prefix(label.to_owned())
        });
        Self {
            label: label.to_owned(),
            steps,
            bar,
        }
    }

    /// `done` steps are done.
    pub(crate) fn step(
        &self,
        done: usize,
        loss: f64,
        tokens_per_second: f64,
        flops_per_second: f64,
    ) {
        let text = format!(
            "loss {loss:.4}  {:.1}k tokens/s  {}",
            tokens_per_second / 1000.0,
            flops(flops_per_second)
        );
        if let Some(bar) = &self.bar {
            bar.set_message(text);
            bar.set_position(done as u64);
        } else if done.is_multiple_of(self.steps.div_ceil(LINES)) || done == self.steps {
            let (label, steps) = (&self.label, self.steps);
            let width = steps.to_string().len();
            output::note(&format!("{label}  step {done:width$}/{steps}  {text}"));
        }
    }

    /// The loss on the validation split after `done` steps.
    pub(crate) fn evaluation(&self, done: usize, loss: f64) {
        let (label, steps) = (&self.label, self.steps);
        let width = steps.to_string().len();
        let text = format!("{label}  step {done:width$}/{steps}  val loss {loss:.4}");
        match &self.bar {
            Some(bar) => bar.suspend(|| output::note(&text)),
            None => output::note(&text),
        }
    }

    /// Leaves the finished line in place.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.set_style(style(DONE));
            bar.finish();
        }
    }
}

/// A rate of floating-point operations, for example `12.3 GFLOP/s`.
pub(crate) fn flops(per_second: f64) -> String {
    let units = [(1e15, "P"), (1e12, "T"), (1e9, "G")];
    let (unit, name) = units
        .into_iter()
        .find(|(unit, _)| per_second >= *unit)
        .unwrap_or((1e6, "M"));
    format!("{:.1} {name}FLOP/s", per_second / unit)
}

fn style(template: &str) -> ProgressStyle {
    // The templates are constants; a bar in the default style is the worst a typo could do.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_templates_parse() {
        for template in [RUNNING, DONE] {
            ProgressStyle::with_template(template).expect(template);
        }
    }
}
