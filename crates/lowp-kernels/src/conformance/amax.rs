//! Amaxes and sums of squares.

use lowp_format::Shape;
use proptest::prelude::*;
use smallvec::smallvec;

use super::*;
use crate::reference::{self, Reference};
use crate::{AmaxJob, BlockAmax, SumSquaresJob};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn pieces_of_a_matrix_raise_the_amaxes_of_the_whole(
        rows in 1usize..90, width in 1usize..5, cut in 0.0f64..1.0, half: bool, via: bool, seed: u64,
    ) {
        let shape = Shape::new(rows, width * 32);
        let (whole, widened) = source(&values(shape.elements(), seed, true), half);
        let cut = (cut * shape.elements() as f64) as usize;
        let source_rounding = if via { SourceRounding::ViaBf16 } else { SourceRounding::F32 };
        let out = CpuBuffer::from_vec(vec![0f32; 4000]);
        let blocks = [[1, 32], [32, 1], [16, 16]];
        let mut start = 3;
        let parts: SmallVec<[BlockAmax; 2]> = blocks.iter().map(|&block| {
            let part = BlockAmax { block, start };
            start += rows.div_ceil(block[0]) * shape.cols.div_ceil(block[1]);
            part
        }).collect();
        let piece = |range: std::ops::Range<usize>| match &whole {
            Source::F32(b) => Source::F32(CpuBuffer::from_vec(b.read().unwrap()[range].to_vec())),
            Source::Bf16(b) => Source::Bf16(CpuBuffer::from_vec(b.read().unwrap()[range].to_vec())),
        };
        let job = |range: std::ops::Range<usize>| AmaxJob {
            shape, start: range.start, source: piece(range), source_rounding,
            out: out.clone(), tensor: Some(1), blocks: parts.clone(),
        };
        run(Work::Amax(vec![job(0..cut), job(cut..shape.elements())]));
        let reference = Reference {
            shape, values: &widened, source_rounding, tensor: 1.0, random: None,
            kernel: case(Code::F32, ScaleRule::None, None, None).kernel,
        };
        let found = out.read().unwrap();
        prop_assert_eq!(found[1].to_bits(), reference.tensor_amax().to_bits());
        for part in parts {
            let expected = reference.block_amaxes(part.block);
            prop_assert_eq!(&found[part.start..][..expected.len()], &expected[..]);
        }
    }

    #[test]
    fn sums_do_not_depend_on_threads(len in 0usize..100_000, seed: u64) {
        let values = values(len, seed, true);
        let mut sums = Vec::new();
        for threads in [1, 2] {
            let out = CpuBuffer::from_vec(vec![0u8; 16]);
            let source = Source::F32(CpuBuffer::from_vec(values.clone()));
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| run(Work::SumSquares(vec![SumSquaresJob { source, out: out.clone() }])));
            sums.push(out.read().unwrap().to_vec());
        }
        prop_assert_eq!(&sums[0], &sums[1]);
        let count = u64::from_le_bytes(sums[0][8..].try_into().unwrap());
        prop_assert_eq!(count, values.iter().filter(|x| !x.is_finite()).count() as u64);
    }
}

#[test]
fn a_sum_of_squares_is_near_the_exact_one_and_accumulates() {
    let values = values(10_000, 3, false);
    let out = CpuBuffer::from_vec(vec![0u8; 16]);
    let source = || Source::F32(CpuBuffer::from_vec(values.clone()));
    let job = || SumSquaresJob {
        source: source(),
        out: out.clone(),
    };
    run(Work::SumSquares(vec![job(), job()]));
    let found = f64::from_le_bytes(out.read().unwrap()[..8].try_into().unwrap());
    let exact: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    assert!((found / (2.0 * exact) - 1.0).abs() < 1e-12);
}

#[test]
fn large_amaxes_run_everywhere() {
    let shape = Shape::new(700, 320);
    let values = values(shape.elements(), 21, true);
    everywhere(|isa| {
        let out = CpuBuffer::from_vec(vec![0f32; 1 + 700 * 10]);
        let job = AmaxJob {
            shape,
            start: 0,
            source: Source::F32(CpuBuffer::from_vec(values.clone())),
            source_rounding: SourceRounding::F32,
            out: out.clone(),
            tensor: Some(0),
            blocks: smallvec![BlockAmax {
                block: [1, 32],
                start: 1
            }],
        };
        let plan = plan(Work::Amax(vec![job])).unwrap().with_isa(isa);
        plan.run(&StepScalars::default()).unwrap();
        let found = out.read().unwrap();
        assert_eq!(found[0], reference::amax(values.iter().copied()));
        for (found, block) in found[1..].iter().zip(values.chunks(32)) {
            assert_eq!(*found, reference::amax(block.iter().copied()));
        }
    });
}
