//! Ranks: control on the host (between threads, or between processes over TCP), communicators between devices, and meshes.
//!
//! # Example
//!
//! Two ranks, as threads, add their values.
//!
//! ```
//! use std::time::Duration;
//!
//! use lowp_comm::{CommError, run_ranks};
//! use lowp_kernels::{Backend, Cpu};
//!
//! let sums = run_ranks(&Cpu, 2, Duration::from_secs(10), |rank, comm| {
//!     let values = Cpu.upload(&[rank as f32, 1.0])?;
//!     comm.all_reduce_sum(&values)?;
//!     Ok::<_, CommError>(Cpu.download(&values)?)
//! })?;
//! assert_eq!(sums, [[1.0, 2.0], [1.0, 2.0]]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod call_log;
mod comm;
mod control;
mod error;
mod mesh;

pub use call_log::{CallLog, CallNames, CallOrder, CompareAmong, digest};
pub use comm::{
    Adder, Collective, Communicator, Counters, Direction, GatherItem, GradWire, HostComm,
    LARGE_PIECE, LocalComm, MAX_PEER_GPUS, Move, OwnedItem, OwnedPiece, RanksFailed, ReduceItem,
    ReduceStaging, StagedGrad, Started, Traffic, UnevenRun, even, is_large, or_abort, ordered,
    run_comms, run_ranks, run_ranks_on, spanned,
};
pub use control::{Control, Launch, MAX_ALL_GATHER, join, threads, without_backtraces};
pub use error::{CommError, Departure};
pub use mesh::{Mesh, MeshComm};
