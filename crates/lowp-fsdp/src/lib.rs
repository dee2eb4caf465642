//! A model whose parameters are sharded over ranks. Weights are stored as codes of a recipe and gathered block by block; all other
//! parameters are f32. Gradients are reduced to their owners in buckets, the optimizer updates masters and casts them, and the state is
//! saved and resumed on any mesh.
//!
//! A [`ShardedModel`] has all parameters of a rank. The network that runs the layers is in another crate: it reads gathered weights on the
//! device ([`ShardedWeight::with_gathered`]) or decoded on the host ([`ShardedWeight::with_values`]), and pushes their gradients. Layers
//! use the same memory one after the other ([`LayerMemory`]). [`cost`] computes memory and traffic before anything is allocated.
//!
//! ```
//! use lowp_format::{AnyRecipe, RecipeOptions};
//! use lowp_fsdp::{LinearSpec, ModelError, ModelOptions, ShardedModel};
//! use lowp_kernels::Cpu;
//! use lowp_comm::{LocalComm, Mesh, MeshComm};
//! use lowp_shard::Init;
//! use std::sync::Arc;
//!
//! let mesh = MeshComm::new(Mesh::sharded(1), Arc::new(LocalComm::solo(&Cpu)))?;
//! let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
//! let linears = [LinearSpec::new("proj", 64, 32, Init::Normal(0.1))];
//! let model = ShardedModel::new(&Cpu, &mesh, |_| recipe, &linears, &[], ModelOptions::default())?;
//! // A byte for each code of either orientation, and one for each scale of 32 codes.
//! assert_eq!(model.weight_bytes(Default::default())?.resident, 2 * (64 * 32 + 64 * 32 / 32));
//! # Ok::<(), ModelError>(())
//! ```

pub mod bench;
mod builder;
mod checkpoint;
mod code_counts;
pub mod cost;
mod cuts;
mod error;
mod formats;
mod grad_tiles;
mod gradients;
mod memory;
mod operand;
mod plain_vars;
mod saving;
mod sharded_model;
mod sharded_weight;
mod spec;
mod switch;
mod tile_pieces;
mod weight_pieces;
mod weight_storage;

pub use builder::FirstValues;
pub use checkpoint::SavedModel;
pub use code_counts::CodeCounts;
pub use error::{ModelError, VarShapeError};
pub use formats::{FormatMismatch, check_formats};
pub use gradients::Gradients;
pub use lowp_gemm::Multiplies;
pub use memory::LayerMemory;
pub use operand::{
    OperandEncode, OperandPart, OperandPlan, PassState, RecipeOperands, Rounded, code_buffers,
    encoded,
};
pub use plain_vars::{VarPlace, VarWeight};
pub use sharded_model::{
    ModelDivergence, ModelOptions, Passes, ShardedModel, Sharding, WeightBytes,
};
pub use sharded_weight::ShardedWeight;
pub use spec::{LinearSpec, VarSpec, VarUse};
