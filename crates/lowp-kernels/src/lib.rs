//! Arithmetic on jobs. A [`Backend`] never sees a recipe: every decision is taken before a job is
//! made. Work over any number of tensors is planned once ([`Backend::plan`]) and run many times
//! ([`Backend::run`]).

mod backend;
mod cpu;
mod error;
mod job;
mod table;

pub use backend::{AdamScalars, Backend, Element, StepScalars};
pub use cpu::{Cpu, CpuBuffer, CpuPlan, CpuRead, CpuWrite};
pub use error::KernelError;
pub use job::{
    AdamMode, AdamwJob, AmaxJob, BlockAmax, DecodeJob, EncodeJob, FlatBlocks, FlatEncodeJob,
    InterleaveJob, Moments, RepackJob, ScaleJob, Slot, Source, StochasticKey, SumSquaresJob,
    Target, TransposeJob, Work,
};
