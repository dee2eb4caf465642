//! Encoding against the reference, and both orientations against each alone.

use proptest::prelude::*;

use super::*;
use crate::StochasticKey;
use crate::reference::Reference;

pub(super) fn every_ingredient_equals_the_reference<B: Backend>(rig: &Rig<B>) {
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
            let tensor = if special { 3.75 } else { 123.4 };
            let reference = Reference {
                shape,
                kernel: case.kernel,
                values: &values,
                source_rounding,
                tensor,
                random: None,
            };
            let job = encode_job(rig, case.kernel, &case.specs, shape, source, tensor);
            let job = EncodeJob {
                source_rounding,
                ..job
            };
            let targets = job.targets.clone();
            rig.run(Work::Encode(vec![job]));
            for target in &targets {
                let expected = reference.encode(&target.spec).unwrap();
                let found = rig.content::<u8>(&target.bytes);
                let at = found.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(
                    at, None,
                    "{rig:?} {shape} {:?} {:?}",
                    target.spec, case.kernel
                );
                assert_eq!(found.len(), expected.len());
            }
        }
    }
}

pub(super) fn stochastic_rounding_is_keyed_by_element<B: Backend>(rig: &Rig<B>) {
    let stochastic = |case: &Case| traits(&case.kernel).unwrap().stochastic;
    for case in cases().into_iter().filter(stochastic) {
        for shape in shapes(&case) {
            let values = values(shape.elements(), 5, true);
            let source = Source::F32(rig.buffer(&values));
            let job = encode_job(rig, case.kernel, &case.specs, shape, source, 4.0);
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
            let reference = Reference {
                shape,
                kernel: case.kernel,
                values: &values,
                source_rounding: SourceRounding::F32,
                tensor: 4.0,
                random: Some((Philox::new(9, 3 + (5 << 32)), 0x1_0000_0007)),
            };
            for target in &targets {
                let expected = reference.encode(&target.spec).unwrap();
                assert_eq!(
                    rig.content::<u8>(&target.bytes),
                    expected,
                    "{rig:?} {shape} {:?}",
                    case.kernel
                );
            }
        }
    }
}

pub(super) fn one_plan_encodes_many_tensors<B: Backend>(rig: &Rig<B>) {
    let mut jobs = Vec::new();
    for case in cases() {
        for shape in shapes(&case) {
            let values = values(shape.elements(), 11, true);
            let source = Source::F32(rig.buffer(&values));
            jobs.push(encode_job(
                rig,
                case.kernel,
                &case.specs,
                shape,
                source,
                2.0,
            ));
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

pub(super) fn both_orientations_together_equal_each_alone<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(64);
    proptest!(config, |(
        index in 0..cases().len(), rows in 0usize..80, width in 1usize..4, seed: u64,
    )| {
        let case = &cases()[index];
        let shape = Shape::new(rows, case.columns() * width);
        let given = values(shape.elements(), seed, true);
        let encode = |specs: &[BufferSpec]| {
            let source = Source::F32(rig.buffer(&given));
            let job = encode_job(rig, case.kernel, specs, shape, source, 7.0);
            let targets = job.targets.clone();
            rig.run(Work::Encode(vec![job]));
            contents(rig, &targets)
        };
        let both = encode(&case.specs);
        for usage in [Usage::ROWWISE, Usage::COLUMNWISE] {
            for (key, bytes) in encode(&case.of_usage(usage)) {
                let together = both.iter().find(|(k, _)| *k == key).unwrap();
                prop_assert_eq!(&together.1, &bytes);
            }
        }
    });
}
