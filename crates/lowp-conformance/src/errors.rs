//! What planning rejects.

use lowp_format::{Extent, FormatError, FourOverSix, Orientation};

use super::*;
use lowp_kernels::{AmaxJob, BlockAmax, FlatEncodeJob, Rule, UpdateJob};

fn good<B: Backend>(rig: &Rig<B>) -> EncodeJob<B> {
    let case = case(
        Code::E4M3,
        ScaleRule::E8M0(MxScale::Te),
        Some([[1, 32], [32, 1]]),
        Some(ROW_MAJOR),
    );
    let shape = Shape::new(4, 64);
    let source = Source::F32(rig.buffer(&[1f32; 256]));
    encode_job(
        rig,
        &case,
        &case.specs(),
        shape,
        source,
        &case.outer(shape, 1.0),
    )
}

fn rejected<B: Backend>(rig: &Rig<B>, job: EncodeJob<B>) -> KernelError {
    rig.plan(Work::Encode(vec![job])).unwrap_err()
}

pub fn lengths_are_checked_and_named<B: Backend>(rig: &Rig<B>) {
    let mut job = good(rig);
    job.targets[1].bytes = rig.buffer(&[0u8; 7]);
    let what = "rowwise_scale_inv of job 0".to_owned();
    assert_eq!(
        rejected(rig, job),
        KernelError::Length {
            what,
            needed: 8,
            found: 7
        }
    );
    let job = EncodeJob {
        source: Source::Bf16(rig.buffer::<bf16>(&[])),
        ..good(rig)
    };
    assert!(matches!(
        rejected(rig, job),
        KernelError::Length {
            needed: 256,
            found: 0,
            ..
        }
    ));
}

pub fn outputs_do_not_alias<B: Backend>(rig: &Rig<B>) {
    let mut job = good(rig);
    job.targets[2].bytes = job.targets[0].bytes.clone();
    assert!(matches!(
        rejected(rig, job),
        KernelError::Aliased { other: 0, .. }
    ));
    let twice = vec![good(rig), good(rig), good(rig)];
    let mut shared = twice.clone();
    shared[2].targets[0].bytes = shared[1].targets[0].bytes.clone();
    assert!(rig.plan(Work::Encode(twice)).is_ok());
    let error = rig.plan(Work::Encode(shared)).unwrap_err();
    assert!(
        matches!(error, KernelError::Aliased { other: 1 | 2, .. }),
        "{error}"
    );
}

pub fn sources_and_slots_may_be_shared<B: Backend>(rig: &Rig<B>) {
    let (a, mut b) = (good(rig), good(rig));
    b.source = a.source.clone();
    b.tensor = a.tensor.clone();
    assert!(rig.plan(Work::Encode(vec![a, b])).is_ok());
}

/// Of either orientation, but of one that no target serves.
pub fn ingredients_must_exist<B: Backend>(rig: &Rig<B>) {
    for orientation in [0, 1] {
        let mutated = |mutate: fn(&mut KernelKey)| {
            let mut job = good(rig);
            mutate(&mut job.kernels[orientation]);
            let usage = Orientation::ALL[orientation].usage();
            let mut other = job.clone();
            other.targets.retain(|t| !usage.contains(t.spec.key.usage));
            assert!(rig.plan(Work::Encode(vec![other])).is_ok());
            rejected(rig, job)
        };
        for unknown in [
            mutated(|key| key.element = Code::F32),
            mutated(|key| key.block = None),
        ] {
            assert!(matches!(unknown, KernelError::Ingredients { .. }));
        }
        let other = mutated(|key| key.block = Some([1, 16]));
        assert!(matches!(other, KernelError::TargetEntries { .. }));
        let long = mutated(|key| key.block = Some([1, 4097]));
        assert!(matches!(long, KernelError::BlockSide { side: 4097, .. }));
    }
    let mut job = good(rig);
    job.stochastic = Some(lowp_kernels::StochasticKey {
        seed: 0,
        stream: 0,
        first: 0,
    });
    let element = Code::E4M3;
    assert_eq!(rejected(rig, job), KernelError::Stochastic { element });
}

