//! Full weights on every GPU over flat slices of the masters (ZeRO-1) are those of one CPU rank: every recipe, cuts through
//! rows, blocks and bytes, and an empty slice. Needs two GPUs and NCCL (see ranks.rs).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{values, world};
use lowp_comm::{CommError, Communicator, LocalComm};
use lowp_format::{AnyRecipe, QuantizedTensor, Shape, Usage};
use lowp_kernels::{Backend, Cpu};
use lowp_nccl::Sums;
use lowp_optim::{Group, OptimError, OptimizerBuilder, ParamSpec, StepOptions};
use lowp_shard::ShardError;

const LIMIT: Duration = Duration::from_secs(60);
const SHAPE: Shape = Shape::new(96, 192);
const STEPS: u64 = 5;

/// Which elements rank `rank` of `world` has of parameter `param`: through a row, on odd elements, in blocks, none.
fn own(param: usize, rank: usize, world: usize) -> Range<usize> {
    let all = SHAPE.elements();
    let cut = |rank: usize| match rank {
        0 => 0,
        rank if rank == world => all,
        _ if param % 4 == 3 => all,
        rank => (all * rank / world + [1, 37, 4096][param % 4]).min(all),
    };
    cut(rank)..cut(rank + 1)
}

/// The buffers of all weights after all steps.
fn run<B: Backend>(
    backend: &B,
    comm: &Arc<dyn Communicator<B>>,
) -> Result<Vec<Vec<u8>>, OptimError> {
    let mut builder = OptimizerBuilder::new(Arc::clone(comm)).on(backend);
    let group = builder.group(Group {
        lr: 0.05,
        ..Group::default()
    });
    let (mut ids, mut tensors) = (vec![], vec![]);
    for (param, recipe) in AnyRecipe::all().into_iter().enumerate() {
        let tensor = QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, |_, n| {
            Ok::<_, ShardError>(backend.alloc::<u8>(n)?)
        })?;
        let own = own(param, comm.rank(), comm.world_size());
        let master = values(param as u64, SHAPE.elements())[own.clone()].to_vec();
        let spec = ParamSpec::new(format!("{param}"), group, master);
        ids.push((builder.flat_param(&tensor, own.start, spec)?, own));
        tensors.push(tensor);
    }
    let mut optimizer = builder.build()?;
    for step in 1..=STEPS {
        for (param, (id, own)) in (0..).zip(&ids) {
            let mut grad = values(100 * step + param, SHAPE.elements());
            if step == 3 && param == 1 {
                grad[SHAPE.elements() - 1] = f32::INFINITY;
            }
            optimizer.set_grad(*id, &grad[own.clone()])?;
        }
        let report = optimizer.step(&StepOptions::default())?.wait()?;
        assert_eq!(report.applied, step != 3);
    }
    let buffers = tensors.iter().flat_map(|tensor| tensor.buffers());
    let content = buffers.map(|buffer| Ok(backend.download(&buffer.storage)?));
    content.collect()
}

#[test]
fn cuda_nccl_flat_slices_give_the_weights_of_one_cpu_rank() {
    let expected = run(&Cpu, &LocalComm::solo(&Cpu).into()).expect("one CPU rank");
    let ranks = world(2, LIMIT, Sums::Peers, |rank| {
        run(&rank.cuda, &rank.comm).map_err(|error| {
            CommError::Failed {
                rank: rank.comm.rank(),
                message: error.to_string(),
            }
            .into()
        })
    });
    for (rank, weights) in ranks.iter().enumerate() {
        for (buffer, (found, expected)) in weights.iter().zip(&expected).enumerate() {
            assert!(found == expected, "rank {rank}, buffer {buffer}");
        }
    }
}
