//! [`CpuBuffer`]: a shared handle on host memory.

#![expect(unsafe_code, reason = "takes memory of other libraries")]

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::graph::not_in_capture;
use super::memory::Memory;
use crate::host::zeroed;
use crate::{DeviceBuffer, Element, KernelError};

/// A shared handle on host memory of fixed length, or on a part of it. Cloning clones the handle, not the
/// content.
pub struct CpuBuffer<T> {
    /// Entries of the memory that the handle names.
    range: Range<usize>,
    /// Address of the memory's first value. It is never resized, so it does not move.
    base: usize,
    values: Arc<RwLock<Memory<T>>>,
}

impl<T> CpuBuffer<T> {
    /// A buffer that owns `values`.
    pub fn from_vec(values: Vec<T>) -> Self {
        Self::new(values.into())
    }

    /// Wraps host memory that someone else owns: `len` values at `pointer`. `owner` is dropped when no handle, plan or
    /// graph uses the memory any more.
    ///
    /// # Errors
    /// [`KernelError::Misaligned`] if `pointer` is not aligned to a value, or null with `len > 0`.
    ///
    /// # Safety
    /// Until `owner` is dropped, `pointer` must be valid for reads and writes of `len` initialised values by any thread, and
    /// nobody else may touch them while work that uses this buffer, or a guard of it, is there.
    pub unsafe fn from_raw(
        pointer: *mut T,
        len: usize,
        owner: impl Any + Send + Sync,
    ) -> Result<Self, KernelError> {
        if len > 0 && (pointer.is_null() || !pointer.is_aligned()) {
            let (pointer, size) = (pointer.addr() as u64, size_of::<T>());
            return Err(KernelError::Misaligned { pointer, size });
        }
        let pointer = match len {
            0 => NonNull::dangling().as_ptr(),
            _ => pointer,
        };
        // SAFETY: the caller's promise; of no values, any aligned pointer is valid.
        Ok(Self::new(unsafe { Memory::foreign(pointer, len, owner) }))
    }

    /// A buffer of `values`.
    pub(super) fn new(values: Memory<T>) -> Self {
        Self {
            range: 0..values.len(),
            base: values.as_ptr() as usize,
            values: Arc::new(RwLock::new(values)),
        }
    }

    /// Entries `range` of this buffer, which exist.
    pub(super) fn view(&self, range: Range<usize>) -> Self {
        let start = self.range.start;
        Self {
            range: start + range.start..start + range.end,
            ..self.clone()
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Whether both handles name parts of the same memory.
    pub fn ptr_eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.values, &other.values)
    }

    /// The entries of the memory that the handle names.
    pub(super) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The memory of which the handle names a part.
    pub(super) fn memory(&self) -> &RwLock<Memory<T>> {
        &self.values
    }

    /// The content, shared with other readers; waits while any part of the memory is written.
    ///
    /// # Errors
    /// [`KernelError::Poisoned`] if a thread failed while it wrote the buffer.
    pub fn read(&self) -> Result<CpuRead<'_, T>, KernelError> {
        self.values
            .read()
            .map(|memory| CpuRead {
                memory,
                range: self.range(),
            })
            .map_err(|_| KernelError::Poisoned)
    }

    /// The content, exclusively; waits while any part of the memory is used.
    ///
    /// # Errors
    /// [`KernelError::Poisoned`] if a thread failed while it wrote the buffer.
    pub fn write(&self) -> Result<CpuWrite<'_, T>, KernelError> {
        self.values
            .write()
            .map(|memory| CpuWrite {
                memory,
                range: self.range(),
            })
            .map_err(|_| KernelError::Poisoned)
    }

    /// The memory, as addresses.
    pub(crate) fn span(&self) -> Range<usize> {
        let address = |entry: usize| self.base + entry * size_of::<T>();
        address(self.range.start)..address(self.range.end)
    }

    /// The identity of the memory, and the order in which plans lock it.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.values) as usize
    }
}

