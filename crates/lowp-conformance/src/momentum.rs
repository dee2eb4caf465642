//! The momentum of a gradient, and matrices divided by their norms.

use super::fence::Fenced;
use super::*;
use lowp_kernels::{
    GradContribution, GroupScalars, MomentumJob, NormalizeJob, SumSquaresJob, reference,
};

/// Around lines of lanes, words of eight values, the tiles of a GPU and the tasks of threads.
const LENGTHS: [usize; 10] = [0, 1, 7, 8, 17, 257, 2047, 2048, 4099, 70_001];

/// What a momentum and its result will be, under the `mu` and the factor of gradients of a run.
pub(super) fn updated<B: Backend>(
    rig: &Rig<B>,
    job: &MomentumJob<B>,
    [mu, grad_scale]: [f32; 2],
) -> (Vec<f32>, Vec<bf16>) {
    let before = rig.content::<f32>(&job.momentum);
    let grads = rig.widened(&job.grad);
    let update = |(m, g): (f32, f32)| reference::momentum(m, g * grad_scale, mu);
    before.into_iter().zip(grads).map(update).unzip()
}

/// What the result of a normalization will be.
pub(super) fn normalized<B: Backend>(rig: &Rig<B>, job: &NormalizeJob<B>) -> Vec<bf16> {
    let sum = rig.content::<u8>(&job.sum).as_chunks::<8>().0[0];
    let factor = reference::inverse_norm(f64::from_le_bytes(sum));
    let from = rig.content::<bf16>(&job.from).into_iter();
    from.map(|x| bf16::from_f32(x.to_f32() * factor)).collect()
}

pub(super) fn wide(halves: &[bf16]) -> Vec<f32> {
    halves.iter().map(|x| x.to_f32()).collect()
}

pub fn a_momentum_equals_the_reference<B: Fenced>(rig: &Rig<B>) {
    let group = GroupScalars {
        beta1: 0.95,
        ..GroupScalars::default()
    };
    let scalars = StepScalars {
        groups: vec![GroupScalars::default(), group],
        grad_scale: 0.75,
        ..StepScalars::default()
    };
    for (n, len) in LENGTHS.into_iter().enumerate() {
        for (half, shift) in [(false, 0), (true, 0), (true, 4)] {
            let seed = n as u64;
            let (grad, _) = source(rig, &values(len, seed, true), half);
            let (momentum, around) = B::fenced(rig, &values(len, !seed, true), shift);
            let (out, fence) = B::fenced(rig, &vec![bf16::ONE; len], shift);
            let job = MomentumJob {
                grad,
                momentum: momentum.clone(),
                out: out.clone(),
                group: 1,
            };
            let (next, expected) = updated(rig, &job, [0.95, 0.75]);
            let plan = rig.plan(Work::Momentum(vec![job])).expect("it fits");
            // A step that is skipped changes nothing.
            let skipped = StepScalars {
                skip: true,
                ..scalars.clone()
            };
            let before = bits(&rig.content(&momentum));
            rig.backend.run(&plan, &skipped).expect("a run");
            assert_eq!(bits(&rig.content(&momentum)), before);
            rig.backend.run(&plan, &scalars).expect("a run");
            let what = format!("{rig:?} {len} {half} {shift}");
            assert_eq!(bits(&rig.content(&momentum)), bits(&next), "{what}");
            let found = wide(&rig.content(&out));
            assert_eq!(bits(&found), bits(&wide(&expected)), "{what}");
            around();
            fence();
        }
    }
}

/// Of any norm: of zeros, of one below the least, of what is not finite.
pub fn a_matrix_is_divided_by_its_norm<B: Fenced>(rig: &Rig<B>) {
    for (n, len) in LENGTHS.into_iter().enumerate() {
        for (size, shift) in [
            (1.0, 0),
            (0.0, 4),
            (1e-12, 2),
            (1e15, 0),
            (f32::INFINITY, 0),
        ] {
            let values = values(len, n as u64, false);
            let scaled = values.iter().map(|x| bf16::from_f32(x * size));
            let (from, around) = B::fenced(rig, &scaled.collect::<Vec<_>>(), shift);
            let (out, fence) = B::fenced(rig, &vec![bf16::ONE; len], shift);
            let job = NormalizeJob::<B> {
                from: from.clone(),
                sum: rig.buffer(&[0u8; GradContribution::SUMS]),
                out: out.clone(),
            };
            let squares = SumSquaresJob::<B> {
                source: Source::Bf16(from.clone()),
                out: job.sum.clone(),
            };
            rig.run(Work::SumSquares(vec![squares]));
            let expected = normalized(rig, &job);
            rig.run(Work::Normalize(vec![job]));
            let found = wide(&rig.content(&out));
            let what = format!("{rig:?} {len} {size} {shift}");
            assert_eq!(bits(&found), bits(&wide(&expected)), "{what}");
            if size.is_finite() && len > 0 {
                let norm: f64 = found.iter().map(|&x| f64::from(x).powi(2)).sum();
                let zero = size == 0.0 || values.iter().all(|x| *x == 0.0);
                assert!(
                    zero || size < 1e-9 || (norm.sqrt() - 1.0).abs() < 0.01,
                    "{norm}: {what}"
                );
                assert!(found.iter().all(|x| x.is_finite()), "{what}");
            }
            around();
            fence();
        }
    }
}
