//! [`Watchdog`]: ends the operations of a rank on its device when the world fails, or when they take too long.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lowp_kernels::CudaEvent;
use lowp_shard::{Control, ShardError};

use crate::raw::Raw;

/// How often it looks.
const EVERY: Duration = Duration::from_millis(20);

/// How long NCCL's trouble waits for the host's, and operations on the device for the news to be told.
const PATIENCE: Duration = Duration::from_secs(1);

/// Most points that are remembered: beyond them only the newest is watched.
const MOST: usize = 256;

/// A point that a stream must pass.
#[derive(Debug)]
struct Expected {
    event: CudaEvent,
    what: &'static str,
    since: Instant,
}

/// What one rank's groups share. The last handle ends the thread.
#[derive(Debug)]
pub(crate) struct Watchdog {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Watched {
    control: Arc<dyn Control>,
    limit: Duration,
    groups: Mutex<Vec<Weak<Raw>>>,
    expected: Mutex<VecDeque<Expected>>,
    stop: AtomicBool,
}

impl Watchdog {
    /// Starts to watch the world of `control`, until the last handle is dropped.
    pub(crate) fn start(
        control: Arc<dyn Control>,
        limit: Duration,
    ) -> Result<Arc<Self>, ShardError> {
        let rank = control.world_rank();
        let watched = Arc::new(Watched {
            control,
            limit,
            groups: Mutex::default(),
            expected: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let builder = thread::Builder::new().name("lowp-nccl-watch".to_owned());
        let of_thread = Arc::clone(&watched);
        let spawned = builder.spawn(move || watch(&of_thread));
        let thread = spawned.map_err(|error| ShardError::Failed {
            rank,
            message: format!("no thread can be started: {error}"),
        })?;
        Ok(Arc::new(Self {
            watched,
            thread: Some(thread),
        }))
    }

    /// Ends `group`, too, when the world fails.
    pub(crate) fn add(&self, group: &Arc<Raw>) {
        self.watched.add(group);
    }

    /// Says that `event` must pass within the limit.
    pub(crate) fn expect(&self, event: CudaEvent, what: &'static str) {
        self.watched.expect(event, what);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.watched.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It ends within the time between two looks; if it panicked, it watches no more.
            let _ended = thread.join();
        }
    }
}

impl Watched {
    /// Ends `group`, too, when the world fails.
    fn add(&self, group: &Arc<Raw>) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }

    /// Says that `event` must pass within the limit.
    fn expect(&self, event: CudaEvent, what: &'static str) {
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
        let trouble = self.groups().iter().find_map(|group| group.trouble());
        if let Some(message) = trouble {
            // NCCL meets a rank that is gone as an error of this one; the host hears soon after which it was.
            let cause = self.failure_within(PATIENCE);
            return cause.or(Some(ShardError::Failed { rank, message }));
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

    /// What the world ended with, as soon as it is known.
    fn failure_within(&self, time: Duration) -> Option<ShardError> {
        let until = Instant::now() + time;
        loop {
            let failure = self.control.failure();
            if failure.is_some() || Instant::now() >= until {
                return failure;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn groups(&self) -> Vec<Arc<Raw>> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.iter().filter_map(Weak::upgrade).collect()
    }
}

fn watch(watched: &Watched) {
    while !watched.stop.load(Ordering::Relaxed) {
        if let Some(cause) = watched.trouble() {
            // The news may wait for a rank that does not read; the device does not.
            let control = Arc::clone(&watched.control);
            let tell = thread::Builder::new().spawn(move || control.fail(cause));
            let _told = watched.failure_within(PATIENCE);
            watched.groups().iter().for_each(|group| group.abort());
            // It ends when the news is sent, or cannot be.
            drop(tell);
            return;
        }
        thread::sleep(EVERY);
    }
}
