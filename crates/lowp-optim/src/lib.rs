//! Sharded AdamW and Adam whose update is fused with the cast to any recipe.
//!
//! The optimizer owns fp32 master weights, sharded over ranks. One step is one pass over all
//! parameters that updates them and, where the scale is known before the values, casts them too;
//! a second pass casts the rest once the ranks have agreed on the tensor amaxes. The result equals
//! AdamW followed by a full quantize, bit for bit.
//!
//! # Example
//!
//! ```
//! use lowp_format::{AnyRecipe, QuantizedTensor, RecipeOptions, Shape, Usage};
//! use lowp_kernels::{Backend, Cpu};
//! use lowp_optim::{AdamWBuilder, Group, ParamSpec, StepOptions};
//! use lowp_shard::{LocalComm, ScaleBookBuilder};
//!
//! let cpu = Cpu::default();
//! let comm = LocalComm::solo(&cpu);
//! let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
//! let shape = Shape::new(32, 64);
//! let tensor = QuantizedTensor::new(recipe, shape, Usage::BOTH, |_, n| cpu.alloc::<u8>(n))?;
//!
//! let mut book = ScaleBookBuilder::default();
//! let mut builder = AdamWBuilder::new(&cpu);
//! let group = builder.group(Group { lr: 1e-3, ..Group::default() });
//! let spec = ParamSpec::new("weight", group, vec![0.5; shape.elements()]);
//! let weight = builder.param(&mut book, &tensor, spec)?;
//! let book = book.build(&cpu)?;
//! let mut adamw = builder.finish(&book)?;
//! adamw.calibrate(&book, &comm)?; // the first cast
//!
//! adamw.set_grad(weight, &vec![0.1; shape.elements()])?;
//! let report = adamw.step(&StepOptions::default(), &book, &comm, &comm)?;
//! assert!(report.applied);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adamw;
mod clip;
mod error;
mod param;
mod schedule;

pub use adamw::{AdamW, StepOptions, StepReport};
pub use clip::{GradNorm, clip_factor};
pub use error::OptimError;
pub use param::{AdamWBuilder, FloatDtype, Group, ParamId, ParamSpec};
pub use schedule::Schedule;