/// A choice of four over six is of 1x16, 16x1 or 16x16 blocks; lines have blocks of one line.
pub fn blocks_fit_what_stands_above_them<B: Backend>(rig: &Rig<B>) {
    let rule = |extent, four_over_six| ScaleRule::TwoLevel {
        extent,
        four_over_six,
    };
    let (tensor, line) = (Extent::Tensor, Extent::Line);
    let (off, mae) = (FourOverSix::Off, FourOverSix::Mae);
    let lines = [[1, 16], [16, 1]];
    for (scale, blocks, good) in [
        (rule(tensor, mae), lines, true),
        (rule(tensor, mae), [[16, 16]; 2], true),
        (rule(tensor, mae), [[1, 32], [32, 1]], false),
        (rule(tensor, mae), [[16, 8], [8, 16]], false),
        (rule(line, mae), lines, true),
        (rule(line, mae), [[16, 16]; 2], false),
        (rule(line, off), lines, true),
        (rule(line, off), [[1, 32], [32, 1]], true),
        (rule(line, off), [[16, 16]; 2], false),
        (rule(line, off), [[16, 1], [1, 16]], false),
    ] {
        for side in 0..2 {
            let case = case(Code::E2M1, scale, Some(blocks), Some(TRANSPOSED));
            let shape = Shape::new(16, 64);
            let source = Source::F32(rig.buffer(&[1f32; 1024]));
            let specs = case.of_usage(Orientation::ALL[side].usage());
            let outer = case.outer(shape, 1.0);
            let job = encode_job(rig, &case, &specs, shape, source, &outer);
            let planned = rig.plan(Work::Encode(vec![job])).map(|_| ());
            match planned {
                Ok(()) => assert!(good, "{scale:?} {blocks:?}"),
                Err(error) => assert!(
                    !good && matches!(error, KernelError::Ingredients { .. }),
                    "{scale:?} {blocks:?}: {error}"
                ),
            }
        }
    }
}

/// What one buffer holds of both orientations is made of one scale.
pub fn a_buffer_of_both_orientations_has_one_slot<B: Backend>(rig: &Rig<B>) {
    let case = case(Code::E4M3, CURRENT, None, Some(TRANSPOSED));
    let shape = Shape::new(32, 64);
    let source = Source::F32(rig.buffer(&vec![1f32; shape.elements()]));
    let outer = case.outer(shape, 2.0);
    let mut job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
    assert!(rig.plan(Work::Encode(vec![job.clone()])).is_ok());
    let buffer = rig.buffer(&[2f32]);
    job.tensor[1] = Some(TensorInput::Known(Slot { buffer, index: 0 }));
    let error = rejected(rig, job);
    assert_eq!(error, KernelError::SlotsDiffer { job: 0 });
    assert!(error.to_string().contains("give both the same slot"));
}

/// One buffer cannot hold what two orientations have apart, and says what they have.
pub fn a_buffer_of_both_orientations_has_ingredients_of_both<B: Backend>(rig: &Rig<B>) {
    for part in [0, 1] {
        let mut job = good(rig);
        let kernels = Box::new(job.kernels);
        job.targets[part].spec.key.usage = Usage::BOTH;
        let error = rejected(rig, job);
        assert!(
            error.to_string().contains("1x32 blocks and E4M3 elements"),
            "{error}"
        );
        assert_eq!(error, KernelError::KernelsDiffer { kernels });
    }
    let mut alike = good(rig);
    alike.kernels[1] = alike.kernels[0];
    alike.targets.truncate(2);
    for target in &mut alike.targets {
        target.spec.key.usage = Usage::BOTH;
    }
    assert!(rig.plan(Work::Encode(vec![alike])).is_ok());
    // Scales of lines are of one orientation.
    let case = case(Code::E4M3, LINES, None, Some(ROW_MAJOR));
    let shape = Shape::new(16, 16);
    let source = Source::F32(rig.buffer(&[1f32; 256]));
    let outer = case.outer(shape, 1.0);
    let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
    for (target, fits) in [(0, true), (2, false)] {
        let mut job = job.clone();
        job.targets = vec![job.targets[target].clone()];
        job.targets[0].spec.key.usage = Usage::BOTH;
        let planned = rig.plan(Work::Encode(vec![job])).map(|_| ());
        let expected = match planned {
            Ok(()) => fits,
            Err(KernelError::TargetEntries { .. }) => !fits,
            Err(_) => false,
        };
        assert!(expected, "{target}");
    }
}

