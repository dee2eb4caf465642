//! Arithmetic on jobs. A [`Backend`] never sees a recipe: every decision is taken before a job is
//! made. Work over any number of tensors is planned once ([`Backend::plan`]) and run many times
//! ([`Backend::run`]).
//!
//! The same work gives the same bits on every backend, for every number of threads and every
//! instruction set: they all equal [`mod@reference`], which writes docs/numerics.md out element by
//! element.
//!
//! # Example
//!
//! Encode a matrix on the CPU for a recipe whose scales depend on blocks only, then decode it.
//!
//! ```
//! use lowp_format::{AnyRecipe, Orientation, Part, Recipe, ScaleSource, Shape, Usage};
//! use lowp_kernels::{Backend, Cpu, DecodeJob, EncodeJob, KernelError, Source, Target, Work};
//!
//! let per_block = |recipe: &AnyRecipe| recipe.scale_source() == ScaleSource::BlockAmax;
//! let recipe = AnyRecipe::all().into_iter().find(per_block).ok_or("no such recipe")?;
//! let shape = Shape::new(4, 64);
//! let values: Vec<f32> = (0..256u16).map(|i| f32::from(i) / 16.0 - 8.0).collect();
//!
//! let targets = recipe
//!     .buffers(Usage::BOTH)
//!     .into_iter()
//!     .map(|spec| Ok(Target::new(spec, Cpu.alloc(spec.bytes(shape))?)))
//!     .collect::<Result<_, KernelError>>()?;
//! let encode = EncodeJob {
//!     shape,
//!     kernel: recipe.kernel(),
//!     source: Source::F32(Cpu.upload(&values)?),
//!     source_rounding: recipe.source_rounding(),
//!     tensor: None,
//!     targets,
//!     stochastic: None,
//! };
//! Cpu.once(Work::Encode(vec![encode.clone()]))?;
//!
//! let target = |part| encode.target(Orientation::Rowwise, part).cloned();
//! let out = Cpu.alloc(shape.elements())?;
//! Cpu.once(Work::Decode(vec![DecodeJob {
//!     shape,
//!     kernel: recipe.kernel(),
//!     data: target(Part::Data).ok_or("no rowwise data")?,
//!     block_scale: target(Part::BlockScale),
//!     tensor_scale: None,
//!     out: out.clone(),
//! }]))?;
//! for (x, y) in values.iter().zip(Cpu.download(&out)?) {
//!     assert!((x - y).abs() <= x.abs() / 16.0);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(
    feature = "cuda",
    doc = r#"
# On a GPU

With the feature `cuda`: a tensor encoded for a product of matrices, in one launch. The scales have the layout that the
product reads.

```no_run
use lowp_format::{AnyRecipe, Form, Part, Recipe, ScaleLayout, ScaleSource, Shape, Usage};
use lowp_kernels::{Backend, Cuda, EncodeJob, Source, Target, Work};

let cuda = Cuda::new(0)?;
let per_block = |recipe: &AnyRecipe| recipe.scale_source() == ScaleSource::BlockAmax;
let recipe = AnyRecipe::all().into_iter().find(per_block).ok_or("no such recipe")?;
let shape = Shape::new(4096, 4096);
let mut targets = Vec::new();
for spec in recipe.buffers(Usage::BOTH) {
    if spec.key.part != Part::BlockScale {
        targets.push(Target::new(spec, cuda.alloc(spec.bytes(shape))?));
        continue;
    }
    for orientation in spec.key.usage.orientations() {
        let layout = ScaleLayout::new(&spec, shape, orientation, Form::Swizzled)?;
        let bytes = cuda.alloc(layout.bytes())?;
        targets.push(Target::in_form(spec, Form::Swizzled, orientation, bytes));
    }
}
let activations = vec![half::bf16::ONE; shape.elements()];
let encode = cuda.plan(Work::Encode(vec![EncodeJob {
    shape,
    kernel: recipe.kernel(),
    source: Source::Bf16(cuda.upload(&activations)?),
    source_rounding: recipe.source_rounding(),
    tensor: None,
    targets: targets.into(),
    stochastic: None,
}]))?;
cuda.run(&encode, &Default::default())?;
cuda.synchronize()?;
# Ok::<(), Box<dyn std::error::Error>>(())
```

A step of AdamW with its encode, captured once and replayed with new scalars.

```no_run
use lowp_format::{AnyRecipe, Recipe, ScaleSource, Shape, Usage};
use lowp_kernels::{
    AdamMode, AdamScalars, AdamwJob, Backend, Cuda, EncodeJob, KernelError, Moments, Source, StepScalars,
    Target, Work,
};

let cuda = Cuda::new(0)?;
let per_block = |recipe: &AnyRecipe| recipe.scale_source() == ScaleSource::BlockAmax;
let recipe = AnyRecipe::all().into_iter().find(per_block).ok_or("no such recipe")?;
let shape = Shape::new(4096, 4096);
let master = cuda.alloc::<f32>(shape.elements())?;
let target = |spec: lowp_format::BufferSpec| Ok(Target::new(spec, cuda.alloc(spec.bytes(shape))?));
let encode = EncodeJob {
    shape,
    kernel: recipe.kernel(),
    source: Source::F32(master.clone()),
    source_rounding: recipe.source_rounding(),
    tensor: None,
    targets: recipe.buffers(Usage::BOTH).into_iter().map(target).collect::<Result<_, KernelError>>()?,
    stochastic: None,
};
let plan = cuda.plan(Work::Adamw(vec![AdamwJob {
    master,
    moments: Moments::F32 {
        exp_avg: cuda.alloc(shape.elements())?,
        exp_avg_sq: cuda.alloc(shape.elements())?,
    },
    grad: Source::Bf16(cuda.alloc(shape.elements())?),
    group: 0,
    mode: AdamMode::AdamW,
    source_rounding: recipe.source_rounding(),
    amax: None,
    encode: Some(Box::new(encode)),
}]))?;
let adam = AdamScalars::default();
let scalars = |i| StepScalars { adam: vec![adam.at_step(i)], ..StepScalars::default() }.to_bytes();
let on_device = cuda.upload(&scalars(1))?;
let step = cuda.capture(|| cuda.run_with(&plan, &on_device))?;
for i in 1..=1000 {
    cuda.write(&on_device, 0, &scalars(i))?;
    cuda.launch(&step)?;
}
cuda.synchronize()?;
# Ok::<(), Box<dyn std::error::Error>>(())
```
"#
)]

mod backend;
mod bf16;
mod check;
#[cfg(test)]
mod conformance;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod element;
mod error;
mod host;
mod ingredients;
mod job;
mod lanes;
pub mod reference;

pub use backend::{AdamScalars, Backend, Pending, StepScalars};
pub use cpu::{Cpu, CpuBuffer, CpuGraph, CpuPlan, CpuRead, CpuWrite};
#[cfg(feature = "cuda")]
pub use cuda::{Cuda, CudaBuffer, CudaEvent, CudaGraph, CudaMark, CudaPlan};
pub use element::Element;
pub use error::KernelError;
pub use job::{
    AdamMode, AdamwJob, AmaxJob, BlockAmax, DecodeJob, EncodeJob, FlatBlocks, FlatEncodeJob,
    HistoryJob, InterleaveJob, Moments, RepackJob, Slot, Source, StochasticKey, SumSquaresJob,
    Target, TensorInput, TransposeJob, Work,
};
