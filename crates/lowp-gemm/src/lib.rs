//! Matrix products. On a GPU they are those of NVIDIA's cuBLASLt, of bf16 and f32 values and of FP8 and FP4 codes with their scales: [`table`] lists
//! which product multiplies which operands. Each product is planned once; after that, a call costs only the enqueue of a kernel.
//! [`Products`] are those of bf16 matrices on any backend, [`dense`] those of f32 on the CPU.
//!
//! ```
//! use lowp_format::{AnyRecipe, Recipe};
//! use lowp_gemm::table::{GemmKind, Pass};
//!
//! let hopper = (9, 0);
//! for recipe in AnyRecipe::all() {
//!     for pass in Pass::ALL {
//!         let kind = GemmKind::of_recipe(&recipe, pass, hopper);
//!         println!("{}: {} in {}", recipe.name(), pass.name(), kind.describe());
//!         // Ampere multiplies no codes.
//!         assert_eq!(GemmKind::of_recipe(&recipe, pass, (8, 0)), GemmKind::Bf16);
//!     }
//! }
//! ```
//!
//! Products on a GPU need the feature `cuda`. cuBLASLt is found at run time: `libcublasLt.so.13`
//! or `.12`, in the folders that the loader searches (`LD_LIBRARY_PATH`), or the library that the process has already loaded, as with PyTorch.
//!
//! ```no_run
//! # #[cfg(feature = "cuda")]
//! # fn main() -> Result<(), lowp_gemm::GemmError> {
//! use lowp_kernels::{Backend, Cuda};
//! use lowp_gemm::{CublasLt, Dtype, GemmDesc, OperandDesc, OperandPtr, Scalars, Workspace};
//!
//! let cuda = Cuda::new(0)?;
//! let (cublaslt, workspace) = (CublasLt::new(&cuda)?, Workspace::from(cuda.alloc(Workspace::BYTES)?));
//! // y[8, 16] = x[8, 32] w[16, 32]^T, whose contracted axis is the inner one of both.
//! let desc = GemmDesc::new([8, 16, 32], [OperandDesc::plain(Dtype::F32, true); 2], Dtype::F32);
//! let (x, w, y) = (cuda.upload(&[1.0f32; 8 * 32])?, cuda.upload(&[0.5f32; 16 * 32])?, cuda.alloc::<f32>(8 * 16)?);
//! let operands = [&x, &w].map(|values| OperandPtr::values(values.pointer()));
//! // SAFETY: the buffers have these shapes, and live until the work is done.
//! unsafe { cublaslt.run(&desc, operands, y.pointer(), 0, Scalars::ONE, &workspace)? };
//! assert_eq!(cuda.download(&y)?, [16.0; 8 * 16]);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "cuda"))]
//! # fn main() {}
//! ```

mod call;
mod cpu;
#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(feature = "cuda")]
mod cuda;
pub mod dense;
mod desc;
mod error;
#[cfg(feature = "cuda")]
mod operand;
#[cfg(any(feature = "cuda", test))]
mod owned;
mod products;
pub mod table;
#[cfg(feature = "cuda")]
mod workspace;

pub use call::{Call, CallOperand, Matrix};
pub use cpu::CpuProducts;
#[cfg(feature = "cuda")]
pub use cublaslt::CublasLt;
#[cfg(feature = "cuda")]
pub use cuda::CudaProducts;
pub use desc::{Dtype, Epilogue, GemmDesc, OperandDesc, Scalars, ScaleMode};
pub use error::GemmError;
#[cfg(feature = "cuda")]
pub use operand::{Operand, OperandPtr};
pub use products::{DEVICE_WORKSPACE, Factor, Multiplies, ProductJob, Products};
pub use table::GemmKind;
#[cfg(feature = "cuda")]
pub use workspace::Workspace;
