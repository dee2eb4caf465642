//! Locks whose values are whole even if somebody failed while holding one.

use std::sync::{Mutex, MutexGuard, PoisonError};
#[cfg(all(feature = "cuda", unix))]
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The values of a lock: whoever failed in between left them as they were.
pub(crate) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same of a lock that many read.
#[cfg(all(feature = "cuda", unix))]
pub(crate) fn read<T>(of: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    of.read().unwrap_or_else(PoisonError::into_inner)
}

/// The same of a lock that one writes.
#[cfg(all(feature = "cuda", unix))]
pub(crate) fn write<T>(of: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    of.write().unwrap_or_else(PoisonError::into_inner)
}
