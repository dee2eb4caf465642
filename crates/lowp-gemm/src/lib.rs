//! Which product multiplies which operands ([`table`]), and the product: by NVIDIA's cuBLASLt, over bf16 and f32 values and over FP8 and
//! FP4 codes with their scales. Each is planned once: a call then costs the host what cuBLASLt takes to enqueue a kernel.
//!
//! ```
//! use lowp_format::{AnyRecipe, Recipe};
//! use lowp_gemm::table::{Pass, Product};
//!
//! let hopper = (9, 0);
//! for recipe in AnyRecipe::all() {
//!     for pass in Pass::ALL {
//!         let product = Product::of_recipe(&recipe, pass, hopper);
//!         println!("{}: {} in {}", recipe.name(), pass.name(), product.describe());
//!         // Ampere multiplies no codes.
//!         assert_eq!(Product::of_recipe(&recipe, pass, (8, 0)), Product::Bf16);
//!     }
//! }
//! ```
//!
//! Products themselves need the feature `cuda`. cuBLASLt is found at run time: `libcublasLt.so.13` or `.12`, in the folders that the loader
//! searches (`LD_LIBRARY_PATH`), or the one that the process has loaded already, as PyTorch's has.
//!
//! ```no_run
//! # #[cfg(feature = "cuda")]
//! # fn main() -> Result<(), lowp_gemm::MatmulError> {
//! use lowp_kernels::{Backend, Cuda};
//! use lowp_gemm::{Dtype, Factors, Matmuls, Place, Product, Scale, Side, WORKSPACE, Workspace};
//!
//! let cuda = Cuda::new(0)?;
//! let (matmuls, workspace) = (Matmuls::new(&cuda)?, Workspace::from(cuda.alloc(WORKSPACE)?));
//! // y[8, 16] = x[8, 32] w[16, 32]^T, whose contracted axis is the inner one of both.
//! let values = Side { dtype: Dtype::F32, scale: Scale::None, k_inner: true, stride: 0 };
//! let (rows, cols, k) = (8, 16, 32);
//! let product = Product {
//!     rows, cols, k,
//!     left: values, right: values, out: Dtype::F32, out_stride: 0, batch: 1,
//!     bias: false, fast: false, device_factors: false,
//! };
//! let (x, w, y) = (cuda.upload(&[1.0f32; 8 * 32])?, cuda.upload(&[0.5f32; 16 * 32])?, cuda.alloc::<f32>(8 * 16)?);
//! let places = [Place::values(x.pointer()), Place::values(w.pointer())];
//! // SAFETY: the buffers have these shapes, and live until the work is done.
//! unsafe { matmuls.run(&product, places, y.pointer(), 0, Factors::Host(1.0, false), &workspace)? };
//! assert_eq!(cuda.download(&y)?, [16.0; 8 * 16]);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "cuda"))]
//! # fn main() {}
//! ```
#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(feature = "cuda")]
mod error;
#[cfg(feature = "cuda")]
mod operand;
pub mod table;
#[cfg(feature = "cuda")]
mod workspace;

#[cfg(feature = "cuda")]
pub use cublaslt::{Dtype, Factors, Matmuls, Place, Product, Scale, Side};
#[cfg(feature = "cuda")]
pub use error::MatmulError;
#[cfg(feature = "cuda")]
pub use operand::Ready;
#[cfg(feature = "cuda")]
pub use workspace::{WORKSPACE, Workspace};
