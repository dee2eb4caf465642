//! [`CpuBuffer`]: a shared handle on host memory.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::memory::Memory;
use crate::KernelError;

/// A shared handle on host memory of fixed length. Cloning clones the handle, not the content.
pub struct CpuBuffer<T> {
    len: usize,
    /// Address of the first value. The memory is never resized, so it does not move.
    start: usize,
    values: Arc<RwLock<Memory<T>>>,
}

impl<T> CpuBuffer<T> {
    /// A buffer that owns `values`.
    pub fn from_vec(values: Vec<T>) -> Self {
        Self::new(values.into())
    }

    /// A buffer of `values`.
    pub(super) fn new(values: Memory<T>) -> Self {
        Self {
            len: values.len(),
            start: values.as_ptr() as usize,
            values: Arc::new(RwLock::new(values)),
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether both handles name the same memory.
    pub fn ptr_eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.values, &other.values)
    }

    /// The content, shared with other readers; waits while it is written.
    ///
    /// # Errors
    /// [`KernelError::Poisoned`] if a thread failed while it wrote the buffer.
    pub fn read(&self) -> Result<CpuRead<'_, T>, KernelError> {
        self.values
            .read()
            .map(CpuRead)
            .map_err(|_| KernelError::Poisoned)
    }

    /// The content, exclusively; waits while it is used.
    ///
    /// # Errors
    /// [`KernelError::Poisoned`] if a thread failed while it wrote the buffer.
    pub fn write(&self) -> Result<CpuWrite<'_, T>, KernelError> {
        self.values
            .write()
            .map(CpuWrite)
            .map_err(|_| KernelError::Poisoned)
    }

    /// The memory, as addresses.
    pub(crate) fn span(&self) -> Range<usize> {
        self.start..self.start + self.len * size_of::<T>()
    }

    /// The identity of the memory, and the order in which plans lock it.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.values) as usize
    }
}

impl<T> Clone for CpuBuffer<T> {
    fn clone(&self) -> Self {
        Self {
            len: self.len,
            start: self.start,
            values: Arc::clone(&self.values),
        }
    }
}

/// Prints the length only: the content may be large, or locked by the thread that prints.
impl<T> fmt::Debug for CpuBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuBuffer({} entries)", self.len)
    }
}

/// Read access to a [`CpuBuffer`]; a slice while it lives.
#[derive(Debug)]
pub struct CpuRead<'a, T>(RwLockReadGuard<'a, Memory<T>>);

impl<T> Deref for CpuRead<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

/// Write access to a [`CpuBuffer`]; a slice while it lives.
#[derive(Debug)]
pub struct CpuWrite<'a, T>(RwLockWriteGuard<'a, Memory<T>>);

impl<T> Deref for CpuWrite<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for CpuWrite<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}
