//! Runs a model of one or more matrices on several ranks and returns what they gathered.

use std::time::Duration;

use lowp_comm::run_ranks;
use lowp_format::{Orientation, Phase, QuantizedTensor, Recipe, Shape};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_optim::{Group, OptimError, OptimizerBuilder, ParamSpec, StepOptions};
use lowp_shard::{GatherGroup, GatherPool, ShardSpec, ShardedTensor, quantize};

/// The time limit of every wait of the tests.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// The bytes of every buffer that serves `orientation`, in the tensor's order, with their names.
pub type Bytes = Vec<(String, Vec<u8>)>;

/// The bytes of the buffers of `tensor` that serve `orientation`.
///
/// # Panics
/// If the tensor cannot serve it.
pub fn bytes_of<R: Recipe>(
    tensor: &QuantizedTensor<CpuBuffer<u8>, R>,
    orientation: Orientation,
) -> Bytes {
    tensor.data(orientation).expect("the usage");
    let mut bytes: Bytes = tensor
        .buffers()
        .iter()
        .filter(|b| b.spec.key.usage.contains(orientation.usage()))
        .map(|b| {
            (
                b.spec.key.to_string(),
                Cpu.download(&b.storage).expect("bytes"),
            )
        })
        .collect();
    bytes.sort();
    bytes
}

/// What quantizing the whole of `values` gives for `orientation`.
///
/// # Panics
/// If the recipe cannot take the shape.
pub fn whole<R: Recipe>(recipe: R, shape: Shape, values: &[f32], o: Orientation) -> Bytes {
    let cpu = Cpu;
    let source = Source::F32(cpu.upload(values).expect("room"));
    let tensor = quantize(&cpu, recipe, shape, o.usage(), source, None).expect("a tensor");
    bytes_of(&tensor, o)
}

/// The orientation that a phase uses.
pub fn orientation(phase: Phase) -> Orientation {
    match phase {
        Phase::Forward => Orientation::Rowwise,
        Phase::Backward => Orientation::Columnwise,
    }
}

/// One matrix trained on `world` ranks.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// Shape of the full matrix.
    pub shape: Shape,
    /// Initial master values of the full matrix.
    pub values: &'a [f32],
    /// One full gradient per optimizer step.
    pub grads: &'a [Vec<f32>],
    /// Ranks.
    pub world: usize,
    /// Policy of the gather.
    pub reshard_after_forward: bool,
}

/// What one rank saw after the last step.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Gathered bytes for the forward and the backward phase.
    pub phases: [Bytes; 2],
    /// The rank's own master rows.
    pub master: Vec<f32>,
}

/// Trains one matrix of `recipe`: every rank owns its rows, casts them, steps and gathers.
///
/// # Panics
/// If a rank fails.
pub fn train<R: Recipe>(recipe: R, run: &Run<'_>) -> Vec<Seen> {
    let cpu = Cpu;
    run_ranks(
        &cpu,
        run.world,
        TIMEOUT,
        |rank, comm| -> Result<Seen, OptimError> {
            let spec = ShardSpec::new(&recipe, run.shape, run.world, rank)?;
            let own = spec.elements();
            let shard = ShardedTensor::new(&cpu, recipe, spec)?;
            let mut builder = OptimizerBuilder::new(comm.clone());
            let group = builder.group(Group {
                lr: 0.01,
                ..Group::default()
            });
            let param = ParamSpec::new("weight", group, run.values[own.clone()].to_vec());
            let id = builder.param(shard.local(), param)?;
            let mut optimizer = builder.build()?;
            for grad in run.grads {
                optimizer.set_grad(id, &grad[own.clone()])?;
                assert!(optimizer.step(&StepOptions::default())?.wait()?.applied);
            }
            let pool = GatherPool::new(&cpu);
            let reshard = run.reshard_after_forward;
            let mut group = GatherGroup::new(&cpu, comm.clone(), &pool, vec![shard], reshard)?;
            let mut phases = [Bytes::new(), Bytes::new()];
            for phase in Phase::ALL {
                group.unshard(phase)?;
                phases[phase as usize] = bytes_of(group.tensor(0)?, orientation(phase));
                group.reshard();
            }
            Ok(Seen {
                phases,
                master: optimizer.master(id)?,
            })
        },
    )
    .unwrap_or_else(|e| panic!("{recipe:?} {run:?}: {e}"))
}