impl<T: Element> DeviceBuffer<T> for CpuBuffer<T> {
    fn len(&self) -> usize {
        self.len()
    }

    fn to_vec(&self) -> Result<Vec<T>, KernelError> {
        not_in_capture("a read to the host")?;
        let mut values = zeroed(self.len())?;
        values.copy_from_slice(&self.read()?);
        Ok(values)
    }
}

/// Copies `from` to `to`, of the same length and apart from it.
pub(super) fn copy<T: Copy>(from: &CpuBuffer<T>, to: &CpuBuffer<T>) -> Result<(), KernelError> {
    if from.ptr_eq(to) {
        let mut memory = to.memory().write().map_err(|_| KernelError::Poisoned)?;
        memory.copy_within(from.range(), to.range.start);
        return Ok(());
    }
    // Locks are taken in the order in which plans take theirs, so nobody waits in a circle.
    let (source, mut target);
    if from.address() < to.address() {
        source = from.read()?;
        target = to.write()?;
    } else {
        target = to.write()?;
        source = from.read()?;
    }
    target.copy_from_slice(&source);
    Ok(())
}

impl<T> Clone for CpuBuffer<T> {
    fn clone(&self) -> Self {
        Self {
            range: self.range.clone(),
            base: self.base,
            values: Arc::clone(&self.values),
        }
    }
}

/// Prints the length only: the content may be large, or locked by the thread that prints.
impl<T> fmt::Debug for CpuBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuBuffer({} entries)", self.len())
    }
}

/// Read access to a [`CpuBuffer`]; a slice while it lives.
#[derive(Debug)]
pub struct CpuRead<'a, T> {
    memory: RwLockReadGuard<'a, Memory<T>>,
    range: Range<usize>,
}

impl<T> Deref for CpuRead<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.memory[self.range.clone()]
    }
}

/// Write access to a [`CpuBuffer`]; a slice while it lives.
#[derive(Debug)]
pub struct CpuWrite<'a, T> {
    memory: RwLockWriteGuard<'a, Memory<T>>,
    range: Range<usize>,
}

impl<T> Deref for CpuWrite<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.memory[self.range.clone()]
    }
}

impl<T> DerefMut for CpuWrite<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Cpu};

    /// Memory of someone else is read and written where it lies, views included, and its owner goes with the last handle.
    #[test]
    fn foreign_memory_is_shared_until_the_last_handle_goes() {
        let mut values = vec![1.0f32, 2.0, 3.0, 4.0];
        let (pointer, owner) = (values.as_mut_ptr(), Arc::new(()));
        // SAFETY: `values` outlives the buffer, and is looked at when nothing uses the buffer.
        let buffer = unsafe { CpuBuffer::from_raw(pointer, 4, Arc::clone(&owner)) }.unwrap();
        assert_eq!(Cpu.span(&buffer).start, pointer.addr());
        let last = Cpu.view(&buffer, 2..4).unwrap();
        drop(buffer);
        Cpu.write(&last, 1, &[9.0]).unwrap();
        assert_eq!(Cpu.download(&last).unwrap(), [3.0, 9.0]);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(last);
        assert_eq!(Arc::strong_count(&owner), 1);
        assert_eq!(values, [1.0, 2.0, 3.0, 9.0]);
    }

    #[test]
    fn addresses_of_no_entry_are_rejected() {
        let mut bytes = [0u32; 2];
        let odd = bytes
            .as_mut_ptr()
            .cast::<u8>()
            .wrapping_add(1)
            .cast::<f32>();
        for pointer in [odd, std::ptr::null_mut()] {
            // SAFETY: rejected before anything is read.
            let made = unsafe { CpuBuffer::from_raw(pointer, 1, ()) };
            assert!(matches!(made, Err(KernelError::Misaligned { .. })));
        }
        // SAFETY: of no values.
        let none = unsafe { CpuBuffer::<f32>::from_raw(std::ptr::null_mut(), 0, ()) }.unwrap();
        assert!(none.read().unwrap().is_empty());
    }
}