/// Flat ranges and blocks are not of whole groups of 16 rows, nor are updated weights transformed.
pub fn a_transform_is_of_whole_rows<B: Backend>(rig: &Rig<B>) {
    let mut encode = good(rig);
    encode.kernels[1].hadamard = true;
    assert!(rig.plan(Work::Encode(vec![encode.clone()])).is_ok());
    let [flat, fused] = [flat(&encode), fused(rig, &encode)];
    let amax = |start: usize, blocks: Vec<BlockAmax>| {
        Work::Amax(vec![AmaxJob {
            shape: Shape::new(20, 16),
            start,
            source: Source::F32(rig.buffer(&vec![1f32; 320 - start])),
            source_rounding: SourceRounding::F32,
            out: rig.buffer(&[0f32; 400]),
            tensor: Some(0),
            blocks,
            hadamard: true,
        }])
    };
    assert!(rig.plan(amax(0, vec![])).is_ok());
    let line = Extent::Line.block(Orientation::Columnwise);
    let blocks = [[16, 1], line].map(|block| amax(0, vec![BlockAmax { block, start: 1 }]));
    for work in blocks.into_iter().chain([flat, fused, amax(16, vec![])]) {
        let error = rig.plan(work).map(|_| ()).unwrap_err();
        assert!(matches!(error, KernelError::Hadamard { .. }), "{error}");
        assert!(error.to_string().contains("groups of 16 rows"), "{error}");
    }
}

/// A block of a flat range may be in two parts, and a choice needs all of its error.
pub fn a_choice_is_of_whole_blocks<B: Backend>(rig: &Rig<B>) {
    let scale = ScaleRule::TwoLevel {
        extent: Extent::Tensor,
        four_over_six: FourOverSix::Mse,
    };
    let case = case(Code::E2M1, scale, Some([[1, 16], [16, 1]]), Some(ROW_MAJOR));
    let shape = Shape::new(4, 64);
    let source = Source::F32(rig.buffer(&[1f32; 256]));
    let outer = case.outer(shape, 1.0);
    let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
    let error = rig.plan(flat(&job)).map(|_| ()).unwrap_err();
    assert_eq!(error, KernelError::FlatChoice);
    assert!(error.to_string().contains("between rows"), "{error}");
    let stochastic = Some(lowp_kernels::StochasticKey::default());
    let element = Code::E2M1;
    let stochastic = rejected(rig, EncodeJob { stochastic, ..job });
    assert_eq!(stochastic, KernelError::Stochastic { element });
}

/// `job` as a flat encode of everything.
fn flat<B: Backend>(job: &EncodeJob<B>) -> Work<B> {
    Work::FlatEncode(vec![FlatEncodeJob {
        shape: job.shape,
        start: 0,
        len: job.shape.elements(),
        kernels: job.kernels,
        source: job.source.clone(),
        source_rounding: job.source_rounding,
        tensor: job.tensor.clone(),
        blocks: None,
        targets: job.targets.clone(),
    }])
}

/// `job` fused with an update of its source.
fn fused<B: Backend>(rig: &Rig<B>, job: &EncodeJob<B>) -> Work<B> {
    let Source::F32(master) = job.source.clone() else {
        unreachable!()
    };
    let grad = Source::F32(rig.buffer(&vec![0f32; job.shape.elements()]));
    let mut update = UpdateJob::new(&rig.backend, Rule::AdamW, master, grad).unwrap();
    update.encode = Some(Box::new(job.clone()));
    Work::Update(vec![update])
}

