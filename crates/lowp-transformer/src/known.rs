//! [`Known`]: what was made once for each key.

use std::sync::{Mutex, PoisonError};

/// Few values by what they were made for.
#[derive(Debug)]
pub(crate) struct Known<K, V>(Mutex<Vec<(K, V)>>);

impl<K, V> Default for Known<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Clone + PartialEq, V: Clone> Known<K, V> {
    /// The value of `key`, made now where there is none.
    pub(crate) fn of<E>(&self, key: &K, make: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, value)) = known.iter().find(|(known, _)| known == key) {
            return Ok(value.clone());
        }
        let value = make()?;
        known.push((key.clone(), value.clone()));
        Ok(value)
    }

    /// Those made so far.
    pub(crate) fn values(&self) -> Vec<V> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().map(|(_, value)| value.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn each_key_has_a_value_of_its_own_and_one() {
        let (known, made) = (Known::default(), AtomicUsize::new(0));
        let make = |key: &[i64; 2]| {
            made.fetch_add(1, Ordering::Relaxed);
            if key[0] < 0 {
                Err("no")
            } else {
                Ok(key[0] * key[1])
            }
        };
        for key in [[2, 3], [2, 5], [2, 3], [7, 1], [2, 5]] {
            assert_eq!(known.of(&key, || make(&key)), Ok(key[0] * key[1]));
        }
        assert_eq!(made.load(Ordering::Relaxed), 3);
        assert_eq!(known.values(), [6, 10, 7]);
        // What could not be made is tried again.
        for tries in 4..6 {
            assert_eq!(known.of(&[-1, 0], || make(&[-1, 0])), Err("no"));
            assert_eq!(made.load(Ordering::Relaxed), tries);
        }
    }
}
