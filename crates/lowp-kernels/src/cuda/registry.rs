//! [`Registry`]: one value per number in a process, for as long as someone holds it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

type Slot<T> = Arc<Mutex<Weak<T>>>;

/// Values by number, each shared by all who ask for it.
pub(super) struct Registry<T> {
    slots: Mutex<BTreeMap<usize, Slot<T>>>,
}

impl<T> Registry<T> {
    pub(super) const fn new() -> Self {
        Self {
            slots: Mutex::new(BTreeMap::new()),
        }
    }

    /// The value of `number` that someone holds, else what `open` makes. Who asks for the same number waits
    /// meanwhile.
    pub(super) fn get<E>(
        &self,
        number: usize,
        open: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        // Neither lock guards anything that a panic could leave half done.
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry(number).or_default())
        };
        let mut held = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = held.upgrade() {
            return Ok(value);
        }
        let value = Arc::new(open()?);
        *held = Arc::downgrade(&value);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    type Opened = Result<Arc<usize>, &'static str>;

    #[test]
    fn a_number_has_one_value_while_it_is_held() {
        let registry = Registry::new();
        let first: Opened = registry.get(0, || Ok(1));
        let first = first.unwrap();
        let again: Opened = registry.get(0, || Err("it is open"));
        assert!(Arc::ptr_eq(&first, &again.unwrap()));
        let other: Opened = registry.get(7, || Ok(2));
        assert_eq!(*other.unwrap(), 2);
        drop(first);
        let next: Opened = registry.get(0, || Ok(3));
        assert_eq!(*next.unwrap(), 3);
    }

    #[test]
    fn what_fails_to_open_is_opened_again() {
        let registry = Registry::new();
        let failed: Opened = registry.get(0, || Err("no driver"));
        assert_eq!(failed, Err("no driver"));
        let opened: Opened = registry.get(0, || Ok(1));
        assert_eq!(*opened.unwrap(), 1);
    }

    #[test]
    fn who_asks_at_once_gets_the_same() {
        let (registry, opened) = (Registry::new(), AtomicUsize::new(0));
        let open = || Ok::<_, ()>(opened.fetch_add(1, Ordering::Relaxed));
        let values: Vec<_> = std::thread::scope(|scope| {
            let ask = |_| scope.spawn(|| registry.get(0, open).unwrap());
            let threads: Vec<_> = (0..8).map(ask).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(values.iter().all(|value| Arc::ptr_eq(value, &values[0])));
        assert_eq!(opened.into_inner(), 1);
    }
}
