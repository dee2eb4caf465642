//! What planning refuses.

use lowp_format::FormatError;

use super::*;

fn good() -> EncodeJob<Cpu> {
    let case = case(
        Code::E4M3,
        ScaleRule::E8M0(MxScale::Te),
        Some([[1, 32], [32, 1]]),
        Some(ROW_MAJOR),
    );
    let shape = Shape::new(4, 64);
    let source = Source::F32(CpuBuffer::from_vec(vec![1.0; 256]));
    encode_job(case.kernel, &case.specs, shape, source, 1.0)
}

fn refused(job: EncodeJob<Cpu>) -> KernelError {
    plan(Work::Encode(vec![job])).unwrap_err()
}

#[test]
fn lengths_are_checked_and_named() {
    let mut job = good();
    job.targets[1].bytes = CpuBuffer::from_vec(vec![0; 7]);
    let what = "rowwise_scale_inv of job 0".to_owned();
    assert_eq!(
        refused(job),
        KernelError::Length {
            what,
            needed: 8,
            found: 7
        }
    );
    let job = EncodeJob {
        source: Source::Bf16(CpuBuffer::from_vec(vec![])),
        ..good()
    };
    assert!(matches!(
        refused(job),
        KernelError::Length {
            needed: 256,
            found: 0,
            ..
        }
    ));
}

#[test]
fn outputs_do_not_alias() {
    let mut job = good();
    job.targets[2].bytes = job.targets[0].bytes.clone();
    assert!(matches!(
        refused(job),
        KernelError::Aliased { other: 0, .. }
    ));
    let twice = vec![good(), good(), good()];
    let mut shared = twice.clone();
    shared[2].targets[0].bytes = shared[1].targets[0].bytes.clone();
    assert!(plan(Work::Encode(twice)).is_ok());
    let error = plan(Work::Encode(shared)).unwrap_err();
    assert!(
        matches!(error, KernelError::Aliased { other: 1 | 2, .. }),
        "{error}"
    );
}

#[test]
fn sources_and_slots_may_be_shared() {
    let (a, mut b) = (good(), good());
    b.source = a.source.clone();
    b.tensor = a.tensor.clone();
    assert!(plan(Work::Encode(vec![a, b])).is_ok());
}

#[test]
fn ingredients_must_exist() {
    let mut job = good();
    job.kernel.element = Code::F32;
    assert!(matches!(refused(job), KernelError::NoKernel { .. }));
    let mut job = good();
    job.kernel.blocks = None;
    assert!(matches!(refused(job), KernelError::NoKernel { .. }));
    let mut job = good();
    job.kernel.blocks = Some([[1, 16], [32, 1]]);
    assert!(matches!(refused(job), KernelError::NoKernel { .. }));
    let mut job = good();
    job.targets[0].spec.key.usage = Usage::BOTH;
    assert!(matches!(refused(job), KernelError::NoKernel { .. }));
    let mut job = good();
    job.stochastic = Some(crate::StochasticKey {
        seed: 0,
        stream: 0,
        first: 0,
    });
    assert!(matches!(refused(job), KernelError::NoKernel { .. }));
}

#[test]
fn required_parts_are_missed() {
    let case = case(Code::E4M3, ScaleRule::Tensor, None, Some(TRANSPOSED));
    let shape = Shape::new(2, 2);
    let source = Source::F32(CpuBuffer::from_vec(vec![1.0; 4]));
    let job = encode_job(case.kernel, &case.specs, shape, source, 1.0);
    let lost = EncodeJob {
        tensor: None,
        ..job.clone()
    };
    assert!(matches!(refused(lost), KernelError::Missing { .. }));
    let mut outside = job;
    outside.tensor.as_mut().unwrap().index = 2;
    assert!(matches!(
        refused(outside),
        KernelError::Length {
            needed: 3,
            found: 2,
            ..
        }
    ));
}

#[test]
fn columns_must_be_whole_blocks() {
    let mut job = good();
    job.shape.cols = 48;
    let error = refused(EncodeJob {
        source: Source::F32(CpuBuffer::from_vec(vec![0.0; 192])),
        ..job
    });
    assert!(matches!(
        error,
        KernelError::Format(FormatError::Columns { multiple: 32, .. })
    ));
}

#[test]
fn ranges_of_buffers_are_checked() {
    let buffer = CpuBuffer::from_vec(vec![0u8; 4]);
    let error = Cpu.write(&buffer, 2, &[0; 3]).unwrap_err();
    assert_eq!(
        error,
        KernelError::Range {
            what: "write",
            start: 2,
            end: 5,
            len: 4
        }
    );
    assert!(Cpu.copy(&buffer, 0..2, &buffer, 2).is_err());
    let other = CpuBuffer::from_vec(vec![7u8; 4]);
    Cpu.copy(&other, 1..3, &buffer, 2).unwrap();
    assert_eq!(*buffer.read().unwrap(), [0, 0, 7, 7]);
}

#[test]
fn a_poisoned_buffer_is_an_error() {
    let job = good();
    let bytes = job.targets[0].bytes.clone();
    let plan = plan(Work::Encode(vec![job])).unwrap();
    let broken = std::thread::spawn(move || {
        let _guard = bytes.write();
        panic!("while writing");
    });
    assert!(broken.join().is_err());
    assert_eq!(
        plan.run(&StepScalars::default()),
        Err(KernelError::Poisoned)
    );
}