/// A decode scale where the rule keeps an amax, and the other way round; of a line where it keeps that of the tensor.
pub fn the_number_of_a_tensor_is_what_the_rule_keeps<B: Backend>(rig: &Rig<B>) {
    let blocks = Some([[1, 16], [16, 1]]);
    for case in [
        case(Code::E4M3, CURRENT, None, Some(TRANSPOSED)),
        case(Code::E4M3, LINES, None, Some(TRANSPOSED)),
        case(Code::E2M1, ScaleRule::TWO_LEVEL, blocks, Some(ROW_MAJOR)),
    ] {
        let shape = Shape::new(16, 16);
        let source = Source::F32(rig.buffer(&[1f32; 256]));
        let outer = case.outer(shape, 1.0);
        let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
        assert!(rig.plan(Work::Encode(vec![job.clone()])).is_ok());
        let mut other = job.clone();
        let parts = other.targets.iter_mut().map(|t| &mut t.spec.key.part);
        for part in parts.filter(|part| part.is_outer()) {
            *part = match *part {
                Part::DecodeScale => Part::Amax,
                _ => Part::DecodeScale,
            };
        }
        let error = rejected(rig, other);
        assert!(matches!(error, KernelError::TargetPart { .. }), "{error}");
        let mut other = job;
        let line = |orientation| {
            BufferSpec::of_lines(Usage::ROWWISE, Part::Data, orientation, Origin::Quantized)
        };
        for spec in other.targets.iter_mut().map(|t| &mut t.spec) {
            if spec.key.part.is_outer() {
                let tile = spec.tile;
                spec.tile = line(Orientation::Rowwise).tile;
                if tile == spec.tile {
                    spec.tile = [BufferSpec::WHOLE; 2];
                }
            }
        }
        let error = rejected(rig, other);
        assert!(
            matches!(error, KernelError::TargetEntries { .. }),
            "{error}"
        );
    }
}

pub fn required_parts_are_missed<B: Backend>(rig: &Rig<B>) {
    for (scale, entries) in [(CURRENT, [1, 1]), (LINES, [2, 3])] {
        let case = case(Code::E4M3, scale, None, Some(TRANSPOSED));
        let shape = Shape::new(2, 3);
        let source = Source::F32(rig.buffer(&[1f32; 6]));
        let outer = case.outer(shape, 1.0);
        let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
        for side in 0..2 {
            let mut lost = job.clone();
            lost.tensor[side] = None;
            assert!(matches!(rejected(rig, lost), KernelError::Missing { .. }));
            let mut outside = job.clone();
            for known in [false, true] {
                let slot = Slot {
                    buffer: rig.buffer(&[1f32; 7]),
                    index: 8 - entries[side],
                };
                outside.tensor[side] = Some(match known {
                    true => TensorInput::Known(slot),
                    false => TensorInput::Observed(slot),
                });
                let error = rejected(rig, outside.clone());
                let short = matches!(
                    error,
                    KernelError::Length {
                        needed: 8,
                        found: 7,
                        ..
                    }
                );
                assert!(short, "{error}");
            }
        }
    }
}

pub fn columns_must_be_whole_blocks<B: Backend>(rig: &Rig<B>) {
    let mut job = good(rig);
    job.shape.cols = 48;
    let error = rejected(
        rig,
        EncodeJob {
            source: Source::F32(rig.buffer(&[0f32; 192])),
            ..job
        },
    );
    assert!(matches!(
        error,
        KernelError::Format(FormatError::Columns { multiple: 32, .. })
    ));
}

pub fn ranges_of_buffers_are_checked<B: Backend>(rig: &Rig<B>) {
    let buffer = rig.buffer(&[0u8; 4]);
    let error = rig.backend.write(&buffer, 2, &[0u8; 3]).unwrap_err();
    assert_eq!(
        error,
        KernelError::Range {
            what: "write",
            start: 2,
            end: 5,
            len: 4
        }
    );
    // Parts of one buffer may be copied, but not onto themselves.
    let overlapping = rig.backend.copy::<u8>(&buffer, 0..2, &buffer, 1);
    assert!(matches!(overlapping, Err(KernelError::Aliased { .. })));
    rig.backend.copy::<u8>(&buffer, 0..2, &buffer, 2).unwrap();
    let other = rig.buffer(&[7u8; 4]);
    rig.backend.copy::<u8>(&other, 1..3, &buffer, 2).unwrap();
    assert_eq!(rig.content::<u8>(&buffer), [0, 0, 7, 7]);
}

/// On the CPU, where a thread may fail while it holds a buffer.
#[test]
fn a_poisoned_buffer_is_an_error() {
    let rig = super::rig::cpu::best();
    let job = good(&rig);
    let bytes = job.targets[0].bytes.clone();
    let plan = rig.plan(Work::Encode(vec![job])).unwrap();
    let broken = std::thread::spawn(move || {
        let _guard = bytes.write();
        panic!("while writing");
    });
    assert!(broken.join().is_err());
    let error = rig.backend.run(&plan, &StepScalars::default());
    assert_eq!(error, Err(KernelError::Poisoned));
}
