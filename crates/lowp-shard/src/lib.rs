//! Shards of quantized matrices, and the gathers that make full tensors of them while a layer needs
//! them.
//!
//! # Example
//!
//! Two ranks, as threads. Each quantizes its own rows; the gathered bytes are those of the full
//! matrix quantized at once.
//!
//! ```
//! use std::time::Duration;
//!
//! use lowp_comm::run_ranks;
//! use lowp_format::{AnyRecipe, Phase, RecipeOptions, Shape, Usage};
//! use lowp_kernels::{Backend, Cpu, Source};
//! use lowp_shard::{
//!     CastItem, GatherGroup, GatherPool, CastPlan, ScaleBookBuilder, ShardError, ShardSpec,
//!     ShardedTensor, quantize,
//! };
//!
//! let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
//! let shape = Shape::new(96, 64);
//! let weights: Vec<f32> = (0..shape.elements()).map(|i| (i as f32).sin()).collect();
//! let source = Source::F32(Cpu.upload(&weights)?);
//! let whole = quantize(&Cpu, recipe, shape, Usage::ROWWISE, source, None)?;
//!
//! run_ranks(&Cpu, 2, Duration::from_secs(10), |rank, comm| {
//!     let spec = ShardSpec::new(&recipe, shape, 2, rank)?;
//!     let master = Source::F32(Cpu.upload(&weights[spec.elements()])?);
//!     let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
//!     let mut book = ScaleBookBuilder::default();
//!     let item = CastItem::rows(shard.local(), master, &mut book);
//!     let book = book.build(&Cpu)?;
//!     CastPlan::new(&Cpu, &book, &[item])?.run(&book, &*comm)?;
//!
//!     let pool = GatherPool::new(&Cpu);
//!     let mut layer = GatherGroup::new(&Cpu, comm, &pool, vec![shard], true)?;
//!     layer.unshard(Phase::Forward)?;
//!     for (full, expected) in layer.tensor(0)?.buffers().iter().zip(whole.buffers()) {
//!         assert_eq!(Cpu.download(&full.storage)?, Cpu.download(&expected.storage)?);
//!     }
//!     layer.reshard();
//!     Ok::<(), ShardError>(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod audit;
mod bucket;
mod cast_plan;
mod error;
mod flat_shard;
mod fsdp2;
mod gather;
mod grad_buckets;
mod init;
mod scale_book;
mod shard;
mod version;
mod whole;
mod zero1;

pub use audit::{Divergence, audit, audit_in_group};
pub use bucket::{BUCKET_ALIGN, bucket_bytes, move_into};
pub use cast_plan::{CastItem, CastPlan, CastRange, check_flat, flat_targets, targets};
pub use error::ShardError;
pub use flat_shard::FlatShard;
pub use fsdp2::{
    FullTensor, GatherHooks, GatherTag, HookInput, HookOutput, HookSource, SendBuffers,
};
pub use gather::{
    Exchange, GATHER_PLAN, GatherAccount, GatherGroup, GatherPoint, GatherPool, GatherWatch,
    MemoryStep, Padding, ParamAccount, PoolBuffer, Reshard, Scratch, Scratches, is_rearranged,
    memory_steps, piece_ranges, pool_buffers, tall_to_matrix,
};
pub use grad_buckets::{
    GRAD_REDUCERS, GradBucketOptions, GradBuckets, GradLen, GradParam, GradSlabs, Reduced,
    Reduction, grad_bucket_ranges, grad_slabs,
};
pub use init::Init;
pub use scale_book::{BlockSlots, DelayedState, ScaleBook, ScaleBookBuilder, ScaleSlot};
pub use shard::{LocalTensor, ShardSpec, ShardedTensor};
pub use version::{CastSlice, CastTensor, Version};
pub use whole::{dequantize, quantize, scales_in_form};
pub use zero1::{FlatGather, FlatMaster, FlatParam, FlatWeights, MasterCast, cast_master_weights};
