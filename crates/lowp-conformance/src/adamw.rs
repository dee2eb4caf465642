//! AdamW against the reference, and fused with the encode against one after the other.

use lowp_format::Orientation;
use proptest::prelude::*;

use super::*;
use lowp_kernels::reference::{self, Reference};
use lowp_kernels::{AdamMode, AdamScalars, AdamwAmax, AdamwJob, FloatDtype, Moments};

fn scalars(step: u64) -> AdamScalars {
    AdamScalars::default().at_step(step)
}

fn job<B: Backend>(
    rig: &Rig<B>,
    len: usize,
    half_moments: [bool; 2],
    half_grad: bool,
    seed: u64,
) -> AdamwJob<B> {
    let [exp_avg, exp_avg_sq] = half_moments.map(|half| match half {
        true => Source::Bf16(rig.buffer(&vec![bf16::ZERO; len])),
        false => Source::F32(rig.buffer(&vec![0f32; len])),
    });
    AdamwJob {
        master: rig.buffer(&values(len, seed, false)),
        moments: Moments {
            exp_avg,
            exp_avg_sq,
        },
        grad: source(rig, &values(len, seed ^ 1, false), half_grad).0,
        group: 0,
        mode: AdamMode::AdamW,
        source_rounding: SourceRounding::F32,
        amax: None,
        encode: None,
    }
}

fn moments<B: Backend>(rig: &Rig<B>, job: &AdamwJob<B>) -> [Vec<f32>; 2] {
    job.moments.values().map(|moment| rig.widened(moment))
}

/// Master and moments, as the reference updates them.
struct Expected {
    state: [Vec<f32>; 3],
    dtypes: [FloatDtype; 2],
    mode: AdamMode,
}

impl Expected {
    fn new<B: Backend>(rig: &Rig<B>, job: &AdamwJob<B>) -> Self {
        let [m, v] = moments(rig, job);
        Self {
            state: [rig.content::<f32>(&job.master), m, v],
            dtypes: job.moments.values().map(Source::dtype),
            mode: job.mode,
        }
    }

