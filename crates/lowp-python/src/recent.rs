//! [`Recent`]: values by key, up to a number of them; beyond it the one that was not used for longest goes.

use std::collections::HashMap;
use std::hash::Hash;

/// Values by key.
pub(crate) struct Recent<K, V> {
    of: HashMap<K, Entry<V>>,
    most: usize,
    calls: u64,
}

struct Entry<V> {
    value: V,
    /// The number of the call that used it last.
    used: u64,
}

impl<K: Clone + Eq + Hash, V> Recent<K, V> {
    /// None yet; at most `most` are kept, and at least one.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            of: HashMap::new(),
            most: most.max(1),
            calls: 0,
        }
    }

    /// The value of a key, which is used by that.
    pub(crate) fn get(&mut self, key: &K) -> Option<&V> {
        self.calls += 1;
        let entry = self.of.get_mut(key)?;
        entry.used = self.calls;
        Some(&entry.value)
    }

    /// The value of a key, which is kept no longer.
    pub(crate) fn take(&mut self, key: &K) -> Option<V> {
        self.of.remove(key).map(|entry| entry.value)
    }

    /// Keeps a value. Returns what went for it: the value that the key had, or the one that was not used for longest.
    #[must_use = "a value may end here, where a lock is held"]
    pub(crate) fn put(&mut self, key: K, value: V) -> Option<V> {
        self.calls += 1;
        let full = self.of.len() >= self.most && !self.of.contains_key(&key);
        let oldest = || self.of.iter().min_by_key(|(_, entry)| entry.used);
        let oldest = full.then(oldest).flatten().map(|(key, _)| key.clone());
        let gone = oldest.and_then(|key| self.of.remove(&key));
        let used = self.calls;
        let before = self.of.insert(key, Entry { value, used });
        before.or(gone).map(|entry| entry.value)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.of.len()
    }
}
