//! Sharded optimizers whose update is fused with the cast to any recipe: AdamW, Adam with L2, Lion and SGD.
//!
//! The optimizer owns fp32 master weights, sharded over ranks. One step is one pass over all
//! parameters that updates them and, where the scale is known before the values, casts them too;
//! a second pass casts the rest once the ranks have agreed on the tensor amaxes. The result equals
//! the update followed by a full quantize, bit for bit, for every number of ranks.
//!
//! How an element is updated is a [`Rule`], and each [`Group`] of parameters has its own; all else is the same for every rule.
//!
//! A parameter may be left out of a step ([`Optimizer::leave_out`]); it counts its own steps.
//!
//! If a gradient is not finite on one rank, all ranks skip the step. Ranks compare what they must
//! have in common (parameters, groups, options, gradients of replicas), and a difference is an
//! error.
//!
//! # Example
//!
//! ```
//! use lowp_format::{AnyRecipe, QuantizedTensor, RecipeOptions, Shape, Usage};
//! use lowp_kernels::{Backend, Cpu};
//! use lowp_optim::{OptimizerBuilder, Group, ParamSpec, StepOptions};
//! use lowp_comm::LocalComm;
//!
//! let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
//! let shape = Shape::new(32, 64);
//! let tensor = QuantizedTensor::new(recipe, shape, Usage::BOTH, |_, n| Cpu.alloc::<u8>(n))?;
//!
//! let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
//! let group = builder.group(Group { lr: 1e-3, ..Group::default() });
//! let weight = builder.param(&tensor, ParamSpec::new("weight", group, vec![0.5; 32 * 64]))?;
//! let mut optimizer = builder.build()?;
//!
//! optimizer.set_grad(weight, &[0.1; 32 * 64])?;
//! assert!(optimizer.step(&StepOptions::default())?.wait()?.applied);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Example: groups that mix recipes
//!
//! Two ranks hold the rows of two matrices in different formats and of a norm that stays in f32.
//! Groups say how parameters are updated, tensors say how they are stored, in any combination.
//!
//! ```
//! use std::time::Duration;
//!
//! use lowp_format::{AnyRecipe, RecipeOptions, Shape};
//! use lowp_kernels::Cpu;
//! use lowp_optim::{OptimizerBuilder, Group, Decay, OptimError, ParamSpec, Schedule, StepOptions};
//! use lowp_comm::run_ranks;
//! use lowp_shard::{Init, ShardSpec, ShardedTensor};
//!
//! let schedule = Schedule { warmup: 10, total: 1000, floor: 0.1, decay: Decay::Cosine };
//! run_ranks(&Cpu, 2, Duration::from_secs(10), |rank, comm| {
//!     let mut builder = OptimizerBuilder::new(comm);
//!     let decay = builder.group(Group { lr: 3e-4, ..Group::default() });
//!     let no_decay = builder.group(Group { lr: 3e-4, weight_decay: 0.0, ..Group::default() });
//!
//!     let mut params = Vec::new();
//!     for (number, (name, recipe, group, shape)) in (0..).zip([
//!         ("up", "mxfp8", decay, Shape::new(96, 64)),
//!         ("down", "nvfp4-2d", decay, Shape::new(64, 96)),
//!         ("norm", "fp32", no_decay, Shape::new(1, 64)),
//!     ]) {
//!         let recipe = AnyRecipe::from_name(recipe, &RecipeOptions::default())?;
//!         let spec = ShardSpec::new(&recipe, shape, 2, rank)?;
//!         let master = Init::Normal(0.02).rows(1, number, spec.rows(), shape.cols);
//!         let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
//!         let id = builder.param(shard.local(), ParamSpec::new(name, group, master))?;
//!         params.push((id, shard));
//!     }
//!     let mut optimizer = builder.build()?;
//!
//!     for step in 1..=3 {
//!         for (id, shard) in &params {
//!             optimizer.set_grad(*id, &vec![0.1; shard.spec().elements().len()])?;
//!         }
//!         let options = StepOptions {
//!             lr_factor: schedule.factor(step),
//!             max_norm: Some(1.0),
//!             ..StepOptions::default()
//!         };
//!         assert!(optimizer.step(&options)?.wait()?.applied);
//!     }
//!     Ok::<(), OptimError>(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Example: Muon for matrices, AdamW for the rest
//!
//! A rule of matrices ([`Rule::is_of_matrices`]) makes the momentum of a weight orthogonal as a whole. One of the ranks that share the weight does
//! it, and ranks with any rows, shard tiles or slices get the bits of one rank.
//!
//! ```
//! use lowp_comm::LocalComm;
//! use lowp_format::{AnyRecipe, QuantizedTensor, RecipeOptions, Shape, Usage};
//! use lowp_gemm::Multiplies;
//! use lowp_kernels::{Backend, Cpu};
//! use lowp_optim::{Group, OptimizerBuilder, ParamSpec, Rule, StepOptions};
//!
//! let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu)).products(Cpu.products()?);
//! let muon = builder.group(Group::of(Rule::Muon));
//! let adamw = builder.group(Group { weight_decay: 0.0, ..Group::default() });
//!
//! let mut params = Vec::new();
//! for (name, group, shape) in [("up", muon, Shape::new(64, 32)), ("norm", adamw, Shape::new(1, 32))] {
//!     let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
//!     let tensor = QuantizedTensor::new(recipe, shape, Usage::BOTH, |_, n| Cpu.alloc::<u8>(n))?;
//!     let spec = ParamSpec::new(name, group, vec![0.5; shape.elements()]);
//!     params.push((builder.param(&tensor, spec)?, shape));
//! }
//! let mut optimizer = builder.build()?;
//! for (id, shape) in params {
//!     optimizer.set_grad(id, &vec![0.1; shape.elements()])?;
//! }
//! assert!(optimizer.step(&StepOptions::default())?.wait()?.applied);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod builder;
mod cut;
mod error;
mod foreign_grads;
mod grads;
mod group;
mod memory;
mod muon;
mod optimizer;
mod options;
mod param;
mod planned_sets;
mod plans;
mod present;
mod records;
mod report;
mod schedule;
mod state;
mod state_dtypes;
mod work;

pub use builder::OptimizerBuilder;
pub use cut::MatrixCut;
pub use error::OptimError;
pub use group::Group;
pub use lowp_kernels::{FloatDtype, MasterDtype, Rule, StateDtype, StateName};
pub use memory::ParamMemory;
pub use muon::MatrixCosts;
pub use optimizer::Optimizer;
pub use options::StepOptions;
pub use param::{ParamId, ParamPlace, ParamSpec};
pub use report::{GradNorm, PendingStep, StepReport};
pub use schedule::{Decay, Schedule};
pub use state::{ParamState, PendingState, PendingValues};
pub use state_dtypes::{StateDtypes, StateDtypesError};
