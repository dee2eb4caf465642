//! Encodes that write their block scales in Padded and Swizzled form.

use lowp_format::{Form, Orientation};

use super::*;
use lowp_kernels::reference::in_form;
use lowp_kernels::{DecodeJob, FlatEncodeJob};

/// The ingredients with block scales, with the padding that GEMMs ask for.
fn padded_cases() -> Vec<Case> {
    let scaled = |case: &Case| case.longest().is_some();
    cases()
        .into_iter()
        .filter(scaled)
        .map(Case::padded)
        .collect()
}

/// A target for `spec` in every form but Compact that it has for an orientation that it serves;
/// Compact where it has none.
fn targets_in<B: Backend>(
    rig: &Rig<B>,
    spec: BufferSpec,
    shape: Shape,
    form: Form,
) -> Vec<Target<B>> {
    let mut targets = Vec::new();
    if spec.key.part == Part::BlockScale {
        for orientation in spec.key.usage.orientations() {
            let mut target = Target::in_form(spec, form, orientation, rig.buffer(&[]));
            if let Ok(layout) = target.layout(shape) {
                target.bytes = rig.buffer(&vec![0xA5u8; layout.bytes()]);
                targets.push(target);
            }
        }
    }
    if targets.is_empty() {
        targets.push(Target::new(
            spec,
            rig.buffer(&vec![0xA5u8; spec.bytes(shape)]),
        ));
    }
    targets
}

pub fn scales_are_written_in_every_form<B: Backend>(rig: &Rig<B>) {
    for (n, case) in rig.some_of(padded_cases(), 3).into_iter().enumerate() {
        let more =
            [[128, 256], [128, 320], [260, 1056], [129, 2080]].map(|[rows, cols]: [usize; 2]| {
                Shape::new(rows, cols.next_multiple_of(case.columns()))
            });
        // Of a brief case the middle ones.
        let more = if case.brief { &more[1..3] } else { &more };
        for (m, shape) in shapes(&case)
            .into_iter()
            .chain(more.iter().copied())
            .enumerate()
        {
            let given = values(shape.elements(), (n * 100 + m) as u64, true);
            let (source, values) = source(rig, &given, (n + m) % 2 == 0);
            let outer = case.outer(shape, 3.75);
            let oracle = Oracle::new(&case, shape, &values, outer.clone());
            let specs = case.specs();
            let expected: Vec<Vec<u8>> = specs.iter().map(|spec| oracle.encode(spec)).collect();
            for form in Form::ALL {
                let job = encode_job(rig, &case, &specs, shape, source.clone(), &outer);
                let targets = specs.iter();
                let targets = targets.flat_map(|spec| targets_in(rig, *spec, shape, form));
                let targets: Vec<Target<B>> = targets.collect();
                rig.run(Work::Encode(vec![EncodeJob {
                    targets: targets.clone(),
                    ..job
                }]));
                for target in &targets {
                    let spec = specs.iter().position(|spec| *spec == target.spec).unwrap();
                    let expected = oracle.in_form(target, &expected[spec]);
                    let (found, kernels) = (rig.content::<u8>(&target.bytes), case.kernels());
                    let what = (target.form, target.spec);
                    assert!(found == expected, "{rig:?} {shape} {what:?} {kernels:?}");
                }
            }
        }
    }
}

/// Compact scales to gather and swizzled ones to multiply with, from one job.
pub fn one_job_writes_several_forms<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(160, 320);
    for case in padded_cases() {
        let source = source(rig, &values(shape.elements(), 77, true), false).0;
        let forms = Form::ALL.into_iter();
        let targets: Vec<Target<B>> = forms
            .flat_map(|form| {
                let of = |spec: &BufferSpec| targets_in(rig, *spec, shape, form);
                case.specs().iter().flat_map(of).collect::<Vec<_>>()
            })
            .collect();
        if !shape.cols.is_multiple_of(case.columns()) {
            continue;
        }
        let outer = case.outer(shape, 5.0);
        let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
        let compact = job.targets.clone();
        rig.run(Work::Encode(vec![job.clone()]));
        rig.run(Work::Encode(vec![EncodeJob {
            targets: targets.clone(),
            ..job
        }]));
        for target in &targets {
            let alone = compact.iter().find(|t| t.spec == target.spec).unwrap();
            let mut expected = rig.content::<u8>(&alone.bytes);
            if target.form.is_some() {
                let from = alone.layout(shape).unwrap();
                expected = in_form(&from, &target.layout(shape).unwrap(), &expected);
            }
            assert!(rig.content::<u8>(&target.bytes) == expected, "{target:?}");
        }
    }
}

pub fn forms_must_exist<B: Backend>(rig: &Rig<B>) {
    let te = ScaleRule::E8M0(MxScale::Te);
    let mut case = case(Code::E4M3, te, Some([[1, 32], [32, 1]]), Some(ROW_MAJOR));
    let shape = Shape::new(4, 64);
    let source = Source::F32(rig.buffer(&[1f32; 256]));
    let plan = |case: &Case, target: usize, form, orientation| {
        let outer = case.outer(shape, 1.0);
        let mut job = encode_job(rig, case, &case.specs(), shape, source.clone(), &outer);
        job.targets[target].form = Some((form, orientation));
        rig.plan(Work::Encode(vec![job])).map(|_| ())
    };
    let words = |error: Result<(), KernelError>| error.unwrap_err().to_string();
    let (row, column) = (Orientation::Rowwise, Orientation::Columnwise);
    // Data have no form, and rowwise scales none for columnwise blocks.
    for (target, orientation) in [(0, row), (1, column)] {
        assert_eq!(
            plan(&case, target, Form::Padded, orientation),
            Err(KernelError::TargetForm {
                key: case.specs()[target].key,
                form: Form::Padded,
                orientation,
            })
        );
    }
    let error = words(plan(&case, 1, Form::Swizzled, row));
    assert!(error.contains("128x4"), "{error}");
    // A Compact buffer is too short for its padding.
    case.quantizers.rowwise.padded = PaddedForm::TILES_128X4;
    assert!(matches!(
        plan(&case, 1, Form::Swizzled, row),
        Err(KernelError::Length {
            needed: 512,
            found: 8,
            ..
        })
    ));
    // What reads scales, or writes a part of them, knows Compact only.
    let outer = case.outer(shape, 1.0);
    let job = encode_job(
        rig,
        &case,
        &case.specs()[..2],
        shape,
        source.clone(),
        &outer,
    );
    let mut scales = job.targets[1].clone();
    scales.form = Some((Form::Swizzled, row));
    let decode = rig.plan(Work::Decode(vec![DecodeJob {
        shape,
        kernel: case.kernels()[0],
        data: job.targets[0].clone(),
        block_scale: Some(scales.clone()),
        tensor_scale: None,
        out: Source::F32(rig.buffer(&[0f32; 256])),
    }]));
    let flat = rig.plan(Work::FlatEncode(vec![FlatEncodeJob {
        shape,
        start: 0,
        len: 256,
        kernels: case.kernels(),
        source,
        source_rounding: SourceRounding::F32,
        tensor: [None, None],
        blocks: None,
        targets: [scales].into_iter().collect(),
    }]));
    for error in [decode.map(|_| ()), flat.map(|_| ())].map(words) {
        assert!(error.contains("repack"), "{error}");
    }
}
