//! A bar of bytes on a terminal, nothing elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// Less work than this is done before a bar could be read.
const LONG: usize = 64 << 20;

/// Shows how much of the work is done, on standard error.
#[derive(Debug)]
pub(super) struct Progress(Option<ProgressBar>);

impl Progress {
    /// Work of `bytes` bytes.
    pub(super) fn new(label: &'static str, bytes: usize) -> Self {
        let shown = bytes >= LONG && std::io::stderr().is_terminal();
        Self(shown.then(|| {
            let template = "{prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
            // The template is a constant; a bar in the default style is the worst a typo could do.
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(bytes as u64)
                .with_style(style)
                .with_prefix(label)
        }))
    }

    /// `bytes` more are done.
    pub(super) fn add(&self, bytes: usize) {
        if let Some(bar) = &self.0 {
            bar.inc(bytes as u64);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
