//! Host memory for large buffers.

use std::mem::MaybeUninit;

/// Bytes of a huge page, and the size from which memory is worth a thought.
const LARGE: usize = 2 << 20;
/// Bytes that a large buffer has to spare.
///
/// A kernel walks several buffers at once. Those of 2^n bytes, one page apart from each other, as
/// the system hands them out, share their way of the first-level cache on AMD Zen, which tells ways
/// by a hash of the address: AdamW then runs at 0.2 of memcpy's speed instead of 0.5.
const SPARE: usize = 16 << 10;

/// `len` default values, in huge pages where the system gives them on request.
pub(super) fn zeros<T: Copy + Default>(len: usize) -> Vec<T> {
    let size = size_of::<T>();
    let spare = if len.saturating_mul(size) < LARGE {
        0
    } else {
        SPARE / size
    };
    let mut values = Vec::with_capacity(len + spare);
    advise(values.spare_capacity_mut());
    values.resize(len, T::default());
    values
}

/// Asks for huge pages in the part of `memory` that can have them. What the system answers does
/// not matter.
#[cfg(target_os = "linux")]
fn advise<T>(memory: &mut [MaybeUninit<T>]) {
    let bytes = std::mem::size_of_val(memory);
    let start = memory.as_mut_ptr().cast::<u8>();
    let skip = start.align_offset(LARGE);
    let len = bytes.saturating_sub(skip) / LARGE * LARGE;
    if len > 0 {
        // SAFETY: the range lies within `memory`, and the advice changes no content.
        unsafe {
            libc::madvise(start.add(skip).cast(), len, libc::MADV_HUGEPAGE);
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn advise<T>(_: &mut [MaybeUninit<T>]) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_of_any_size_are_zeros() {
        for len in [0, 1, 1000, (5 << 20) + 3] {
            let values = zeros::<f32>(len);
            assert_eq!(values.len(), len);
            assert!(values.iter().all(|x| x.to_bits() == 0));
        }
    }
}
