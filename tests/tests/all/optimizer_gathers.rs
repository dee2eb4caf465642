//! Gathers between the steps of an optimizer: what a step changed is gathered again, what it left
//! alone is not, and the ordinary loop sends what its plans say and nothing more.

use lowp_comm::run_ranks;
use lowp_format::{AnyRecipe, Phase, Shape};
use lowp_kernels::Cpu;
use lowp_optim::{Group, OptimError, StepOptions};
use lowp_shard::{GatherGroup, GatherPool};
use lowp_tests::model::{Case, Rank};
use lowp_tests::spy::{Call, Spy};
use lowp_tests::values::Family;
use lowp_tests::world::{Bytes, TIMEOUT, bytes_of, orientation};

/// Fewer blocks than ranks: the last ranks hold no rows.
const SHAPE: Shape = Shape::new(64, 32);

fn cases() -> Vec<Case> {
    let case = |(seed, recipe)| {
        let values = Family::Normal.values(seed, SHAPE.elements());
        Case::new(recipe, SHAPE, values)
    };
    (0..).zip(AnyRecipe::all()).map(case).collect()
}

fn grads(seed: u64, bad: bool) -> Vec<Vec<f32>> {
    let mut grads: Vec<Vec<f32>> = (0..AnyRecipe::all().len() as u64)
        .map(|s| Family::Normal.values(100 * seed + s, SHAPE.elements()))
        .collect();
    if bad {
        grads[0][0] = f32::NAN;
    }
    grads
}

fn held(group: &GatherGroup<Cpu>, phase: Phase) -> Result<Vec<Bytes>, OptimError> {
    let params = 0..group.params().len();
    params
        .map(|param| Ok(bytes_of(group.tensor(param)?, orientation(phase))))
        .collect()
}

/// Evaluate, step, forward, without `release` in between.
#[test]
fn an_evaluation_does_not_leave_old_weights_to_the_next_forward() {
    for reshard in [false, true] {
        let run = run_ranks(&Cpu, 5, TIMEOUT, |_, comm| -> Result<(), OptimError> {
            let mut rank = Rank::new(&cases(), &[Group::default()], &comm, &comm)?;
            let spy = Spy::new(comm.clone());
            let pool = GatherPool::new(&Cpu);
            let tensors = rank.tensors.clone();
            let mut group = GatherGroup::new(&Cpu, spy.clone(), &pool, tensors, reshard)?;
            for phase in Phase::ALL {
                group.unshard(phase)?;
                let before = held(&group, phase)?;
                spy.take();

                // A step that is skipped leaves the rows as they were; only the device knows.
                let report = rank.step(&grads(1, true), &StepOptions::default())?;
                assert!(!report.applied);
                group.unshard(phase)?;
                assert!(held(&group, phase)? == before);
                spy.take();

                let report = rank.step(&grads(2, false), &StepOptions::default())?;
                assert!(report.applied);
                assert!(group.tensor(0).is_err(), "old weights were given out");
                group.unshard(phase)?;
                let after = held(&group, phase)?;
                let fresh = rank.gather(reshard)?;
                for (param, fresh) in fresh.iter().enumerate() {
                    assert!(after[param] == fresh[phase as usize], "parameter {param}");
                    assert!(after[param] != before[param], "parameter {param}");
                }
                let calls = spy.take();
                assert!(matches!(calls[0], Call::HostGather(_)), "{:?}", calls[0]);
                let gathers = |call: &Call| matches!(call, Call::AllGather(_));
                assert!(calls[1..].iter().all(gathers) && calls.len() > 1);
                group.release();
            }
            Ok(())
        });
        run.unwrap_or_else(|e| panic!("reshard {reshard}: {e}"));
    }
}

#[test]
fn the_ordinary_loop_gathers_what_the_plans_say() {
    const STEPS: u64 = 3;
    for reshard in [false, true] {
        let run = run_ranks(&Cpu, 3, TIMEOUT, |_, comm| -> Result<_, OptimError> {
            let mut rank = Rank::new(&cases(), &[Group::default()], &comm, &comm)?;
            let spy = Spy::new(comm.clone());
            let pool = GatherPool::new(&Cpu);
            let tensors = rank.tensors.clone();
            let mut group = GatherGroup::new(&Cpu, spy.clone(), &pool, tensors, reshard)?;
            spy.take();
            for step in 0..STEPS {
                for phase in Phase::ALL {
                    group.unshard(phase)?;
                    group.reshard();
                }
                let calls = spy.take();
                let gathers = |call: &Call| matches!(call, Call::AllGather(_));
                assert!(calls.iter().all(gathers));
                assert_eq!(calls.len(), if reshard { 2 } else { 1 });
                rank.step(&grads(step, false), &StepOptions::default())?;
            }
            let account = group.account();
            let planned = STEPS * account.sent_bytes() as u64;
            assert_eq!(account.counted_sent_bytes, planned);
            Ok(())
        });
        run.unwrap_or_else(|e| panic!("reshard {reshard}: {e}"));
    }
}
