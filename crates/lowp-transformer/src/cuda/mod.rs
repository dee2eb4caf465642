//! The model on a GPU.

mod activation;
mod attention;
mod batch;
mod block;
mod decodes;
mod documents;
mod error;
mod gemms;
mod head_norms;
mod linear;
mod model;
mod module;
mod network;
mod norm;
mod operand;
mod ops;
mod place;
mod sdpa;
mod trace;
mod transient;

pub use batch::Tokens;
pub use error::TransformerError;
pub use model::Transformer;
pub use sdpa::has_cudnn;
pub use trace::{Gathers, Profile};

use lowp_kernels::{Cuda, KernelError};

/// The compute capability of a device, as `(major, minor)`.
///
/// # Errors
/// The driver failed.
pub fn capability(cuda: &Cuda) -> Result<(i32, i32), KernelError> {
    cuda.capability()
}
