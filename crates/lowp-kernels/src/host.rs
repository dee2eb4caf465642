//! Memory of the host, where running out of it is an error.

#![expect(unsafe_code, reason = "asks the system for huge pages")]

use crate::{Element, KernelError};

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
/// Bytes from which huge pages are asked for. Smaller buffers leave the allocator memory that it
/// reuses for small things, each of which would then occupy a huge page.
const ADVISED: usize = 32 << 20;

/// `len` zeros, in huge pages where they are many and the system gives them on request. Memory that is fresh from the system is zero
/// without being touched.
///
/// # Errors
/// The host has no room.
pub fn zeroed<T: Element>(len: usize) -> Result<Vec<T>, KernelError> {
    let zeros = bytemuck::allocation::try_zeroed_vec(len);
    let mut zeros = zeros.map_err(|()| KernelError::no_memory::<T>(len))?;
    advise(&mut zeros);
    Ok(zeros)
}

/// Asks for huge pages in the part of `memory` that can have them, if it is large. What the system
/// answers does not matter.
#[cfg(target_os = "linux")]
fn advise<T>(memory: &mut [T]) {
    let bytes = std::mem::size_of_val(memory);
    let start = memory.as_mut_ptr().cast::<u8>();
    let skip = start.align_offset(HUGE);
    let len = bytes.saturating_sub(skip) / HUGE * HUGE;
    if bytes >= ADVISED {
        // SAFETY: the range lies within `memory`, and the advice changes no content.
        unsafe {
            libc::madvise(start.add(skip).cast(), len, libc::MADV_HUGEPAGE);
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn advise<T>(_: &mut [T]) {}
