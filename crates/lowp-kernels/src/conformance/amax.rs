//! Amaxes and sums of squares.

use lowp_format::Shape;
use proptest::prelude::*;

use super::*;
use crate::reference::{self, Reference};
use crate::{AmaxJob, BlockAmax, SumSquaresJob};

pub(super) fn pieces_of_a_matrix_raise_the_amaxes_of_the_whole<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(64);
    proptest!(config, |(
        rows in 1usize..90, width in 1usize..5, cut in 0.0f64..1.0, half: bool, via: bool, seed: u64,
    )| {
        let shape = Shape::new(rows, width * 32);
        let given = values(shape.elements(), seed, true);
        let (_, widened) = source(rig, &given, half);
        let cut = (cut * shape.elements() as f64) as usize;
        let source_rounding = if via { SourceRounding::ViaBf16 } else { SourceRounding::F32 };
        let out = rig.buffer(&vec![0f32; 4000]);
        let blocks = [[1, 32], [32, 1], [16, 16]];
        let mut start = 3;
        let parts: Vec<BlockAmax> = blocks.iter().map(|&block| {
            let part = BlockAmax { block, start };
            start += rows.div_ceil(block[0]) * shape.cols.div_ceil(block[1]);
            part
        }).collect();
        let job = |range: std::ops::Range<usize>| AmaxJob {
            shape, start: range.start, source: source(rig, &widened[range], half).0,
            source_rounding, out: out.clone(), tensor: Some(1), blocks: parts.clone(),
        };
        rig.run(Work::Amax(vec![job(0..cut), job(cut..shape.elements())]));
        let reference = Reference {
            shape, values: &widened, source_rounding, tensor: 1.0, random: None,
            kernel: case(Code::F32, ScaleRule::None, None, None).kernel,
        };
        let found = rig.content::<f32>(&out);
        prop_assert_eq!(found[1].to_bits(), reference.tensor_amax().to_bits());
        for part in parts {
            let expected = reference.block_amaxes(part.block);
            prop_assert_eq!(&found[part.start..][..expected.len()], &expected[..]);
        }
    });
}

pub(super) fn sums_equal_the_reference<B: Backend>(rig: &Rig<B>) {
    for (len, special) in [
        (0, false),
        (1, false),
        (4096, false),
        (9_999, true),
        (300_001, false),
    ] {
        for half in [false, true] {
            sum_equals_the_reference(rig, &values(len, len as u64, special), half);
        }
    }
}

/// Sums of runs of runs.
pub(super) fn large_sums_equal_the_reference<B: Backend>(rig: &Rig<B>) {
    let some = values(5000, 1, false);
    let many: Vec<f32> = some.iter().copied().cycle().take(4096 * 4200).collect();
    sum_equals_the_reference(rig, &many, true);
}

/// Also that sums add up over jobs and runs.
fn sum_equals_the_reference<B: Backend>(rig: &Rig<B>, values: &[f32], half: bool) {
    let (source, values) = source(rig, values, half);
    let out = rig.buffer(&[0u8; 16]);
    let job = || SumSquaresJob {
        source: source.clone(),
        out: out.clone(),
    };
    let plan = rig.plan(Work::SumSquares(vec![job(), job()])).unwrap();
    let (sum, non_finite) = reference::sum_of_squares(&values);
    let len = values.len();
    for run in 1..=2u64 {
        rig.backend.run(&plan, &StepScalars::default()).unwrap();
        let found = rig.content::<u8>(&out);
        let found = [0, 8].map(|at| u64::from_le_bytes(found[at..][..8].try_into().unwrap()));
        let total = (0..2 * run).fold(0.0, |total, _| total + sum);
        let found_sum = f64::from_bits(found[0]);
        assert!(
            found_sum.to_bits() == total.to_bits() || (found_sum.is_nan() && total.is_nan()),
            "{rig:?}, {len} values: {found_sum} and {total}"
        );
        assert_eq!(found[1], 2 * run * non_finite, "{rig:?}, {len} values");
    }
}

pub(super) fn large_amaxes_run<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(700, 320);
    let values = values(shape.elements(), 21, true);
    let out = rig.buffer(&vec![0f32; 1 + 700 * 10]);
    let job = AmaxJob {
        shape,
        start: 0,
        source: Source::F32(rig.buffer(&values)),
        source_rounding: SourceRounding::F32,
        out: out.clone(),
        tensor: Some(0),
        blocks: vec![BlockAmax {
            block: [1, 32],
            start: 1,
        }],
    };
    rig.run(Work::Amax(vec![job]));
    let found = rig.content::<f32>(&out);
    assert_eq!(found[0], reference::amax(values.iter().copied()));
    for (found, block) in found[1..].iter().zip(values.chunks(32)) {
        assert_eq!(*found, reference::amax(block.iter().copied()));
    }
}

/// On the CPU, where threads share a sum.
#[test]
fn sums_do_not_depend_on_threads() {
    let rig = super::rig::cpu();
    let values = values(100_000, 3, true);
    let sums = [1, 2].map(|threads| {
        let out = rig.buffer(&[0u8; 16]);
        let source = Source::F32(rig.buffer(&values));
        let work = Work::SumSquares(vec![SumSquaresJob {
            source,
            out: out.clone(),
        }]);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| rig.run(work));
        rig.content::<u8>(&out)
    });
    assert_eq!(sums[0], sums[1]);
}

#[test]
fn a_sum_of_squares_is_near_the_exact_one() {
    let values = values(10_000, 3, false);
    let (sum, non_finite) = reference::sum_of_squares(&values);
    let exact: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    assert!((sum / exact - 1.0).abs() < 1e-12);
    assert_eq!(non_finite, 0);
}
