//! Who owns what: shards of quantized matrices, meshes of ranks, the collectives between them, and
//! the gather engine that turns shards into full tensors for the time they are needed.
//!
//! # Example
//!
//! Two ranks, as threads. Each quantizes its own rows; the gathered bytes are those of the full
//! matrix quantized at once.
//!
//! ```
//! use std::time::Duration;
//!
//! use lowp_format::{AnyRecipe, Phase, QuantizedTensor, Recipe, RecipeOptions, Shape, Usage};
//! use lowp_kernels::{Backend, Cpu, EncodeJob, Source, Target, Work};
//! use lowp_shard::{GatherGroup, GatherPool, ShardError, ShardSpec, ShardedTensor, run_ranks};
//!
//! fn quantize(
//!     cpu: &Cpu,
//!     values: &[f32],
//!     to: &QuantizedTensor<<Cpu as Backend>::Buffer<u8>>,
//! ) -> Result<(), ShardError> {
//!     let (recipe, shape) = (to.recipe(), to.shape());
//!     let targets = to.buffers().iter();
//!     let targets = targets.map(|b| Target { spec: b.spec, bytes: b.storage.clone() });
//!     cpu.once(Work::Encode(vec![EncodeJob {
//!         shape,
//!         kernel: recipe.kernel(),
//!         source: Source::F32(cpu.upload(values)?),
//!         source_rounding: recipe.source_rounding(),
//!         tensor: None,
//!         targets: targets.collect(),
//!         stochastic: None,
//!     }]))?;
//!     Ok(())
//! }
//!
//! let cpu = Cpu::new();
//! let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
//! let shape = Shape::new(96, 64);
//! let weights: Vec<f32> = (0..shape.elements()).map(|i| (i as f32).sin()).collect();
//!
//! let whole = QuantizedTensor::new(recipe, shape, Usage::ROWWISE, |_, n| cpu.alloc(n))?;
//! quantize(&cpu, &weights, &whole)?;
//!
//! run_ranks(&cpu, 2, Duration::from_secs(10), |rank, comm| {
//!     let spec = ShardSpec::new(&recipe, shape, 2, rank)?;
//!     let shard = ShardedTensor::new(&cpu, recipe, spec)?;
//!     quantize(&cpu, &weights[shard.spec().elements()], shard.local())?;
//!
//!     let pool = GatherPool::new(&cpu);
//!     let mut layer = GatherGroup::new(&cpu, comm, &pool, vec![shard], true)?;
//!     layer.unshard(Phase::Forward)?;
//!     for (full, expected) in layer.tensor(0)?.buffers().iter().zip(whole.buffers()) {
//!         assert_eq!(cpu.download(&full.storage)?, cpu.download(&expected.storage)?);
//!     }
//!     layer.reshard();
//!     Ok::<(), ShardError>(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod comm;
mod error;
mod flat_shard;
mod gather;
mod init;
mod mesh;
mod requantize;
mod scale_book;
mod shard;
mod whole;

pub use comm::{
    Communicator, GatherItem, GradWire, LocalComm, RanksFailed, ReduceItem, Traffic, run_ranks,
};
pub use error::ShardError;
pub use flat_shard::FlatShard;
pub use gather::{GatherAccount, GatherGroup, GatherPool, ParamAccount};
pub use init::Init;
pub use mesh::{Mesh, MeshComm};
pub use requantize::{CastItem, Extent, Requantize, flat_targets, targets};
pub use scale_book::{ScaleBook, ScaleBookBuilder};
pub use shard::{ShardSpec, ShardedTensor};
pub use whole::{decode_job, dequantize, quantize, scales_in_form};
