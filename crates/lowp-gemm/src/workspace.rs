//! [`Workspace`]: memory that products work in.

use lowp_kernels::CudaBuffer;

use crate::products::DEVICE_WORKSPACE;

/// Memory that products of a stream work in, one after another. Kernels of cuBLASLt differ in how much of it they need, and those that
/// need more than there is are not chosen; [`Workspace::BYTES`] are enough for all of them.
#[derive(Clone, Debug)]
pub struct Workspace {
    pub(crate) pointer: u64,
    pub(crate) bytes: usize,
    /// Kept by graphs, too.
    pub(crate) owner: Option<CudaBuffer<u8>>,
}

impl From<CudaBuffer<u8>> for Workspace {
    fn from(owner: CudaBuffer<u8>) -> Self {
        Self {
            pointer: owner.pointer(),
            bytes: owner.len(),
            owner: Some(owner),
        }
    }
}

impl Workspace {
    /// Bytes that products of a large model work in.
    pub const BYTES: usize = DEVICE_WORKSPACE;

    /// Memory of another library, which sees to it that nothing else uses it before the work that the stream is given with it.
    pub fn foreign(pointer: u64, bytes: usize) -> Self {
        Self {
            pointer,
            bytes,
            owner: None,
        }
    }
}
