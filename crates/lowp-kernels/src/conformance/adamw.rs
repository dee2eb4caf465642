//! AdamW against the reference, and fused with the encode against one after the other.

use proptest::prelude::*;

use super::*;
use crate::{AdamMode, AdamScalars, AdamwJob, Moments, reference};

fn scalars(step: u64) -> AdamScalars {
    AdamScalars::default().at_step(step)
}

fn job<B: Backend>(
    rig: &Rig<B>,
    len: usize,
    half_moments: bool,
    half_grad: bool,
    seed: u64,
) -> AdamwJob<B> {
    let moments = if half_moments {
        let zeros = || rig.buffer(&vec![bf16::ZERO; len]);
        Moments::Bf16 {
            exp_avg: zeros(),
            exp_avg_sq: zeros(),
        }
    } else {
        let zeros = || rig.buffer(&vec![0f32; len]);
        Moments::F32 {
            exp_avg: zeros(),
            exp_avg_sq: zeros(),
        }
    };
    AdamwJob {
        master: rig.buffer(&values(len, seed, false)),
        moments,
        grad: source(rig, &values(len, seed ^ 1, false), half_grad).0,
        group: 0,
        mode: AdamMode::AdamW,
        source_rounding: SourceRounding::F32,
        amax: None,
        encode: None,
    }
}

fn widen(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|x| x.to_f32()).collect()
}

fn moments<B: Backend>(rig: &Rig<B>, job: &AdamwJob<B>) -> [Vec<f32>; 2] {
    match &job.moments {
        Moments::F32 {
            exp_avg,
            exp_avg_sq,
        } => [exp_avg, exp_avg_sq].map(|b| rig.content::<f32>(b)),
        Moments::Bf16 {
            exp_avg,
            exp_avg_sq,
        } => [exp_avg, exp_avg_sq].map(|b| widen(&rig.content::<bf16>(b))),
    }
}

/// Master and moments, as the reference updates them.
struct Expected {
    state: [Vec<f32>; 3],
    half_moments: bool,
    mode: AdamMode,
}

impl Expected {
    fn new<B: Backend>(rig: &Rig<B>, job: &AdamwJob<B>) -> Self {
        let [m, v] = moments(rig, job);
        Self {
            state: [rig.content::<f32>(&job.master), m, v],
            half_moments: matches!(job.moments, Moments::Bf16 { .. }),
            mode: job.mode,
        }
    }

    fn step(&mut self, grad: &[f32], grad_scale: f32, group: &AdamScalars) {
        let stored = |x: f32| match self.half_moments {
            false => x,
            true => bf16::from_f32(x).to_f32(),
        };
        let [p, m, v] = &mut self.state;
        for (i, g) in grad.iter().enumerate() {
            let state = [p[i], m[i], v[i]];
            let [new_p, new_m, new_v] = reference::adamw(state, g * grad_scale, self.mode, group);
            (p[i], m[i], v[i]) = (new_p, stored(new_m), stored(new_v));
        }
    }

