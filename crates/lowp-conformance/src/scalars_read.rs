//! Scalars of a step change on the device where a plan reads what changed, and nowhere else.

use super::*;
use lowp_kernels::testing::Reads;
use lowp_kernels::{GroupScalars, StochasticKey};

/// The layers of a model that has as many as this.
const LAYERS: usize = 24;

/// What a layer gives to the stream in one pass: a cast of its operand with the step's scalars, then the decode and the copy of scales of
/// a product with none.
fn layer<B: Backend>(rig: &Rig<B>, stochastic: bool) -> Vec<(Work<B>, bool)> {
    let shape = Shape::new(32, 64);
    let blocks = Some([[1, 16], [16, 1]]);
    let case = case(Code::E2M1, ScaleRule::TWO_LEVEL, blocks, Some(TRANSPOSED));
    let source = Source::F32(rig.buffer(&values(shape.elements(), 1, false)));
    let encode = EncodeJob {
        stochastic: stochastic.then(StochasticKey::default),
        ..encode_job(
            rig,
            &case,
            &case.specs(),
            shape,
            source,
            &case.outer(shape, 1.0),
        )
    };
    vec![
        (Work::Amax(Vec::new()), true),
        (Work::Encode(vec![encode]), true),
        (Work::Decode(Vec::new()), false),
        (Work::Repack(Vec::new()), false),
    ]
}

/// Scalars of work in `step`.
fn scalars(step: u64, of_the_step: bool) -> StepScalars {
    StepScalars {
        random_step: if of_the_step { step } else { 0 },
        ..StepScalars::default()
    }
}

/// Scalars that change only where they must: once, or once a step where operands are rounded stochastically.
fn changes(stochastic: bool, steps: u64) -> u64 {
    if stochastic { steps } else { 1 }
}

#[test]
fn layers_change_no_scalars_that_they_do_not_read() {
    for stochastic in [false, true] {
        let rig = rig::cpu::best();
        let layer = layer(&rig, stochastic);
        let (mut there, mut count) = (Vec::new(), 0);
        for step in 1..=5 {
            for (work, of_the_step) in (0..LAYERS).flat_map(|_| &layer) {
                let wanted = scalars(step, *of_the_step).to_bytes();
                if !Reads::of(work).served(&there, &wanted) {
                    (there, count) = (wanted, count + 1);
                }
            }
        }
        assert_eq!(count, changes(stochastic, 5), "stochastic: {stochastic}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn cuda_layers_change_no_scalars_that_they_do_not_read() {
    rig::device::once(|rig| {
        for stochastic in [false, true] {
            let plan = |(work, of_the_step)| (rig.plan(work).unwrap(), of_the_step);
            let plans: Vec<_> = layer(rig, stochastic).into_iter().map(plan).collect();
            // A stream whose scalars nobody wrote.
            let stream = rig.backend.fork().unwrap();
            for step in 1..=5 {
                for (plan, of_the_step) in (0..LAYERS).flat_map(|_| &plans) {
                    stream.run(plan, &scalars(step, *of_the_step)).unwrap();
                }
            }
            let count = stream.scalar_changes();
            assert_eq!(count, changes(stochastic, 5), "stochastic: {stochastic}");
        }
    });
}

/// Every field of the scalars, by work that reads it.
#[test]
fn what_is_read_is_what_serves() {
    let group = GroupScalars::default();
    let before = StepScalars {
        groups: vec![group; 2],
        ..StepScalars::default()
    };
    let with = |change: fn(&mut StepScalars)| {
        let mut after = before.clone();
        change(&mut after);
        after
    };
    type Field = (&'static str, fn(&mut StepScalars), fn(Reads) -> bool);
    let fields: [Field; 7] = [
        ("random", |s| s.random_step = 1 << 40, |r| r.random),
        ("factor", |s| s.grad_scale = -1.0, |r| r.groups > 0),
        ("skip", |s| s.skip = true, |r| r.skip),
        ("norm", |s| s.max_norm = 0.0, |_| false),
        ("rate", |s| s.groups[0].lr = 0.0, |r| r.groups > 0),
        ("group 1", |s| s.groups[1].eps = 0.0, |r| r.groups > 1),
        (
            "decay",
            |s| s.groups[0].weight_decay = -0.1,
            |r| r.groups > 0,
        ),
    ];
    for bits in 0..12 {
        let reads = Reads {
            skip: bits & 1 != 0,
            random: bits & 2 != 0,
            groups: bits >> 2,
        };
        assert!(reads.served(&before.to_bytes(), &before.to_bytes()));
        // Memory that nobody wrote serves what reads nothing.
        assert_eq!(
            reads.served(&[], &before.to_bytes()),
            reads == Reads::default()
        );
        for (name, change, is_read) in fields {
            let served = reads.served(&before.to_bytes(), &with(change).to_bytes());
            assert_eq!(served, !is_read(reads), "{name}, {reads:?}");
        }
        // Fewer groups than are read.
        let fewer = StepScalars::default().to_bytes();
        assert_eq!(reads.served(&fewer, &before.to_bytes()), reads.groups == 0);
    }
}
