//! [`Watchdog`]: ends the operations of a rank on its device when the world fails, or when they take too long.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lowp_comm::{CommError, Control};
use lowp_kernels::KernelError;

/// How often it looks.
const EVERY: Duration = Duration::from_millis(20);

/// How long NCCL's trouble waits for the host's, and operations on the device for the news to be told.
const PATIENCE: Duration = Duration::from_secs(1);

/// Most points that are remembered: beyond them only the newest is watched.
const MOST: usize = 256;

/// A group of ranks whose operations can be ended.
pub(crate) trait Group: Send + Sync + Debug + 'static {
    /// What its library says is wrong with it.
    fn trouble(&self) -> Option<String>;

    /// Ends its operations, once.
    fn abort(&self);
}

/// A point of a stream.
pub(crate) trait Point: Send + Debug + 'static {
    /// Whether the stream is behind it.
    fn passed(&self) -> Result<bool, KernelError>;
}

/// A point that a stream must pass.
#[derive(Debug)]
struct Expected<P> {
    event: P,
    what: &'static str,
    /// When it was given, or the one before was passed.
    since: Instant,
}

/// What one rank's groups share. The last handle ends the thread.
#[derive(Debug)]
pub(crate) struct Watchdog<G, P> {
    watched: Arc<Watched<G, P>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Watched<G, P> {
    control: Arc<dyn Control>,
    limit: Duration,
    groups: Mutex<Groups<G>>,
    expected: Mutex<VecDeque<Expected<P>>>,
    stop: AtomicBool,
}

/// What is ended.
#[derive(Debug)]
struct Groups<G> {
    alive: Vec<Weak<G>>,
    /// Whether those that were there were ended: nobody looks after any that comes later.
    ended: bool,
}

impl<G: Group, P: Point> Watchdog<G, P> {
    /// Starts to watch the world of `control`, until the last handle is dropped.
    pub(crate) fn start(
        control: Arc<dyn Control>,
        limit: Duration,
    ) -> Result<Arc<Self>, CommError> {
        let rank = control.world_rank();
        let watched = Arc::new(Watched {
            control,
            limit,
            groups: Mutex::new(Groups {
                alive: Vec::new(),
                ended: false,
            }),
            expected: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let builder = thread::Builder::new().name("lowp-nccl-watch".to_owned());
        let of_thread = Arc::clone(&watched);
        let spawned = builder.spawn(move || watch(&of_thread));
        let thread = spawned.map_err(|error| CommError::Failed {
            rank,
            message: format!("no thread can be started: {error}"),
        })?;
        Ok(Arc::new(Self {
            watched,
            thread: Some(thread),
        }))
    }

    /// Ends `group`, too, when the world fails; at once, if it has.
    pub(crate) fn add(&self, group: &Arc<G>) {
        self.watched.add(group);
    }

    /// Says that `event` must pass within the limit, from when the one before has passed.
    pub(crate) fn expect(&self, event: P, what: &'static str) {
        self.watched.expect(event, what);
    }

    /// Waits until all points are passed or the world has failed, which takes no longer than the limit of each point.
    pub(crate) fn settle(&self) {
        while self.watched.control.failure().is_none() && self.watched.expects() {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl<G, P> Drop for Watchdog<G, P> {
    fn drop(&mut self) {
        self.watched.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It ends within the time between two looks; if it panicked, it watches no more.
            let _ended = thread.join();
        }
    }
}

impl<G: Group, P: Point> Watched<G, P> {
    /// Ends `group`, too, when the world fails; at once, if it has. One that joins takes long, and the world may end meanwhile.
    fn add(&self, group: &Arc<G>) {
        let mut groups = self.groups();
        if groups.ended {
            drop(groups);
            return group.abort();
        }
        groups.alive.retain(|group| group.strong_count() > 0);
        groups.alive.push(Arc::downgrade(group));
    }

    /// Ends all groups, and those that come later.
    fn end(&self) {
        self.groups().ended = true;
        self.alive().iter().for_each(|group| group.abort());
    }

    /// Says that `event` must pass within the limit.
    fn expect(&self, event: P, what: &'static str) {
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

    /// Whether a point is not passed. One that cannot be asked is the thread's to find.
    fn expects(&self) -> bool {
        let expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |point: &Expected<P>| !point.event.passed().unwrap_or(false);
        expected.iter().any(waits)
    }

    /// Why the operations must end.
    fn trouble(&self) -> Option<CommError> {
        let rank = self.control.world_rank();
        if let Some(cause) = self.control.failure() {
            return Some(cause);
        }
        let trouble = self.alive().iter().find_map(|group| group.trouble());
        if let Some(message) = trouble {
            // NCCL meets a rank that is gone as an error of this one; the host hears soon after which it was.
            let cause = self.failure_within(PATIENCE);
            return cause.or(Some(CommError::Failed { rank, message }));
        }
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(first) = expected.front() {
            match first.event.passed() {
                Ok(true) => {
                    expected.pop_front();
                    if let Some(next) = expected.front_mut() {
                        next.since = Instant::now();
                    }
                }
                Ok(false) if first.since.elapsed() < self.limit => return None,
                Ok(false) => {
                    let message = format!(
                        "{} is not done after {:.1} s: a rank does not take part, or is late (see where the others are; or raise the time limit, `timeout`)",
                        first.what,
                        first.since.elapsed().as_secs_f64()
                    );
                    return Some(CommError::Failed { rank, message });
                }
                Err(error) => {
                    let message = format!("{}: {error}", first.what);
                    return Some(CommError::Failed { rank, message });
                }
            }
        }
        None
    }

    /// What the world ended with, as soon as it is known.
    fn failure_within(&self, time: Duration) -> Option<CommError> {
        let until = Instant::now() + time;
        loop {
            let failure = self.control.failure();
            if failure.is_some() || Instant::now() >= until {
                return failure;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn groups(&self) -> MutexGuard<'_, Groups<G>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn alive(&self) -> Vec<Arc<G>> {
        self.groups()
            .alive
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }
}

fn watch<G: Group, P: Point>(watched: &Watched<G, P>) {
    while !watched.stop.load(Ordering::Relaxed) {
        if let Some(cause) = watched.trouble() {
            // The news may wait for a rank that does not read; the device does not.
            let control = Arc::clone(&watched.control);
            let tell = thread::Builder::new().spawn(move || control.fail(cause));
            let _told = watched.failure_within(PATIENCE);
            watched.end();
            // It ends when the news is sent, or cannot be.
            drop(tell);
            return;
        }
        thread::sleep(EVERY);
    }
}

#[cfg(test)]
mod tests {
    use lowp_comm::threads;

    use super::*;

    /// A group that nobody needs a GPU for.
    #[derive(Debug, Default)]
    struct Fake {
        aborted: AtomicBool,
        trouble: Mutex<Option<String>>,
    }

    impl Group for Fake {
        fn trouble(&self) -> Option<String> {
            self.trouble.lock().expect("no panic").clone()
        }

        fn abort(&self) {
            self.aborted.store(true, Ordering::SeqCst);
        }
    }

    /// A point that a stream passes after a time; never, if there is none.
    #[derive(Debug)]
    struct Passes(Option<Instant>);

    impl Point for Passes {
        fn passed(&self) -> Result<bool, KernelError> {
            Ok(self.0.is_some_and(|at| at <= Instant::now()))
        }
    }

    const SOON: Duration = Duration::from_secs(20);

    fn is_aborted_soon(group: &Fake) -> bool {
        let begun = Instant::now();
        while !group.aborted.load(Ordering::SeqCst) && begun.elapsed() < SOON {
            thread::sleep(Duration::from_millis(1));
        }
        group.aborted.load(Ordering::SeqCst)
    }

    fn start(control: &Arc<dyn Control>, limit: Duration) -> Arc<Watchdog<Fake, Passes>> {
        Watchdog::start(Arc::clone(control), limit).expect("a thread")
    }

    /// Whenever it joins: before the world fails, while it does, and when nobody watches any more.
    #[test]
    fn no_group_outlives_the_world() {
        for milliseconds in [0, 5, 20, 40, 60, 100, 200] {
            let world = threads(2, SOON);
            let watchdog = start(&world[0], SOON);
            let first = Arc::new(Fake::default());
            watchdog.add(&first);
            world[1].abort("planted");
            thread::sleep(Duration::from_millis(milliseconds));
            let second = Arc::new(Fake::default());
            watchdog.add(&second);
            assert!(is_aborted_soon(&first) && is_aborted_soon(&second));
            let third = Arc::new(Fake::default());
            watchdog.add(&third);
            assert!(is_aborted_soon(&third), "after {milliseconds} ms");
        }
    }

    /// What ends a world from its device: trouble of a group, and a point that is not passed.
    #[test]
    fn trouble_of_the_device_ends_the_world() {
        for says in ["planted", "it is not done after"] {
            let world = threads(2, SOON);
            let watchdog = start(&world[0], Duration::from_millis(50));
            let group = Arc::new(Fake::default());
            watchdog.add(&group);
            watchdog.expect(Passes(Some(Instant::now())), "the one before");
            if says == "planted" {
                *group.trouble.lock().expect("no panic") = Some(says.to_owned());
            } else {
                watchdog.expect(Passes(None), "it");
            }
            assert!(is_aborted_soon(&group));
            let begun = Instant::now();
            while world[1].failure().is_none() && begun.elapsed() < SOON {
                thread::sleep(Duration::from_millis(1));
            }
            let cause = world[1].failure().expect("the world ended").to_string();
            assert!(cause.contains(says), "{cause}");
        }
    }

    /// Who settles waits for what is passed, and no longer than the limit for what is not.
    #[test]
    fn settling_ends_with_the_last_point_or_the_world() {
        let limit = Duration::from_millis(300);
        for passes in [true, false] {
            let world = threads(2, SOON);
            let watchdog = start(&world[0], limit);
            let at = Instant::now() + limit / 2;
            watchdog.expect(Passes(Some(at)), "the first");
            watchdog.expect(Passes(passes.then_some(at)), "the last");
            watchdog.settle();
            assert!(Instant::now() >= at);
            assert_eq!(world[0].failure().is_none(), passes);
        }
    }

    /// Operations that were given at once have the limit one after the other.
    #[test]
    fn the_limit_begins_behind_the_operation_before() {
        let limit = Duration::from_millis(300);
        let world = threads(2, SOON);
        let watchdog = start(&world[0], limit);
        let group = Arc::new(Fake::default());
        watchdog.add(&group);
        let begun = Instant::now();
        for step in 1..=4u32 {
            watchdog.expect(Passes(Some(begun + step * limit / 2)), "one of many");
        }
        watchdog.expect(Passes(None), "the last");
        assert!(is_aborted_soon(&group));
        assert!(begun.elapsed() >= 3 * limit, "{:?}", begun.elapsed());
        let begun = Instant::now();
        while world[1].failure().is_none() && begun.elapsed() < SOON {
            thread::sleep(Duration::from_millis(1));
        }
        let cause = world[1].failure().expect("the world ended").to_string();
        assert!(cause.contains("the last is not done after 0.3"), "{cause}");
    }
}
