//! Collectives between GPUs: `NcclComm` moves data with NCCL on the streams of the CUDA backend.
//!
//! The ranks are threads of one process or processes of many machines; they find each other by a
//! [`Control`](lowp_comm::Control). NCCL's library is found at run time: `libnccl.so.2`, in the folders that the loader
//! searches (`LD_LIBRARY_PATH`).
//!
//! # Example
//!
//! One rank of a world that torchrun, mpirun or srun started, with one GPU per rank.
//!
//! ```no_run
//! # #[cfg(feature = "cuda")]
//! # fn main() -> Result<(), lowp_comm::CommError> {
//! use lowp_kernels::{Backend, Cuda};
//! use lowp_nccl::{NcclComm, NcclOptions};
//! use lowp_comm::{Communicator, Launch, join};
//!
//! let options = NcclOptions::default();
//! let launch = Launch::from_env(options.limit, "example 1.0")?.expect("started by a launcher");
//! let cuda = Cuda::new(launch.local_rank)?;
//! let comm = NcclComm::new(join(&launch)?, &cuda, options)?;
//! let amax = cuda.upload(&[launch.rank as f32])?;
//! comm.backend().wait_for(&cuda)?;
//! comm.all_reduce_max(&amax)?;
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "cuda"))]
//! # fn main() {}
//! ```

#[cfg(feature = "cuda")]
mod batch;
#[cfg(feature = "cuda")]
mod comm;
#[cfg(any(feature = "cuda", test))]
mod exit;
#[cfg(feature = "cuda")]
mod options;
#[cfg(feature = "cuda")]
mod parts;
#[cfg(any(feature = "cuda", test))]
mod peer_layout;
#[cfg(feature = "cuda")]
mod peer_sums;
#[cfg(feature = "cuda")]
mod peers;
#[cfg(feature = "cuda")]
mod plans;
#[cfg(feature = "cuda")]
mod rank_order;
#[cfg(feature = "cuda")]
mod raw;
#[cfg(feature = "cuda")]
mod staging;
#[cfg(feature = "cuda")]
mod stop;
#[cfg(feature = "cuda")]
mod uneven;
#[cfg(any(feature = "cuda", test))]
mod watchdog;

#[cfg(feature = "cuda")]
pub use comm::NcclComm;
#[cfg(feature = "cuda")]
pub use options::{NcclOptions, Sums};