    fn step(&mut self, grad: &[f32], grad_scale: f32, group: &AdamScalars) {
        let stored = |x: f32, dtype| match dtype {
            FloatDtype::F32 => x,
            FloatDtype::Bf16 => bf16::from_f32(x).to_f32(),
        };
        let [of_m, of_v] = self.dtypes;
        let [p, m, v] = &mut self.state;
        for (i, g) in grad.iter().enumerate() {
            let state = [p[i], m[i], v[i]];
            let [new_p, new_m, new_v] = reference::adamw(state, g * grad_scale, self.mode, group);
            (p[i], m[i], v[i]) = (new_p, stored(new_m, of_m), stored(new_v, of_v));
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

/// The pairs of dtypes that moments have; true is bf16.
const PAIRS: [[bool; 2]; 3] = [[false, false], [true, false], [true, true]];

/// Every dtype of the moments and of the gradient, with a mode. The first three have every pair.
const VARIANTS: [([bool; 2], bool, AdamMode); 6] = [
    (PAIRS[0], false, AdamMode::AdamW),
    (PAIRS[1], true, AdamMode::AdamW),
    (PAIRS[2], false, AdamMode::L2),
    (PAIRS[0], true, AdamMode::L2),
    (PAIRS[1], false, AdamMode::L2),
    (PAIRS[2], true, AdamMode::AdamW),
];

pub fn updates_equal_the_reference<B: Backend>(rig: &Rig<B>) {
    for len in [0, 1, 7, 4097, 150_000] {
        for (half_moments, half_grad, mode) in VARIANTS {
            let job = AdamwJob {
                mode,
                ..job(rig, len, half_moments, half_grad, 40)
            };
            let plan = rig.plan(Work::Adamw(vec![job.clone()])).unwrap();
            let grad = rig.widened(&job.grad);
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

pub fn a_thousand_steps_equal_the_reference<B: Backend>(rig: &Rig<B>) {
    let len = 1031;
    for &(half_moments, half_grad, mode) in &VARIANTS[..3] {
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
                    rig.widened(&job.grad)
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

/// With the amaxes of the tensor and of lines.
pub fn fused_equals_update_then_encode<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(96);
    // Weights are not transformed.
    let weights = |case: &Case| !case.kernels().iter().any(|key| key.hadamard);
    let cases: Vec<Case> = cases().into_iter().filter(weights).collect();
    proptest!(config, |(
        index in 0..cases.len(), rows in 0usize..140, width in 1usize..4, seed: u64,
        half_moments in proptest::sample::select(&PAIRS[..]), half_grad: bool, via: bool, lines: [bool; 2],
    )| {
        let case = &cases[index];
        let shape = Shape::new(rows, case.columns() * width);
        let source_rounding = if via { SourceRounding::ViaBf16 } else { SourceRounding::F32 };
        let make = || {
            let job = job(rig, shape.elements(), half_moments, half_grad, seed);
            AdamwJob { source_rounding, ..job }
        };
        let encode = |master: &B::Buffer<f32>| {
            let source = Source::F32(master.clone());
            let outer = case.outer(shape, 3.0);
            let job = encode_job(rig, case, &case.specs(), shape, source, &outer);
            EncodeJob { source_rounding, ..job }
        };
        let step = StepScalars { adam: vec![scalars(3)], ..StepScalars::default() };

        let apart = make();
        rig.run_with(Work::Adamw(vec![apart.clone()]), &step);
        let apart_encode = encode(&apart.master);
        rig.run(Work::Encode(vec![apart_encode.clone()]));

        let starts = [2, 2 + rows];
        let out = rig.buffer(&vec![0.25f32; 2 + rows + shape.cols]);
        let amax = AdamwAmax {
            shape, out: out.clone(), tensor: Some(1),
            lines: [0, 1].map(|side| lines[side].then_some(starts[side])),
        };
        let fused = make();
        let fused_encode = encode(&fused.master);
        let fused = AdamwJob {
            amax: Some(amax.clone()), encode: Some(Box::new(fused_encode.clone())), ..fused
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

        let expected = |lines: [bool; 2]| {
            let of = |orientation: Orientation| {
                let kernel = KernelKey::new(Code::E4M3, LINES);
                let (values, tensor) = (&master[..], &[][..]);
                Reference { shape, orientation, kernel, values, source_rounding, tensor, random: None }
            };
            let mut entries = vec![0.25f32, of(Orientation::Rowwise).tensor_amax().max(0.25)];
            for (side, orientation) in Orientation::ALL.into_iter().enumerate() {
                let amaxes = of(orientation).outer_amaxes();
                let raised = amaxes.into_iter().map(|amax| if lines[side] { amax.max(0.25) } else { 0.25 });
                entries.extend(raised);
            }
            entries
        };
        prop_assert_eq!(rig.content::<f32>(&out), expected(lines));

        // Alone, without an encode, the same.
        let alone = AdamwJob { amax: Some(AdamwAmax { out: rig.buffer(&vec![0.25f32; 2 + rows + shape.cols]), ..amax }), ..make() };
        rig.run_with(Work::Adamw(vec![alone.clone()]), &step);
        prop_assert_eq!(rig.content::<f32>(&alone.amax.unwrap().out), expected(lines));
    });
}

/// Consumed amaxes of lines are replaced, of several tasks each.
pub fn updates_of_many_tasks_raise_lines<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(1501, 1400);
    let len = shape.elements();
    let before = vec![-9f32; shape.rows + shape.cols];
    let amax = AdamwAmax {
        shape,
        out: rig.buffer(&before),
        tensor: None,
        lines: [Some(0), Some(shape.rows)],
    };
    let job = AdamwJob {
        amax: Some(amax.clone()),
        ..job(rig, len, [true, false], true, 77)
    };
    let step = StepScalars {
        adam: vec![scalars(1)],
        ..StepScalars::default()
    };
    rig.run_with(Work::Adamw(vec![job.clone()]), &step);
    let master = rig.content::<f32>(&job.master);
    let rows = master.chunks(shape.cols);
    let rows = rows.map(|row| reference::amax(row.iter().copied()));
    let cols = (0..shape.cols)
        .map(|col| reference::amax(master[col..].iter().step_by(shape.cols).copied()));
    let expected: Vec<f32> = rows.chain(cols).collect();
    assert_eq!(rig.content::<f32>(&amax.out), expected);
}

/// The shape of the lines is that of the values, and of what is encoded.
pub fn lines_are_of_the_shape_of_the_master<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(4, 64);
    let update = |shape, lines| AdamwJob {
        amax: Some(AdamwAmax {
            shape,
            out: rig.buffer(&[0f32; 300]),
            tensor: None,
            lines,
        }),
        ..job(rig, 256, [false; 2], false, 1)
    };
    let plan = |job: AdamwJob<B>| rig.plan(Work::Adamw(vec![job])).map(|_| ());
    let (none, both) = ([None; 2], [Some(0), Some(4)]);
    let turned = Shape::new(64, 4);
    assert!(plan(update(shape, both)).is_ok());
    assert!(plan(update(turned, both)).is_ok());
    // Without lines there is nothing that the shape says.
    assert!(plan(update(Shape::new(1, 1), none)).is_ok());
    for other in [Shape::new(4, 63), Shape::new(1 << 40, 1 << 40)] {
        assert!(plan(update(other, both)).is_err());
    }
    let outside = plan(update(shape, [Some(297), None])).unwrap_err();
    assert!(
        matches!(outside, KernelError::Range { len: 300, .. }),
        "{outside}"
    );
    let case = case(Code::E4M3, CURRENT, None, Some(TRANSPOSED));
    for (lines, shape_of_lines, good) in [
        (both, shape, true),
        (both, turned, false),
        (none, turned, true),
    ] {
        let mut job = update(shape_of_lines, lines);
        let source = Source::F32(job.master.clone());
        let outer = case.outer(shape, 1.0);
        let encode = encode_job(rig, &case, &case.specs(), shape, source, &outer);
        job.encode = Some(Box::new(encode));
        assert_eq!(plan(job).is_ok(), good, "{shape_of_lines}");
    }
}

pub fn missing_scalars_are_an_error<B: Backend>(rig: &Rig<B>) {
    let job = AdamwJob {
        group: 2,
        ..job(rig, 8, [false; 2], false, 1)
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

pub fn a_skipped_run_changes_nothing<B: Backend>(rig: &Rig<B>) {
    let job = job(rig, 5000, [true, false], true, 2);
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
