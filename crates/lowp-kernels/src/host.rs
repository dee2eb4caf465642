//! Memory of the host, where running out of it is an error.

use crate::{Element, KernelError};

/// `len` zeros. Memory that is fresh from the system is zero without being touched.
pub(crate) fn zeroed<T: Element>(len: usize) -> Result<Vec<T>, KernelError> {
    let zeros = bytemuck::allocation::try_zeroed_vec(len);
    zeros.map_err(|()| KernelError::no_memory::<T>(len))
}