    fn assert<B: Backend>(&self, rig: &Rig<B>, job: &AdamwJob<B>, when: u64) {
        let [m, v] = moments(rig, job);
        let found = [rig.content::<f32>(&job.master), m, v];
        for (what, (found, expected)) in ["master", "exp_avg", "exp_avg_sq"]
            .into_iter()
            .zip(found.iter().zip(&self.state))
        {
            let [found, expected] = [bits(found), bits(expected)];
            let at = found.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(at, None, "{rig:?}: {what} of {} after {when}", found.len());
        }
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

/// Every dtype of moments and gradient, with its mode.
const VARIANTS: [(bool, bool, AdamMode); 4] = [
    (false, false, AdamMode::AdamW),
    (true, false, AdamMode::L2),
    (false, true, AdamMode::AdamW),
    (true, true, AdamMode::L2),
];

pub(super) fn updates_equal_the_reference<B: Backend>(rig: &Rig<B>) {
    for len in [0, 1, 7, 4097, 150_000] {
        for (half_moments, half_grad, mode) in VARIANTS {
            let job = AdamwJob {
                mode,
                ..job(rig, len, half_moments, half_grad, 40)
            };
            let plan = rig.plan(Work::Adamw(vec![job.clone()])).unwrap();
            let grad = match &job.grad {
                Source::F32(b) => rig.content::<f32>(b),
                Source::Bf16(b) => widen(&rig.content::<bf16>(b)),
            };
            let mut expected = Expected::new(rig, &job);
            for step in 1..=2 {
                let group = scalars(step);
                let run = StepScalars {
                    adam: vec![group],
                    grad_scale: 0.7,
                    ..StepScalars::default()
                };
                rig.backend.run(&plan, &run).unwrap();
                expected.step(&grad, 0.7, &group);
                expected.assert(rig, &job, step);
            }
        }
    }
}

pub(super) fn a_thousand_steps_equal_the_reference<B: Backend>(rig: &Rig<B>) {
    let len = 1031;
    for (half_moments, half_grad, mode) in VARIANTS {
        let job = AdamwJob {
            mode,
            ..job(rig, len, half_moments, half_grad, 41)
        };
        let plan = rig.plan(Work::Adamw(vec![job.clone()])).unwrap();
        let mut expected = Expected::new(rig, &job);
        let grads: Vec<Vec<f32>> = (0..16).map(|seed| values(len, seed, false)).collect();
        for step in 1..=1000 {
            let grad = &grads[step as usize % grads.len()];
            let halves: Vec<bf16> = grad.iter().map(|&x| bf16::from_f32(x)).collect();
            let grad = match &job.grad {
                Source::F32(b) => {
                    rig.backend.write(b, 0, grad).unwrap();
                    grad.clone()
                }
                Source::Bf16(b) => {
                    rig.backend.write(b, 0, &halves).unwrap();
                    widen(&halves)
                }
            };
            let group = scalars(step);
            let run = StepScalars {
                adam: vec![group],
                ..StepScalars::default()
            };
            rig.backend.run(&plan, &run).unwrap();
            expected.step(&grad, 1.0, &group);
            if [1, 10, 100, 1000].contains(&step) {
                expected.assert(rig, &job, step);
            }
        }
    }
}

pub(super) fn fused_equals_update_then_encode<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(64);
    proptest!(config, |(
        index in 0..cases().len(), rows in 0usize..140, width in 1usize..4, seed: u64,
        half_moments: bool, half_grad: bool, via: bool,
    )| {
        let case = &cases()[index];
        let shape = Shape::new(rows, case.columns() * width);
        let source_rounding = if via { SourceRounding::ViaBf16 } else { SourceRounding::F32 };
        let make = || {
            let job = job(rig, shape.elements(), half_moments, half_grad, seed);
            AdamwJob { source_rounding, ..job }
        };
        let encode = |master: &B::Buffer<f32>| {
            let source = Source::F32(master.clone());
            let job = encode_job(rig, case.kernel, &case.specs, shape, source, 3.0);
            EncodeJob { source_rounding, ..job }
        };
        let step = StepScalars { adam: vec![scalars(3)], ..StepScalars::default() };

        let apart = make();
        rig.run_with(Work::Adamw(vec![apart.clone()]), &step);
        let apart_encode = encode(&apart.master);
        rig.run(Work::Encode(vec![apart_encode.clone()]));

        let slot = Slot { buffer: rig.buffer(&[0f32, 0.25]), index: 1 };
        let fused = make();
        let fused_encode = encode(&fused.master);
        let fused = AdamwJob {
            amax: Some(slot.clone()), encode: Some(Box::new(fused_encode.clone())), ..fused
        };
        rig.run_with(Work::Adamw(vec![fused.clone()]), &step);

        let [fused_master, master] = [&fused, &apart].map(|job| rig.content::<f32>(&job.master));
        prop_assert_eq!(bits(&fused_master), bits(&master));
        let [fused_moments, moments] =
            [&fused, &apart].map(|job| moments(rig, job).map(|m| bits(&m)));
        prop_assert_eq!(fused_moments, moments);
        let [fused_bytes, bytes] =
            [&fused_encode, &apart_encode].map(|job| contents(rig, &job.targets));
        prop_assert_eq!(fused_bytes, bytes);
        let rounded = master.iter().map(|&x| source_rounding.apply(x)).collect::<Vec<_>>();
        let amax = rig.content::<f32>(&slot.buffer)[1];
        prop_assert_eq!(amax, reference::amax(rounded).max(0.25));
    });
}

pub(super) fn missing_scalars_are_an_error<B: Backend>(rig: &Rig<B>) {
    let job = AdamwJob {
        group: 2,
        ..job(rig, 8, false, false, 1)
    };
    let plan = rig.plan(Work::Adamw(vec![job])).unwrap();
    let error = rig.backend.run(&plan, &StepScalars::default()).unwrap_err();
    assert_eq!(
        error,
        KernelError::Scalars {
            needed: 3,
            given: 0
        }
    );
}

pub(super) fn a_skipped_run_changes_nothing<B: Backend>(rig: &Rig<B>) {
    let job = job(rig, 5000, false, true, 2);
    let plan = rig.plan(Work::Adamw(vec![job.clone()])).unwrap();
    let expected = Expected::new(rig, &job);
    let run = StepScalars {
        adam: vec![scalars(1)],
        skip: true,
        ..StepScalars::default()
    };
    rig.backend.run(&plan, &run).unwrap();
    expected.assert(rig, &job, 0);
}
