//! A bar of bytes on a terminal, nothing elsewhere.

use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};
use lowp_file::Progress;
use std::fmt;
use std::io::IsTerminal;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Less work than this is done before a bar could be read.
const LONG: usize = 64 << 20;
/// The time that is left is not shown before this part of the work is done and this time has passed.
const KNOWN: (f32, Duration) = (0.01, Duration::from_secs(1));

/// Shows how much of the work is done, on standard error.
#[derive(Debug)]
pub(super) struct Bar {
    label: String,
    done: AtomicUsize,
    total: OnceLock<usize>,
    bar: OnceLock<ProgressBar>,
}

impl Bar {
    /// Work that has not begun.
    pub(super) fn new(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            done: AtomicUsize::new(0),
            total: OnceLock::new(),
            bar: OnceLock::new(),
        }
    }

    /// All of the work is done, and was announced.
    pub(super) fn finish(self) {
        let announced = self.total.get().copied();
        debug_assert_eq!(announced, Some(self.done.load(Relaxed)), "{}", self.label);
    }
}

impl Progress for Bar {
    fn begin(&self, bytes: usize) {
        let first = self.total.set(bytes).is_ok();
        if first && bytes >= LONG && std::io::stderr().is_terminal() {
            let template = "{prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {left}";
            // The template is a constant; a bar in the default style is the worst a typo could do.
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .with_key("left", write_left);
            let bar = ProgressBar::new(bytes as u64)
                .with_style(style)
                .with_prefix(self.label.clone());
            let _ = self.bar.set(bar);
        }
    }

    fn add(&self, bytes: usize) {
        self.done.fetch_add(bytes, Relaxed);
        if let Some(bar) = self.bar.get() {
            bar.inc(bytes as u64);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.get() {
            bar.finish_and_clear();
        }
    }
}

fn write_left(state: &ProgressState, out: &mut dyn fmt::Write) {
    if let Some(left) = left(state.fraction(), state.elapsed()) {
        // A bar that cannot be drawn is no failure.
        let _ = write!(out, "{} left", HumanDuration(left));
    }
}

/// How much longer work takes of which `fraction` took `elapsed`; `None` while that would be a guess.
fn left(fraction: f32, elapsed: Duration) -> Option<Duration> {
    let known = fraction >= KNOWN.0 && elapsed >= KNOWN.1;
    known.then(|| elapsed.mul_f32((1.0 - fraction).max(0.0) / fraction))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_shown_when_it_is_known() {
        let seconds = Duration::from_secs;
        assert_eq!(left(0.5, seconds(10)), Some(seconds(10)));
        assert_eq!(left(1.0, seconds(10)), Some(seconds(0)));
        // The first bytes of a long pass: weeks, as it seems.
        assert_eq!(left(1e-7, seconds(10)), None);
        assert_eq!(left(0.0, seconds(10)), None);
        assert_eq!(left(0.5, Duration::from_millis(10)), None);
    }
}
