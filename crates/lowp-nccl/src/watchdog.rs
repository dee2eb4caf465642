//! [`Watchdog`]: ends the operations of a rank on its device when the world fails, or when they take too long.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use lowp_kernels::CudaEvent;
use lowp_shard::{Control, ShardError};

use crate::raw::Raw;

/// How often it looks.
const EVERY: Duration = Duration::from_millis(20);

/// Most points that are remembered: beyond them only the newest is watched.
const MOST: usize = 256;

/// A point that a stream must pass.
#[derive(Debug)]
struct Expected {
    event: CudaEvent,
    what: &'static str,
    since: Instant,
}

/// What one rank's groups share.
#[derive(Debug)]
pub(crate) struct Watchdog {
    control: Arc<dyn Control>,
    limit: Duration,
    groups: Mutex<Vec<Weak<Raw>>>,
    expected: Mutex<VecDeque<Expected>>,
}

impl Watchdog {
    /// Starts to watch the world of `control`, until the last handle is dropped.
    pub(crate) fn start(
        control: Arc<dyn Control>,
        limit: Duration,
    ) -> Result<Arc<Self>, ShardError> {
        let watchdog = Arc::new(Self {
            control,
            limit,
            groups: Mutex::default(),
            expected: Mutex::default(),
        });
        let weak = Arc::downgrade(&watchdog);
        let builder = thread::Builder::new().name("lowp-nccl-watch".to_owned());
        let spawned = builder.spawn(move || watch(&weak));
        spawned.map_err(|error| ShardError::Failed {
            rank: watchdog.control.world_rank(),
            message: format!("no thread can be started: {error}"),
        })?;
        Ok(watchdog)
    }

    /// Ends `group`, too, when the world fails.
    pub(crate) fn add(&self, group: &Arc<Raw>) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }

    /// Says that `event` must pass within the limit.
    pub(crate) fn expect(&self, event: CudaEvent, what: &'static str) {
        // A point of a capture passes when the graph does.
        if event.passed().is_err() {
            return;
        }
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        if expected.len() == MOST {
            expected.pop_back();
        }
        let since = Instant::now();
        expected.push_back(Expected { event, what, since });
    }

    /// Why the operations must end.
    fn trouble(&self) -> Option<ShardError> {
        let rank = self.control.world_rank();
        if let Some(cause) = self.control.failure() {
            return Some(cause);
        }
        let groups = self.groups();
        if let Some(message) = groups.iter().find_map(|group| group.trouble()) {
            return Some(ShardError::Failed { rank, message });
        }
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(first) = expected.front() {
            match first.event.passed() {
                Ok(true) => expected.pop_front(),
                Ok(false) if first.since.elapsed() < self.limit => return None,
                Ok(false) => {
                    let message = format!(
                        "{} is not done after {:.1} s: a rank does not take part, or is late (see where the others are; or raise the time limit)",
                        first.what,
                        first.since.elapsed().as_secs_f64()
                    );
                    return Some(ShardError::Failed { rank, message });
                }
                Err(error) => {
                    let message = format!("{}: {error}", first.what);
                    return Some(ShardError::Failed { rank, message });
                }
            };
        }
        None
    }

    fn groups(&self) -> Vec<Arc<Raw>> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.iter().filter_map(Weak::upgrade).collect()
    }
}

fn watch(watchdog: &Weak<Watchdog>) {
    while let Some(watchdog) = watchdog.upgrade() {
        if let Some(cause) = watchdog.trouble() {
            watchdog.control.fail(cause);
            watchdog.groups().iter().for_each(|group| group.abort());
            return;
        }
        drop(watchdog);
        thread::sleep(EVERY);
    }
}
