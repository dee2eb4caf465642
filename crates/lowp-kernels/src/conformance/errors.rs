//! What planning rejects.

use lowp_format::FormatError;

use super::*;

fn good<B: Backend>(rig: &Rig<B>) -> EncodeJob<B> {
    let case = case(
        Code::E4M3,
        ScaleRule::E8M0(MxScale::Te),
        Some([[1, 32], [32, 1]]),
        Some(ROW_MAJOR),
    );
    let shape = Shape::new(4, 64);
    let source = Source::F32(rig.buffer(&[1f32; 256]));
    encode_job(rig, case.kernel, &case.specs, shape, source, 1.0)
}

fn rejected<B: Backend>(rig: &Rig<B>, job: EncodeJob<B>) -> KernelError {
    rig.plan(Work::Encode(vec![job])).unwrap_err()
}

pub(super) fn lengths_are_checked_and_named<B: Backend>(rig: &Rig<B>) {
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

pub(super) fn outputs_do_not_alias<B: Backend>(rig: &Rig<B>) {
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

pub(super) fn sources_and_slots_may_be_shared<B: Backend>(rig: &Rig<B>) {
    let (a, mut b) = (good(rig), good(rig));
    b.source = a.source.clone();
    b.tensor = a.tensor.clone();
    assert!(rig.plan(Work::Encode(vec![a, b])).is_ok());
}

pub(super) fn ingredients_must_exist<B: Backend>(rig: &Rig<B>) {
    let mut job = good(rig);
    job.kernel.element = Code::F32;
    assert!(matches!(
        rejected(rig, job),
        KernelError::Ingredients { .. }
    ));
    let mut job = good(rig);
    job.kernel.blocks = None;
    assert!(matches!(
        rejected(rig, job),
        KernelError::Ingredients { .. }
    ));
    let mut job = good(rig);
    job.kernel.blocks = Some([[1, 16], [32, 1]]);
    assert!(matches!(
        rejected(rig, job),
        KernelError::TargetEntries { .. }
    ));
    let mut job = good(rig);
    job.targets[0].spec.key.usage = Usage::BOTH;
    assert!(matches!(
        rejected(rig, job),
        KernelError::BlocksDiffer { .. }
    ));
    let mut job = good(rig);
    job.stochastic = Some(crate::StochasticKey {
        seed: 0,
        stream: 0,
        first: 0,
    });
    assert_eq!(
        rejected(rig, job),
        KernelError::Stochastic {
            element: Code::E4M3
        }
    );
}

/// A decode scale where the rule keeps an amax, and the other way round.
pub(super) fn the_number_of_a_tensor_is_what_the_rule_keeps<B: Backend>(rig: &Rig<B>) {
    let blocks = Some([[1, 16], [16, 1]]);
    for case in [
        case(Code::E4M3, ScaleRule::Tensor, None, Some(TRANSPOSED)),
        case(Code::E2M1, ScaleRule::TwoLevel, blocks, Some(ROW_MAJOR)),
    ] {
        let shape = Shape::new(16, 16);
        let source = Source::F32(rig.buffer(&[1f32; 256]));
        let job = encode_job(rig, case.kernel, &case.specs, shape, source, 1.0);
        assert!(rig.plan(Work::Encode(vec![job.clone()])).is_ok());
        let mut other = job;
        let parts = other.targets.iter_mut().map(|t| &mut t.spec.key.part);
        for part in parts.filter(|part| part.is_per_tensor()) {
            *part = match *part {
                Part::DecodeScale => Part::TensorAmax,
                _ => Part::DecodeScale,
            };
        }
        assert!(matches!(
            rejected(rig, other),
            KernelError::TargetPart { .. }
        ));
    }
}

pub(super) fn required_parts_are_missed<B: Backend>(rig: &Rig<B>) {
    let case = case(Code::E4M3, ScaleRule::Tensor, None, Some(TRANSPOSED));
    let shape = Shape::new(2, 2);
    let source = Source::F32(rig.buffer(&[1f32; 4]));
    let job = encode_job(rig, case.kernel, &case.specs, shape, source, 1.0);
    let lost = EncodeJob {
        tensor: None,
        ..job.clone()
    };
    assert!(matches!(rejected(rig, lost), KernelError::Missing { .. }));
    let mut outside = job;
    let Some(TensorInput::Known(slot)) = &mut outside.tensor else {
        unreachable!()
    };
    slot.index = 2;
    assert!(matches!(
        rejected(rig, outside),
        KernelError::Length {
            needed: 3,
            found: 2,
            ..
        }
    ));
}

pub(super) fn columns_must_be_whole_blocks<B: Backend>(rig: &Rig<B>) {
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

pub(super) fn ranges_of_buffers_are_checked<B: Backend>(rig: &Rig<B>) {
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
    let rig = super::rig::cpu();
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
