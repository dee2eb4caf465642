//! [`GemmError`]: why a product does not run.

use lowp_format::Code;
use lowp_kernels::KernelError;
use thiserror::Error;

/// What is wrong.
#[derive(Debug, Error)]
pub enum GemmError {
    /// A recipe that layers on a GPU do not run.
    #[error("{0}")]
    Unsupported(&'static str),
    /// Entries that no product reads as codes.
    #[error(
        "an operand has {code} codes; products take E4M3, E5M2 and E2M1 codes, and bf16 values"
    )]
    Codes {
        /// What they are.
        code: Code,
    },
    /// cuBLASLt was not found.
    #[error(
        "NVIDIA's cuBLASLt (libcublasLt.so.13 or .12) was not found; install CUDA's libraries and add their folder to \
         LD_LIBRARY_PATH, for example /usr/local/cuda/lib64"
    )]
    NoCublas,
    /// cuBLASLt has no kernel for a product.
    #[error(
        "cuBLASLt has no kernel for {product} at addresses that are multiples of {alignment} bytes ({why}); codes need multiples of 16, and \
         scales per row or per 128 need cuBLASLt 12.9 or later: install it, or choose another recipe"
    )]
    NoKernel {
        /// The product.
        product: String,
        /// What all addresses are multiples of.
        alignment: u32,
        /// Its status.
        why: String,
    },
    /// A product without elements, which libraries do not define alike.
    #[error("a product of {} x {} x {} has no elements; leave it out", sizes[0], sizes[1], sizes[2])]
    Empty {
        /// Rows, columns, and the length of the contracted axis.
        sizes: [usize; 3],
    },
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}
