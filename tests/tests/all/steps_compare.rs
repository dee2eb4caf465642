//! The step of a model carries what the rank sent and gathered before it, so that ranks which did other things are found where nothing
//! else compares them (`lowp-optim/tests/all/ranks_that_differ.rs` says what the step makes of it).

use std::time::Duration;

use lowp_comm::{Mesh, MeshComm, run_ranks};
use lowp_format::{AnyRecipe, Phase, ReshardAfterForward};
use lowp_fsdp::{LinearSpec, ModelError, ModelOptions, ShardedModel, Sharding, VarPlace};
use lowp_kernels::{Cpu, GradContribution};
use lowp_optim::{Group, StepOptions};
use lowp_shard::{GradBucketOptions, Init};
use lowp_tests::spy::{Call, Spy};

const SIDE: usize = 64;

/// What rank 0 tells the others in a step of a model of two layers, which gathers and sends in these orders.
fn part(gathers: [usize; 2], grads: [usize; 2]) -> GradContribution {
    let options = ModelOptions {
        sharding: Sharding::Fsdp,
        reshard_after_forward: ReshardAfterForward::Yes,
        // Each gradient by itself.
        grads: GradBucketOptions {
            bytes: 0,
            ..GradBucketOptions::default()
        },
        seed: 7,
        group: Group::default(),
        vars: VarPlace::Backend,
        ..ModelOptions::default()
    };
    let layer = |(block, name): (usize, &str)| LinearSpec {
        name: name.to_owned(),
        block,
        rows: SIDE,
        cols: SIDE,
        init: Init::Normal(0.1),
        amax_group: None,
    };
    let layers = [(0, "a"), (1, "b")].map(layer);
    let recipe = |_: &LinearSpec| AnyRecipe::low_precision()[0];
    let step = |_, comm| -> Result<GradContribution, ModelError> {
        let spy = Spy::new(comm);
        let mesh = MeshComm::new(Mesh::sharded(2), spy.clone())?;
        let mut model = ShardedModel::new(&Cpu, &mesh, recipe, &layers, &[], options)?;
        for layer in gathers {
            let weight = model.weight(layer).expect("two layers");
            weight.with_gathered(Phase::Forward, |_, _| Ok::<_, ModelError>(()))?;
        }
        for layer in grads {
            let weight = model.weight(layer).expect("two layers");
            weight.gradient()?.write(&Cpu, 0, &[1.0; SIDE * SIDE])?;
            weight.push_gradient()?;
        }
        model.finish_micro_batch()?;
        spy.take();
        assert!(model.finish_step(&StepOptions::default())?.applied);
        let part = spy.take().into_iter().find_map(|call| match call {
            Call::AllGather(pieces) => pieces[0].first_chunk().map(GradContribution::from_bytes),
            _ => None,
        });
        Ok(part.expect("a step gathers the sums of all ranks"))
    };
    let parts = run_ranks(&Cpu, 2, Duration::from_secs(60), step);
    parts.unwrap_or_else(|failed| panic!("{failed}"))[0]
}

#[test]
fn a_step_tells_what_was_sent_and_gathered() {
    let usual = part([0, 1], [1, 0]);
    assert_eq!(part([0, 1], [1, 0]), usual);
    let gathered = part([1, 0], [1, 0]);
    assert_eq!(gathered.consensus, usual.consensus);
    assert_ne!(gathered.within, usual.within, "gathers of a replica");
    let sent = part([0, 1], [0, 1]);
    assert_ne!(sent.consensus, usual.consensus, "gradients of the world");
    assert_eq!(sent.within, usual.within);
}
