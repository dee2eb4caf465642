//! Encoding against the reference, and both orientations against each alone.

use proptest::prelude::*;

use super::*;
use crate::StochasticKey;
use crate::reference::Reference;

#[test]
fn every_ingredient_equals_the_reference() {
    everywhere(|isa| {
        for (n, case) in cases().into_iter().enumerate() {
            for (m, shape) in shapes(&case).into_iter().enumerate() {
                let half = (n + m) % 3 == 1;
                let via = (n + m) % 4 == 0;
                let special = m % 2 == 0;
                let given = values(shape.elements(), (n * 100 + m) as u64, special);
                let (source, values) = source(&given, half);
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
                let job = encode_job(case.kernel, &case.specs, shape, source, tensor);
                let job = EncodeJob {
                    source_rounding,
                    ..job
                };
                let targets = job.targets.clone();
                let plan = plan(Work::Encode(vec![job])).unwrap().with_isa(isa);
                plan.run(&StepScalars::default()).unwrap();
                for target in &targets {
                    let expected = reference.encode(&target.spec).unwrap();
                    let found = target.bytes.read().unwrap();
                    let at = found.iter().zip(&expected).position(|(a, b)| a != b);
                    assert_eq!(
                        at, None,
                        "{shape} {isa:?} {:?} {:?}",
                        target.spec, case.kernel
                    );
                    assert_eq!(found.len(), expected.len());
                }
            }
        }
    });
}

#[test]
fn stochastic_rounding_is_keyed_by_element() {
    let two_level = |case: &Case| case.kernel.scale == ScaleRule::TwoLevel;
    everywhere(|isa| {
        for case in cases().into_iter().filter(two_level) {
            for shape in shapes(&case) {
                let values = values(shape.elements(), 5, true);
                let source = Source::F32(CpuBuffer::from_vec(values.clone()));
                let job = encode_job(case.kernel, &case.specs, shape, source, 4.0);
                let stochastic = Some(StochasticKey {
                    seed: 9,
                    stream: 3,
                    first: 0x1_0000_0007,
                });
                let targets = job.targets.clone();
                let job = EncodeJob { stochastic, ..job };
                let plan = plan(Work::Encode(vec![job])).unwrap().with_isa(isa);
                let scalars = StepScalars {
                    random_step: 5,
                    ..StepScalars::default()
                };
                plan.run(&scalars).unwrap();
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
                    assert_eq!(*target.bytes.read().unwrap(), expected, "{shape}");
                }
            }
        }
    });
}

#[test]
fn one_plan_encodes_many_tensors() {
    let mut jobs = Vec::new();
    for case in cases() {
        for shape in shapes(&case) {
            let values = values(shape.elements(), 11, true);
            let source = Source::F32(CpuBuffer::from_vec(values));
            jobs.push(encode_job(case.kernel, &case.specs, shape, source, 2.0));
        }
    }
    let together: Vec<_> = jobs.iter().map(|job| job.targets.clone()).collect();
    run(Work::Encode(jobs.clone()));
    for (mut job, together) in jobs.into_iter().zip(together) {
        let expected = contents(&together);
        for target in &mut job.targets {
            target.bytes = CpuBuffer::from_vec(vec![0; target.bytes.len()]);
        }
        let alone = job.targets.clone();
        run(Work::Encode(vec![job]));
        assert_eq!(contents(&alone), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn both_orientations_together_equal_each_alone(
        index in 0..cases().len(), rows in 0usize..80, width in 1usize..4, seed: u64,
    ) {
        let case = &cases()[index];
        let shape = Shape::new(rows, case.columns() * width);
        let given = values(shape.elements(), seed, true);
        let encode = |specs: &[BufferSpec]| {
            let source = Source::F32(CpuBuffer::from_vec(given.clone()));
            let job = encode_job(case.kernel, specs, shape, source, 7.0);
            let targets = job.targets.clone();
            run(Work::Encode(vec![job]));
            contents(&targets)
        };
        let both = encode(&case.specs);
        for usage in [Usage::ROWWISE, Usage::COLUMNWISE] {
            for (key, bytes) in encode(&case.of_usage(usage)) {
                let together = both.iter().find(|(k, _)| *k == key).unwrap();
                prop_assert_eq!(&together.1, &bytes);
            }
        }
    }
}
