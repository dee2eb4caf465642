//! [`Memory`]: values on the host, and where large ones lie.

#![expect(unsafe_code, reason = "reads memory of other libraries")]

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::host::zeroed;
use crate::{Element, KernelError};

/// Bytes from which the first address is chosen.
const LARGE: usize = 2 << 20;
/// Bytes of a page.
const PAGE: usize = 4096;
/// Classes of addresses: each large buffer begins in the next one.
const CLASSES: usize = 16;

/// A vector whose first values may be left unused, or values that someone else owns.
#[derive(Debug)]
pub(super) struct Memory<T> {
    values: Values<T>,
    start: usize,
}

#[derive(Debug)]
enum Values<T> {
    Own(Vec<T>),
    Foreign(Foreign<T>),
}

/// Values that someone else owns.
struct Foreign<T> {
    pointer: *mut T,
    len: usize,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: whoever made it promised that any thread may use the values (`Memory::foreign`), and the owner may go to any.
unsafe impl<T: Send> Send for Foreign<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Sync> Sync for Foreign<T> {}

impl<T> fmt::Debug for Foreign<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} values of another library", self.len)
    }
}

impl<T> Memory<T> {
    /// The `len` values at `pointer`, which `owner` keeps.
    ///
    /// # Safety
    /// Until `owner` is dropped, `pointer` must be aligned and valid for reads and writes of `len` initialised values by
    /// any thread, and nobody else may touch them while a buffer of them is read or written.
    pub(super) unsafe fn foreign(
        pointer: *mut T,
        len: usize,
        owner: impl Any + Send + Sync,
    ) -> Self {
        let _owner: Box<dyn Any + Send + Sync> = Box::new(owner);
        let foreign = Foreign {
            pointer,
            len,
            _owner,
        };
        Self {
            values: Values::Foreign(foreign),
            start: 0,
        }
    }
}

impl<T> From<Vec<T>> for Memory<T> {
    fn from(values: Vec<T>) -> Self {
        let values = Values::Own(values);
        Self { values, start: 0 }
    }
}

impl<T> Deref for Memory<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match &self.values {
            Values::Own(values) => &values[self.start..],
            // SAFETY: the promise of `Memory::foreign`.
            Values::Foreign(foreign) => unsafe {
                std::slice::from_raw_parts(foreign.pointer, foreign.len)
            },
        }
    }
}

impl<T> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.values {
            Values::Own(values) => &mut values[self.start..],
            // SAFETY: the promise of `Memory::foreign`; the lock around this memory lets one writer in.
            Values::Foreign(foreign) => unsafe {
                std::slice::from_raw_parts_mut(foreign.pointer, foreign.len)
            },
        }
    }
}

/// `len` zeros, in huge pages where the system gives them on request.
///
/// A kernel walks several buffers at once. AMD Zen predicts the way of its first-level cache from a
/// hash of bits 12 to 27 of an address, and lines of one hash evict each other: AdamW over four
/// buffers of 128 MiB, one page apart as the system hands them out, runs at 0.2 of memcpy's speed
/// instead of 0.5. Large buffers therefore begin in different classes of that hash, one after the other.
pub(super) fn zeros<T: Element>(len: usize) -> Result<Memory<T>, KernelError> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    in_next_class(len, &NEXT)
}

/// `len` zeros; a large buffer begins in the class that is `next`.
fn in_next_class<T: Element>(len: usize, next: &AtomicUsize) -> Result<Memory<T>, KernelError> {
    if len.saturating_mul(size_of::<T>()) < LARGE {
        return Ok(zeroed(len)?.into());
    }
    in_class(len, next.fetch_add(1, Ordering::Relaxed) % CLASSES)
}

/// `len` zeros that begin in the class `chosen`.
fn in_class<T: Element>(len: usize, chosen: usize) -> Result<Memory<T>, KernelError> {
    let size = size_of::<T>();
    let spare = 2 * CLASSES * PAGE / size;
    // The error says what was asked for, without the spare pages.
    let values = len.checked_add(spare).and_then(|all| zeroed(all).ok());
    let mut values = values.ok_or_else(|| KernelError::no_memory::<T>(len))?;
    let base = values.as_ptr() as usize;
    // Whole cache lines, then the first page of the class.
    let line = base.next_multiple_of(64) - base;
    let page = (0..2 * CLASSES - 1).find(|page| class(base + line + page * PAGE) == chosen);
    let start = (line + page.unwrap_or(0) * PAGE) / size;
    values.truncate(start + len);
    let values = Values::Own(values);
    Ok(Memory { values, start })
}

/// The part of the hash that the page of an address can choose.
fn class(address: usize) -> usize {
    let bit = |n: u32| (address >> n) & 1;
    let pairs = [(12, 27), (13, 26), (14, 25), (15, 20)];
    pairs
        .iter()
        .fold(0, |class, &(a, b)| class << 1 | (bit(a) ^ bit(b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    fn zeros_of_any_size_are_zeros() {
        for len in [0, 1, 1000, (1 << 20) + 3, (9 << 20) + 3] {
            let values = zeros::<f32>(len).unwrap();
            assert_eq!(values.len(), len);
            assert!(len < LARGE || values.as_ptr().addr().is_multiple_of(64));
            assert!(values.iter().all(|x| x.to_bits() == 0));
        }
    }

    #[test]
    fn each_large_buffer_takes_the_next_class() {
        let next = AtomicUsize::new(0);
        let mut buffers = Vec::new();
        for number in 0..3 * CLASSES {
            // Small ones take no class.
            assert!(in_next_class::<u8>(LARGE - 1, &next).is_ok());
            let buffer = in_next_class::<f32>(LARGE / 4 + number, &next).unwrap();
            let address = buffer.as_ptr().addr();
            assert_eq!(class(address), number % CLASSES, "{address:#x}");
            assert!(address.is_multiple_of(64), "{address:#x}");
            buffers.push(buffer);
        }
    }

    #[test]
    fn more_than_there_is_is_an_error() {
        for len in [
            usize::MAX,
            usize::MAX / 2,
            usize::MAX / 4,
            isize::MAX as usize / 4 - (1 << 20),
        ] {
            let bytes = len as u128 * 4;
            let short = Err(KernelError::NoMemory { bytes });
            // Used, since the compiler leaves out an allocation that nobody uses.
            assert_eq!(black_box(zeros::<f32>(len)).map(|_| ()), short);
            assert_eq!(black_box(zeroed::<f32>(len)).map(|_| ()), short);
        }
    }
}
