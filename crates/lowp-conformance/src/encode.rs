//! Encoding against the reference, and both orientations against each alone.

use lowp_format::{Orientation, hadamard_rows};
use proptest::prelude::*;

use super::*;
use lowp_kernels::StochasticKey;
use lowp_kernels::reference::RandomBytes;
use lowp_kernels::testing::is_stochastic;

pub fn every_ingredient_equals_the_reference<B: Backend>(rig: &Rig<B>) {
    for (n, case) in cases().into_iter().enumerate() {
        for (m, shape) in shapes(&case).into_iter().enumerate() {
            let half = (n + m) % 3 == 1;
            let via = (n + m) % 4 == 0;
            let special = m % 2 == 0;
            let given = values(shape.elements(), (n * 100 + m) as u64, special);
            let (source, values) = source(rig, &given, half);
            let source_rounding = if via {
                SourceRounding::ViaBf16
            } else {
                SourceRounding::F32
            };
            let outer = case.outer(shape, if special { 3.75 } else { 123.4 });
            let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
            let job = EncodeJob {
                source_rounding,
                ..job
            };
            let targets = job.targets.clone();
            rig.run(Work::Encode(vec![job]));
            let oracle = Oracle {
                source_rounding,
                ..Oracle::new(&case, shape, &values, outer)
            };
            oracle.assert(rig, &targets, &"encode");
        }
    }
}

pub fn stochastic_rounding_is_keyed_by_element<B: Backend>(rig: &Rig<B>) {
    let stochastic = |case: &Case| case.kernels().iter().all(is_stochastic);
    for case in cases().into_iter().filter(stochastic) {
        for shape in shapes(&case) {
            let values = values(shape.elements(), 5, true);
            let source = Source::F32(rig.buffer(&values));
            let outer = case.outer(shape, 4.0);
            let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
            let stochastic = Some(StochasticKey {
                seed: 9,
                stream: 3,
                first: 0x1_0000_0007,
            });
            let targets = job.targets.clone();
            let job = EncodeJob { stochastic, ..job };
            let scalars = StepScalars {
                random_step: 5,
                ..StepScalars::default()
            };
            rig.run_with(Work::Encode(vec![job]), &scalars);
            let oracle = Oracle {
                random: Some(RandomBytes {
                    philox: Philox::new(9, 3 + (5 << 32)),
                    first: 0x1_0000_0007,
                }),
                ..Oracle::new(&case, shape, &values, outer)
            };
            oracle.assert(rig, &targets, &"stochastic");
        }
    }
}

pub fn one_plan_encodes_many_tensors<B: Backend>(rig: &Rig<B>) {
    let mut jobs = Vec::new();
    for case in cases() {
        for shape in shapes(&case) {
            let values = values(shape.elements(), 11, true);
            let source = Source::F32(rig.buffer(&values));
            let outer = case.outer(shape, 2.0);
            jobs.push(encode_job(rig, &case, &case.specs(), shape, source, &outer));
        }
    }
    let together: Vec<_> = jobs.iter().map(|job| job.targets.clone()).collect();
    rig.run(Work::Encode(jobs.clone()));
    for (mut job, together) in jobs.into_iter().zip(together) {
        let expected = contents(rig, &together);
        for target in &mut job.targets {
            target.bytes = rig.buffer(&vec![0u8; rig.backend.len::<u8>(&target.bytes)]);
        }
        let alone = job.targets.clone();
        rig.run(Work::Encode(vec![job]));
        assert_eq!(contents(rig, &alone), expected);
    }
}

pub fn both_orientations_together_equal_each_alone<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(96);
    let cases = cases();
    proptest!(config, |(
        index in 0..cases.len(), rows in 0usize..80, width in 1usize..4, seed: u64,
    )| {
        let case = &cases[index];
        let shape = Shape::new(rows, case.columns() * width);
        let given = values(shape.elements(), seed, true);
        let outer = case.outer(shape, 7.0);
        let encode = |specs: &[BufferSpec], usage: Usage| {
            let source = Source::F32(rig.buffer(&given));
            let mut job = encode_job(rig, case, specs, shape, source, &outer);
            // What no target serves needs nothing, and may be anything.
            for orientation in Orientation::ALL {
                if !usage.contains(orientation.usage()) && !case.shares() {
                    job.tensor[orientation as usize] = None;
                    job.kernels[orientation as usize].block = Some([0, 77]);
                }
            }
            let targets = job.targets.clone();
            rig.run(Work::Encode(vec![job]));
            contents(rig, &targets)
        };
        let both = encode(&case.specs(), Usage::BOTH);
        for usage in [Usage::ROWWISE, Usage::COLUMNWISE] {
            for (key, bytes) in encode(&case.of_usage(usage), usage) {
                let together = both.iter().find(|(k, _)| *k == key).unwrap();
                prop_assert_eq!(&together.1, &bytes);
            }
        }
    });
}

/// An encode after a Hadamard transform is the encode of transformed values (docs/numerics.md 15); rows after the
/// last whole group are only rounded.
pub fn a_transform_is_that_of_its_values<B: Backend>(rig: &Rig<B>) {
    let transformed = |case: &Case| case.kernels()[1].hadamard;
    for case in cases().into_iter().filter(transformed) {
        let unit = case.columns();
        for (m, rows) in [0, 1, 15, 16, 17, 31, 32, 48, 100, 257]
            .into_iter()
            .enumerate()
        {
            for cols in [unit, 7 * unit] {
                let shape = Shape::new(rows, cols);
                let given = values(shape.elements(), m as u64, m % 3 == 0);
                let (source, widened) = source(rig, &given, m % 2 == 1);
                let specs = case.of_usage(Usage::COLUMNWISE);
                let [_, columnwise] = case.outer(shape, 2.5);
                let outer = [columnwise.clone(), columnwise];
                let run = |case: &Case, source| {
                    let mut job = encode_job(rig, case, &specs, shape, source, &outer);
                    job.tensor[0] = None;
                    rig.run(Work::Encode(vec![job.clone()]));
                    contents(rig, &job.targets)
                };
                let mut values = widened;
                hadamard_rows(&mut values, cols);
                let plain = case.with(|key| key.hadamard = false);
                let expected = run(&plain, Source::F32(rig.buffer(&values)));
                assert!(run(&case, source) == expected, "{rig:?} {shape}");
            }
        }
    }
}
