//! AdamW against the reference, and fused with the encode against one after the other.

use proptest::prelude::*;

use super::*;
use crate::{AdamMode, AdamScalars, AdamwJob, Moments, reference};

fn scalars(step: u64) -> AdamScalars {
    AdamScalars {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1: 1.0,
        correction2: 1.0,
    }
    .at_step(step)
}

fn job(len: usize, half_moments: bool, half_grad: bool, seed: u64) -> AdamwJob<Cpu> {
    let zeros = || vec![0f32; len];
    let moments = if half_moments {
        let zeros = || CpuBuffer::from_vec(vec![bf16::ZERO; len]);
        Moments::Bf16 {
            exp_avg: zeros(),
            exp_avg_sq: zeros(),
        }
    } else {
        let zeros = || CpuBuffer::from_vec(zeros());
        Moments::F32 {
            exp_avg: zeros(),
            exp_avg_sq: zeros(),
        }
    };
    AdamwJob {
        master: CpuBuffer::from_vec(values(len, seed, false)),
        moments,
        grad: source(&values(len, seed ^ 1, false), half_grad).0,
        group: 0,
        mode: AdamMode::AdamW,
        source_rounding: SourceRounding::F32,
        amax: None,
        encode: None,
    }
}

fn moments(job: &AdamwJob<Cpu>) -> [Vec<f32>; 2] {
    match &job.moments {
        Moments::F32 {
            exp_avg,
            exp_avg_sq,
        } => [exp_avg, exp_avg_sq].map(|b| b.read().unwrap().to_vec()),
        Moments::Bf16 {
            exp_avg,
            exp_avg_sq,
        } => [exp_avg, exp_avg_sq].map(|b| b.read().unwrap().iter().map(|x| x.to_f32()).collect()),
    }
}

#[test]
fn known_answers() {
    for (mode, expected) in [
        (AdamMode::AdamW, [0x3F7F_B7E9, 0x3C23_D70D, 0x3A03_1271]),
        (AdamMode::L2, [0x3F7F_BE77, 0x3CA3_D70D, 0x3B03_1271]),
    ] {
        let found = reference::adamw([1.0, 0.0, 0.0], 0.1, mode, &scalars(1));
        assert_eq!(found.map(f32::to_bits), expected);
    }
}

#[test]
fn updates_equal_the_reference() {
    everywhere(|isa| {
        for len in [0, 1, 7, 4097, 150_000] {
            for (flags, mode) in [
                (0, AdamMode::AdamW),
                (1, AdamMode::L2),
                (2, AdamMode::AdamW),
                (3, AdamMode::L2),
            ] {
                let job = AdamwJob {
                    mode,
                    ..job(len, flags & 1 == 1, flags & 2 == 2, 40)
                };
                let plan = plan(Work::Adamw(vec![job.clone()])).unwrap().with_isa(isa);
                for step in 1..=2 {
                    let before = job.master.read().unwrap().to_vec();
                    let [m, v] = moments(&job);
                    let grad = match &job.grad {
                        Source::F32(b) => b.read().unwrap().to_vec(),
                        Source::Bf16(b) => b.read().unwrap().iter().map(|x| x.to_f32()).collect(),
                    };
                    let group = scalars(step);
                    let grad_scale = 0.7;
                    let run = StepScalars {
                        adam: vec![group],
                        grad_scale,
                        ..StepScalars::default()
                    };
                    plan.run(&run).unwrap();
                    let [new_m, new_v] = moments(&job);
                    let after = job.master.read().unwrap();
                    let stored = |x: f32| match &job.moments {
                        Moments::F32 { .. } => x,
                        Moments::Bf16 { .. } => bf16::from_f32(x).to_f32(),
                    };
                    for i in 0..len {
                        let state = [before[i], m[i], v[i]];
                        let expected = reference::adamw(state, grad[i] * grad_scale, mode, &group);
                        let expected = [expected[0], stored(expected[1]), stored(expected[2])];
                        assert_eq!(bits(&[after[i], new_m[i], new_v[i]]), bits(&expected));
                    }
                }
            }
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn fused_equals_update_then_encode(
        index in 0..cases().len(), rows in 0usize..140, width in 1usize..4, seed: u64,
        half_moments: bool, half_grad: bool, via: bool,
    ) {
        let case = &cases()[index];
        let shape = Shape::new(rows, case.columns() * width);
        let source_rounding = if via { SourceRounding::ViaBf16 } else { SourceRounding::F32 };
        let make = || AdamwJob { source_rounding, ..job(shape.elements(), half_moments, half_grad, seed) };
        let encode = |master: &CpuBuffer<f32>| {
            let source = Source::F32(master.clone());
            let job = encode_job(case.kernel, &case.specs, shape, source, 3.0);
            EncodeJob { source_rounding, ..job }
        };
        let step = StepScalars { adam: vec![scalars(3)], ..StepScalars::default() };

        let apart = make();
        plan(Work::Adamw(vec![apart.clone()])).unwrap().run(&step).unwrap();
        let apart_encode = encode(&apart.master);
        run(Work::Encode(vec![apart_encode.clone()]));

        let slot = Slot { buffer: CpuBuffer::from_vec(vec![0f32, 0.25]), index: 1 };
        let fused = make();
        let fused_encode = encode(&fused.master);
        let fused = AdamwJob {
            amax: Some(slot.clone()), encode: Some(Box::new(fused_encode.clone())), ..fused
        };
        plan(Work::Adamw(vec![fused.clone()])).unwrap().run(&step).unwrap();

        prop_assert_eq!(bits(&fused.master.read().unwrap()), bits(&apart.master.read().unwrap()));
        prop_assert_eq!(moments(&fused).map(|m| bits(&m)), moments(&apart).map(|m| bits(&m)));
        prop_assert_eq!(contents(&fused_encode.targets), contents(&apart_encode.targets));
        let rounded = apart.master.read().unwrap().iter().map(|&x| source_rounding.apply(x)).collect::<Vec<_>>();
        prop_assert_eq!(slot.buffer.read().unwrap()[1], reference::amax(rounded).max(0.25));
    }
}

#[test]
fn missing_scalars_are_an_error() {
    let job = AdamwJob {
        group: 2,
        ..job(8, false, false, 1)
    };
    let plan = plan(Work::Adamw(vec![job])).unwrap();
    let error = plan.run(&StepScalars::default()).unwrap_err();
    assert_eq!(
        error,
        KernelError::Scalars {
            needed: 3,
            given: 0
        }
    );
}
