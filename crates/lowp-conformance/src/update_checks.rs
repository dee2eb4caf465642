//! Updates that are rejected, and those that change nothing.

use super::update::{ADAMW, Expected, job, of_halves, scalars};
use super::*;
use lowp_kernels::StateDtype::F32;
use lowp_kernels::{Master, Rule, UpdateAmax, UpdateJob};

/// The shape of the lines is that of the values, and of what is encoded.
pub fn lines_are_of_the_shape_of_the_master<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(4, 64);
    let update = |shape, lines| UpdateJob {
        amax: Some(UpdateAmax {
            shape,
            out: rig.buffer(&[0f32; 300]),
            tensor: None,
            lines,
        }),
        ..job(rig, ADAMW, 256, 1)
    };
    let plan = |job: UpdateJob<B>| rig.plan(Work::Update(vec![job])).map(|_| ());
    let (none, both) = ([None; 2], [Some(0), Some(4)]);
    let turned = Shape::new(64, 4);
    assert!(plan(update(shape, both)).is_ok());
    assert!(plan(update(turned, both)).is_ok());
    // Without lines there is nothing that the shape says.
    assert!(plan(update(Shape::new(1, 1), none)).is_ok());
    for other in [Shape::new(4, 63), Shape::new(1 << 40, 1 << 40)] {
        assert!(plan(update(other, both)).is_err());
    }
    let outside = plan(update(shape, [Some(297), None])).unwrap_err();
    assert!(
        matches!(outside, KernelError::Range { len: 300, .. }),
        "{outside}"
    );
    let case = case(Code::E4M3, CURRENT, None, Some(TRANSPOSED));
    for (lines, shape_of_lines, good) in [
        (both, shape, true),
        (both, turned, false),
        (none, turned, true),
    ] {
        let mut job = update(shape_of_lines, lines);
        let source = job.master.values().unwrap().clone();
        let outer = case.outer(shape, 1.0);
        let encode = encode_job(rig, &case, &case.specs(), shape, source, &outer);
        job.encode = Some(Box::new(encode));
        assert_eq!(plan(job).is_ok(), good, "{shape_of_lines}");
    }
}

/// What is a half of its master has no other codes, and no amax.
pub fn masters_in_halves_are_not_cast<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(4, 64);
    let job = || job(rig, of_halves(Rule::AdamW, &[F32, F32], false), 256, 1);
    let plan = |job: UpdateJob<B>| rig.plan(Work::Update(vec![job])).map(|_| ());
    assert_eq!(plan(job()), Ok(()));
    let amax = UpdateAmax {
        shape,
        out: rig.buffer(&[0f32; 1]),
        tensor: Some(0),
        lines: [None; 2],
    };
    let amax = Some(amax);
    assert_eq!(
        plan(UpdateJob { amax, ..job() }),
        Err(KernelError::CastParameter)
    );
    let case = case(Code::Bf16, ScaleRule::None, None, None);
    let source = Source::F32(rig.buffer(&[0f32; 256]));
    let encode = encode_job(
        rig,
        &case,
        &case.specs(),
        shape,
        source,
        &case.outer(shape, 1.0),
    );
    let encode = Some(Box::new(encode));
    assert_eq!(
        plan(UpdateJob { encode, ..job() }),
        Err(KernelError::CastParameter)
    );
    // Halves lie apart.
    let mut twice = job();
    if let Master::Bf16Plus16 {
        parameter,
        remainder,
    } = &mut twice.master
    {
        *remainder = parameter.clone();
    }
    let error = plan(twice).unwrap_err();
    assert!(matches!(error, KernelError::Aliased { .. }), "{error}");
}

pub fn missing_scalars_are_an_error<B: Backend>(rig: &Rig<B>) {
    let job = UpdateJob {
        group: 2,
        ..job(rig, ADAMW, 8, 1)
    };
    let plan = rig.plan(Work::Update(vec![job])).unwrap();
    let error = rig.backend.run(&plan, &StepScalars::default()).unwrap_err();
    assert_eq!(
        error,
        KernelError::Scalars {
            needed: 3,
            given: 0
        }
    );
}

pub fn a_skipped_run_changes_nothing<B: Backend>(rig: &Rig<B>) {
    let job = job(rig, ADAMW, 5000, 2);
    let plan = rig.plan(Work::Update(vec![job.clone()])).unwrap();
    let expected = Expected::new(rig, &job);
    let run = StepScalars {
        groups: vec![scalars(1)],
        skip: true,
        ..StepScalars::default()
    };
    rig.backend.run(&plan, &run).unwrap();
    expected.assert(rig, &job, 0);
}
