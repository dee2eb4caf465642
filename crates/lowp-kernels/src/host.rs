//! Memory of the host, where running out of it is an error.

#![expect(unsafe_code, reason = "asks for zeroed memory")]

use std::alloc::{Layout, alloc_zeroed};

use crate::{Element, KernelError};

/// `len` zeros. Memory that is fresh from the system is zero without being touched.
///
/// # Errors
/// [`KernelError::NoMemory`] where the system has no room, or the bytes cannot be addressed.
pub(crate) fn zeroed<T: Element>(len: usize) -> Result<Vec<T>, KernelError> {
    let short = || KernelError::no_memory::<T>(len);
    let layout = Layout::array::<T>(len).map_err(|_| short())?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the layout has bytes; the result is checked.
    let start = unsafe { alloc_zeroed(layout) }.cast::<T>();
    if start.is_null() {
        return Err(short());
    }
    // SAFETY: the global allocator, which `Vec` uses too, gave `len` values of `T` with the alignment of
    // `T`. All their bits are zero, which is the number 0 of every `Element`: u8, f32 and bf16.
    Ok(unsafe { Vec::from_raw_parts(start, len, len) })
}
