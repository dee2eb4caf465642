//! Amaxes and sums of squares.

use lowp_format::{Extent, Orientation, Shape, hadamard_rows};
use proptest::prelude::*;

use super::*;
use lowp_kernels::reference::{self, Reference};
use lowp_kernels::{AmaxJob, BlockAmax, SumSquaresJob};

/// Blocks, lines of either orientation, and the tensor.
pub fn pieces_of_a_matrix_raise_the_amaxes_of_the_whole<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(96);
    proptest!(config, |(
        // Of wide matrices, a piece may be a small part of a row.
        (rows, width) in prop_oneof![3 => (1usize..90, 1usize..5), 1 => (1usize..4, 150usize..200)], cuts in [0.0f64..1.0, 0.0f64..1.0], half: bool, via: bool, seed: u64,
    )| {
        let shape = Shape::new(rows, width * 32);
        let given = values(shape.elements(), seed, true);
        let (_, widened) = source(rig, &given, half);
        let mut cuts = cuts.map(|cut| (cut * shape.elements() as f64) as usize);
        cuts.sort_unstable();
        let source_rounding = if via { SourceRounding::ViaBf16 } else { SourceRounding::F32 };
        let out = rig.buffer(&vec![0f32; 16_000]);
        let lines = Orientation::ALL.map(|orientation| Extent::Line.block(orientation));
        let blocks = [[1, 32], [32, 1], [16, 16], lines[0], lines[1]];
        let reference = Reference {
            shape, values: &widened, source_rounding, tensor: &[], random: None,
            orientation: Orientation::Rowwise, kernel: KernelKey::new(Code::F32, ScaleRule::None),
        };
        let mut start = 3;
        let parts: Vec<BlockAmax> = blocks.iter().map(|&block| {
            let part = BlockAmax { block, start };
            start += reference.block_amaxes(block).len();
            part
        }).collect();
        let job = |range: std::ops::Range<usize>| AmaxJob {
            shape, start: range.start, source: source(rig, &widened[range], half).0,
            source_rounding, out: out.clone(), tensor: Some(1), blocks: parts.clone(), hadamard: false,
        };
        let pieces = [0..cuts[0], cuts[0]..cuts[1], cuts[1]..shape.elements()];
        rig.run(Work::Amax(pieces.map(job).into()));
        let found = rig.content::<f32>(&out);
        prop_assert_eq!(found[1].to_bits(), reference.tensor_amax().to_bits());
        for part in parts {
            let expected = reference.block_amaxes(part.block);
            prop_assert_eq!(&found[part.start..][..expected.len()], &expected[..]);
        }
        // Lines are what the rules of lines are made of.
        for (part, orientation) in lines.iter().zip(Orientation::ALL) {
            let kernel = KernelKey::new(Code::E4M3, LINES);
            let outer = Reference { kernel, orientation, ..reference }.outer_amaxes();
            prop_assert_eq!(reference.block_amaxes(*part), outer);
        }
        prop_assert!([0, 2].iter().chain(&(start..16_000).collect::<Vec<_>>()).all(|&i| found[i] == 0.0));
    });
}

