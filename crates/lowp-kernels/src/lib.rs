//! Arithmetic on jobs. A [`Backend`] never sees a recipe: a job leaves no decision open. Work over any number of tensors is planned once ([`Backend::plan`]) and run many times
//! ([`Backend::run`]).
//!
//! The same work gives the same bits on every backend, for every number of threads and every
//! instruction set: all equal [`mod@reference`], which implements docs/numerics.md element by
//! element.
//!
//! # Example
//!
//! Cast a matrix on the CPU, and read it back.
//!
//! ```
//! use lowp_kernels::{AnyRecipe, Cpu, Quantized, Shape};
//!
//! let recipe = AnyRecipe::from_name("mxfp8", &Default::default())?;
//! let values: Vec<f32> = (0..256u16).map(|i| f32::from(i) / 16.0 - 8.0).collect();
//! let weight = Quantized::encode(&Cpu, recipe, Shape::new(4, 64), &values)?;
//! for (x, y) in values.iter().zip(weight.decode()?) {
//!     assert!((x - y).abs() <= x.abs() / 16.0);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The same as jobs, planned once and run in every step.
//!
//! ```
//! use lowp_kernels::{AnyRecipe, Backend, Cpu, DeviceBuffer, EncodeJob, Shape, Source, Usage, Work};
//!
//! let recipe = AnyRecipe::from_name("mxfp8", &Default::default())?;
//! let weight = Cpu.alloc::<f32>(256)?;
//! let shape = Shape::new(4, 64);
//! let job = EncodeJob::new(&Cpu, &recipe, shape, Usage::ROWWISE, Source::F32(weight.clone()))?;
//! let codes = job.targets[0].bytes.clone();
//! let plan = Cpu.plan(Work::Encode(vec![job]))?;
//! for step in 0u8..3 {
//!     Cpu.write(&weight, 0, &[f32::from(step); 256])?;
//!     Cpu.run(&plan, &Default::default())?;
//! }
//! assert_eq!(codes.to_vec()?, [0x78; 256]); // 2 is 256 * 2^-7
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(feature = "cuda", doc = include_str!("cuda/example.md"))]

mod backend;
#[cfg(feature = "cuda")]
pub mod bench;
mod buffer;
mod check;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod element;
mod error;
mod from_recipe;
mod host;
mod ingredients;
mod job;
mod kernel_code;
mod lanes;
mod master;
mod pending;
mod power;
mod quantized;
pub mod reference;
mod rounding;
mod rule;
mod runs;
mod scalars;
#[doc(hidden)]
pub mod sealed;
mod state;
#[doc(hidden)]
pub mod testing;

pub use backend::{Backend, Master, Source, State};
pub use buffer::DeviceBuffer;
pub use cpu::{Cpu, CpuBuffer, CpuGraph, CpuPlan, CpuRead, CpuWrite};
#[cfg(feature = "cuda")]
pub use cuda::{
    Cuda, CudaBuffer, CudaEvent, CudaFunction, CudaGraph, CudaLibrary, CudaMark, CudaPlan,
    CurrentContext,
};
pub use element::{Element, FloatDtype};
pub use error::KernelError;
pub use host::zeroed;
pub use ingredients::{rounds, rounds_by_block};
pub use job::{
    AmaxJob, BlockAmax, ConvertJob, DecodeJob, EncodeJob, FlatBlocks, FlatEncodeJob, HistoryJob,
    InterleaveJob, MomentumJob, NormalizeJob, OwnPart, PieceRows, RearrangeJob, Rearranged,
    RepackJob, RoundJob, Slot, StepScalarsJob, StochasticKey, SumJob, SumPartsJob, SumSquaresJob,
    Target, TensorInput, TransposeJob, UpdateAmax, UpdateJob, UpdateRandom, Work,
};
pub use kernel_code::KernelCode;
pub use master::{MasterDtype, joined};
pub use pending::Pending;
pub use quantized::Quantized;
pub use rule::{Rule, StateName};
pub use runs::Runs;
pub use scalars::{GradContribution, GroupScalars, StepCounts, StepRecord, StepScalars};
pub use state::{StateDtype, decoded};

// What signatures here need of other crates.
pub use half::bf16;
pub use lowp_format::{
    AmaxAlgorithm, AnyRecipe, Axis, BufferKey, BufferSpec, Code, Form, FormatError, KernelKey,
    MxScale, Orientation, Part, QuantizedTensor, Recipe, RecipeOptions, ScaleLayout, ScaleRule,
    Shape, SourceRounding, Usage,
};
