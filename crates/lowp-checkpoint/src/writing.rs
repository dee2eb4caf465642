//! [`Writing`]: a checkpoint on its way to the disk, and how long it is waited for.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::CheckpointError;
use crate::list::RankReport;
use crate::writer::Progress;

/// Pauses between the rounds of ranks that wait for the files of others grow by a quarter from the first to the longest.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(5);
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A checkpoint of which no more comes to the disk for so long is given up. A part of a file ([`Disk`](crate::writer::Disk)) takes minutes
/// at most where a file system answers.
pub(crate) const STALLED: Duration = Duration::from_secs(1800);

/// A checkpoint on its way to the disk.
#[derive(Debug)]
pub(crate) struct Writing {
    pub(crate) step: u64,
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
    pub(crate) about: Value,
    pub(crate) progress: Arc<Progress>,
    pub(crate) file: JoinHandle<Result<(RankReport, Vec<u8>), CheckpointError>>,
}

/// When something was seen to change last.
pub(crate) struct Watch {
    seen: [f64; 2],
    since: Instant,
}

impl Watch {
    pub(crate) fn new() -> Self {
        let since = Instant::now();
        let seen = [-1.0; 2];
        Self { seen, since }
    }

    /// Whether it has been as `now` for longer than `limit`.
    pub(crate) fn is_stalled(&mut self, now: [f64; 2], limit: Duration) -> bool {
        if self.seen != now {
            (self.seen, self.since) = (now, Instant::now());
        }
        self.since.elapsed() > limit
    }
}

impl Writing {
    /// Whether the file is not done, as a number, and the bytes of it that are on the disk.
    pub(crate) fn state(&self) -> [f64; 2] {
        let open = f64::from(!self.file.is_finished());
        [open, self.progress.on_disk.load(Ordering::Relaxed) as f64]
    }

    /// Ends the writing of the file, and waits for that, unless it has not grown for `limit`. Whether it has ended.
    pub(crate) fn give_up(self, limit: Duration) -> bool {
        self.progress.given_up.store(true, Ordering::Relaxed);
        wait(&self.file, || self.state(), limit);
        self.file.is_finished()
    }
}

/// Waits for `thread` until it ends, or its `state` has been the same for `limit`.
pub(crate) fn wait<T>(thread: &JoinHandle<T>, state: impl Fn() -> [f64; 2], limit: Duration) {
    let (mut pause, mut watch) = (FIRST_PAUSE, Watch::new());
    while !thread.is_finished() && !watch.is_stalled(state(), limit) {
        thread::sleep(pause);
        pause = (pause + pause / 4).min(LONGEST_PAUSE);
    }
}