/// Amaxes after a transform are those of transformed values, also where the last group of rows is not whole.
pub fn transformed_values_have_amaxes_of_their_own<B: Backend>(rig: &Rig<B>) {
    for (n, rows) in [1, 15, 16, 17, 40, 200, 256, 1024].into_iter().enumerate() {
        for cols in [1, 15, 16, 100, 320] {
            let shape = Shape::new(rows, cols);
            // Values that are not finite make all of them so: only some matrices have them.
            let given = values(shape.elements(), n as u64, n % 3 == 0);
            for (half, source_rounding) in [
                (false, SourceRounding::F32),
                (true, SourceRounding::F32),
                (false, SourceRounding::ViaBf16),
            ] {
                let (source, widened) = source(rig, &given, half);
                let found = |jobs: &[(usize, bool)]| {
                    let out = rig.buffer(&[1.0, -3.0, 2.0, -1.0]);
                    let job = |&(entry, hadamard): &(usize, bool)| AmaxJob {
                        shape,
                        start: 0,
                        source: source.clone(),
                        source_rounding,
                        out: out.clone(),
                        tensor: Some(entry),
                        blocks: Vec::new(),
                        hadamard,
                    };
                    rig.run(Work::Amax(jobs.iter().map(job).collect()));
                    rig.content::<f32>(&out)
                };
                let mut values: Vec<f32> =
                    widened.iter().map(|&x| source_rounding.apply(x)).collect();
                let plain = reference::amax(values.iter().copied());
                hadamard_rows(&mut values, cols);
                let transformed = reference::amax(values);
                let expected = [1.0, transformed, 2.0, -1.0];
                assert_eq!(found(&[(1, true)]), expected, "{rig:?} {shape}");
                // Beside that of the values themselves.
                let expected = [1.0, transformed, 2.0, plain];
                for jobs in [[(3, false), (1, true)], [(1, true), (3, false)]] {
                    assert_eq!(found(&jobs), expected, "{rig:?} {shape}");
                }
            }
        }
    }
}

/// What lines of nothing have is what was there.
pub fn empty_matrices_raise_nothing<B: Backend>(rig: &Rig<B>) {
    for (shape, hadamard) in [
        (Shape::new(0, 5), false),
        (Shape::new(5, 0), false),
        (Shape::new(0, 5), true),
    ] {
        let lines = Orientation::ALL.map(|o| BlockAmax {
            block: Extent::Line.block(o),
            start: 1,
        });
        let before = [0.5, -1.0, 2.0, -0.0, 3.0, 4.0];
        let out = rig.buffer(&before);
        rig.run(Work::Amax(vec![AmaxJob {
            shape,
            start: 0,
            source: Source::F32(rig.buffer::<f32>(&[])),
            source_rounding: SourceRounding::F32,
            out: out.clone(),
            tensor: Some(0),
            blocks: if hadamard { vec![] } else { lines.to_vec() },
            hadamard,
        }]));
        assert_eq!(bits(&rig.content::<f32>(&out)), bits(&before));
    }
}

pub fn sums_equal_the_reference<B: Backend>(rig: &Rig<B>) {
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
pub fn large_sums_equal_the_reference<B: Backend>(rig: &Rig<B>) {
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

pub fn large_amaxes_run<B: Backend>(rig: &Rig<B>) {
    // Rows, columns and blocks of several tasks.
    let shape = Shape::new(3500, 320);
    let values = values(shape.elements(), 21, true);
    let out = rig.buffer(&vec![0f32; 1 + 3500 * 11 + 320]);
    let lines = Orientation::ALL.map(|orientation| Extent::Line.block(orientation));
    let starts = [1, 1 + 35_000, 1 + 38_500];
    let blocks = [[1, 32], lines[0], lines[1]];
    let part = |(block, start)| BlockAmax { block, start };
    let job = AmaxJob {
        shape,
        start: 0,
        source: Source::F32(rig.buffer(&values)),
        source_rounding: SourceRounding::F32,
        out: out.clone(),
        tensor: Some(0),
        blocks: blocks.into_iter().zip(starts).map(part).collect(),
        hadamard: false,
    };
    rig.run(Work::Amax(vec![job]));
    let found = rig.content::<f32>(&out);
    assert_eq!(found[0], reference::amax(values.iter().copied()));
    for (width, start) in [(32, starts[0]), (320, starts[1])] {
        for (found, block) in found[start..].iter().zip(values.chunks(width)) {
            assert_eq!(*found, reference::amax(block.iter().copied()));
        }
    }
    for (col, found) in found[starts[2]..].iter().enumerate() {
        let column = values[col..].iter().step_by(320);
        assert_eq!(*found, reference::amax(column.copied()));
    }
}

/// On the CPU, where threads share a sum.
#[test]
fn sums_do_not_depend_on_threads() {
    let rig = super::rig::cpu::best();
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
