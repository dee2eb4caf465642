//! [`Deferred`]: what must live until the device has passed some points of its work.

use std::any::Any;
use std::sync::{Mutex, PoisonError};

/// What keeps memory of others alive, or memory of the host.
pub(super) type Owner = Box<dyn Any + Send + Sync>;

/// A point in the work of a device.
pub(super) trait Point {
    /// Whether the device has passed it. Does not wait.
    fn passed(&self) -> bool;
}

/// Owners, each with the points after which it may go.
pub(super) struct Deferred<P> {
    held: Mutex<Vec<(Vec<P>, Owner)>>,
}

impl<P: Point> Deferred<P> {
    pub(super) const fn new() -> Self {
        Self {
            held: Mutex::new(Vec::new()),
        }
    }

    /// Holds `owner` until all of `points` are passed.
    pub(super) fn hold(&self, points: Vec<P>, owner: Owner) {
        self.lock().push((points, owner));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Takes out the owners whose points are passed. They are for the caller to drop, who holds no lock:
    /// owners run code of others, which may come back here.
    pub(super) fn take_passed(&self) -> Vec<Owner> {
        let mut held = self.lock();
        let passed = held.extract_if(.., |(points, _)| {
            points.retain(|point| !point.passed());
            points.is_empty()
        });
        passed.map(|(_, owner)| owner).collect()
    }

    /// Takes out every owner.
    pub(super) fn take_all(&self) -> Vec<Owner> {
        let all = std::mem::take(&mut *self.lock());
        all.into_iter().map(|(_, owner)| owner).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(Vec<P>, Owner)>> {
        // No code of others runs under the lock: the list is whole.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Passed when the clock has come to it.
    struct At(Arc<AtomicUsize>, usize);

    impl Point for At {
        fn passed(&self) -> bool {
            self.0.load(Ordering::Relaxed) >= self.1
        }
    }

    fn clock() -> (Arc<AtomicUsize>, impl Fn(usize) -> At) {
        let clock = Arc::new(AtomicUsize::new(0));
        let of = Arc::clone(&clock);
        (clock, move |time| At(Arc::clone(&of), time))
    }

    #[test]
    fn owners_live_until_every_point_is_passed() {
        let (clock, at) = clock();
        let deferred = Deferred::new();
        let owners = [Arc::new(1), Arc::new(2)];
        let [first, second] = owners.each_ref().map(Arc::downgrade);
        let [one, two] = owners;
        deferred.hold(vec![at(1), at(3)], Box::new(one));
        deferred.hold(vec![at(2)], Box::new(two));
        let alive = || [&first, &second].map(|owner| owner.strong_count() > 0);
        for (now, expected) in [(0, [true, true]), (1, [true, true]), (2, [true, false])] {
            clock.store(now, Ordering::Relaxed);
            drop(deferred.take_passed());
            assert_eq!(alive(), expected, "at {now}");
        }
        assert!(!deferred.is_empty());
        clock.store(3, Ordering::Relaxed);
        assert_eq!(deferred.take_passed().len(), 1);
        assert!(deferred.is_empty() && alive() == [false, false]);
    }

    /// An owner whose drop gives another one to the list.
    struct Follows(Arc<Deferred<At>>, Option<At>);

    impl Drop for Follows {
        fn drop(&mut self) {
            self.0
                .hold(self.1.take().into_iter().collect(), Box::new(()));
        }
    }

    #[test]
    fn owners_may_come_back_while_they_go() {
        let (clock, at) = clock();
        let deferred = Arc::new(Deferred::new());
        let owner = Follows(Arc::clone(&deferred), Some(at(2)));
        deferred.hold(vec![at(1)], Box::new(owner));
        clock.store(1, Ordering::Relaxed);
        drop(deferred.take_passed());
        assert!(!deferred.is_empty());
        assert_eq!(deferred.take_all().len(), 1);
        assert!(deferred.is_empty());
    }
}
