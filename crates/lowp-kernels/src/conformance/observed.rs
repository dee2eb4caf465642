//! Encodes that make their scale of an observed amax, and consume it.

use lowp_format::tensor_scale;

use super::*;
use crate::reference::Reference;
use crate::{AdamMode, AdamScalars, AdamwJob, AmaxJob, Moments};

/// Ways to make a per-tensor scale; two-level scales know the first only.
const WAYS: [(bool, f32); 3] = [(false, 0.0), (true, 0.0), (false, 2.5)];

/// What the reference takes for an amax.
pub(in crate::conformance) fn made(
    kernel: &KernelKey,
    amax: f32,
    (pow2, epsilon): (bool, f32),
) -> f32 {
    match kernel.scale {
        ScaleRule::Tensor => tensor_scale(amax, kernel.element, pow2, epsilon),
        _ => amax,
    }
}

fn needs_tensor(case: &Case) -> bool {
    matches!(case.kernel.scale, ScaleRule::Tensor | ScaleRule::TwoLevel)
}

fn observed<B: Backend>(
    job: EncodeJob<B>,
    slot: &Slot<B>,
    (pow2, epsilon): (bool, f32),
) -> EncodeJob<B> {
    let slot = slot.clone();
    let tensor = Some(TensorInput::Observed {
        slot,
        pow2,
        epsilon,
    });
    EncodeJob { tensor, ..job }
}

/// Any number of encodes of one plan may read an entry; a consumed one can be read again, and the next
/// observation replaces it, however small.
pub(super) fn scales_follow_from_observations<B: Backend>(rig: &Rig<B>) {
    for case in cases().into_iter().filter(needs_tensor) {
        let ways = match case.kernel.scale {
            ScaleRule::Tensor => &WAYS[..],
            _ => &WAYS[..1],
        };
        for (m, shape) in shapes(&case).into_iter().enumerate() {
            let given = values(shape.elements(), m as u64, false);
            let slot = Slot {
                buffer: rig.buffer(&[1.0, 1e30, 1.0]),
                index: 1,
            };
            for &way in ways {
                let mut jobs = Vec::new();
                for half in [true, false] {
                    let (source, widened) = source(rig, &given, half);
                    let job = encode_job(rig, case.kernel, &case.specs, shape, source, 0.0);
                    jobs.push((observed(job, &slot, way), widened));
                }
                for amax in [1e30, 3.7, 0.0, f32::INFINITY] {
                    rig.backend.write(&slot.buffer, 1, &[amax]).unwrap();
                    let work = || Work::Encode(jobs.iter().map(|(job, _)| job.clone()).collect());
                    for _ in 0..2 {
                        rig.run(work());
                        let entry = rig.content::<f32>(&slot.buffer)[1];
                        assert_eq!(entry.to_bits(), (-amax).to_bits(), "{rig:?} {shape}");
                    }
                    for (job, values) in &jobs {
                        let reference = Reference {
                            shape,
                            kernel: case.kernel,
                            values,
                            source_rounding: SourceRounding::F32,
                            tensor: made(&case.kernel, amax, way),
                            random: None,
                        };
                        for target in &job.targets {
                            let expected = reference.encode(&target.spec).unwrap();
                            let found = rig.content::<u8>(&target.bytes);
                            assert!(found == expected, "{rig:?} {shape} {way:?} {amax}");
                        }
                    }
                }
            }
            observe(rig, shape, &given, &slot);
        }
    }
}

/// An amax job replaces a consumed entry by the amax of the values, and raises it from then on.
fn observe<B: Backend>(rig: &Rig<B>, shape: Shape, given: &[f32], slot: &Slot<B>) {
    if given.is_empty() {
        return;
    }
    for (factor, entry) in [(0.5, 0.5), (0.25, 0.5), (1.0, 1.0)] {
        let scaled: Vec<f32> = given.iter().map(|x| x * factor).collect();
        rig.run(Work::Amax(vec![AmaxJob {
            shape,
            start: 0,
            source: Source::F32(rig.buffer(&scaled)),
            source_rounding: SourceRounding::F32,
            out: slot.buffer.clone(),
            tensor: Some(1),
            blocks: Vec::new(),
        }]));
        let amax = crate::reference::amax(given.iter().map(|x| x * entry));
        assert_eq!(rig.content::<f32>(&slot.buffer), [1.0, amax, 1.0]);
    }
}

/// Update, then encode with what it observed: a step in two launches, any number of times.
pub(super) fn a_step_in_two_passes_follows_its_masters<B: Backend>(rig: &Rig<B>) {
    for case in cases().into_iter().filter(needs_tensor) {
        let shape = Shape::new(136, 288usize.next_multiple_of(case.columns()));
        let len = shape.elements();
        let master = rig.buffer(&values(len, 51, false));
        let slot = Slot {
            buffer: rig.buffer(&[0f32; 2]),
            index: 1,
        };
        let [exp_avg, exp_avg_sq] = [0, 0].map(|_| rig.buffer(&vec![0f32; len]));
        let update = AdamwJob {
            master: master.clone(),
            moments: Moments::F32 {
                exp_avg,
                exp_avg_sq,
            },
            grad: source(rig, &values(len, 52, false), true).0,
            group: 0,
            mode: AdamMode::AdamW,
            source_rounding: SourceRounding::ViaBf16,
            amax: Some(slot.clone()),
            encode: None,
        };
        let source = Source::F32(master.clone());
        let encode = encode_job(rig, case.kernel, &case.specs, shape, source, 0.0);
        let source_rounding = SourceRounding::ViaBf16;
        let encode = EncodeJob {
            source_rounding,
            ..observed(encode, &slot, WAYS[0])
        };
        let targets = encode.targets.clone();
        let update = rig.plan(Work::Adamw(vec![update])).unwrap();
        let encode = rig.plan(Work::Encode(vec![encode])).unwrap();
        for step in 1..=3 {
            // The rate shrinks the masters: an amax that is not replaced would be too large.
            let group = AdamScalars {
                lr: 0.3,
                weight_decay: 1.0,
                ..AdamScalars::default()
            };
            let scalars = StepScalars {
                adam: vec![group.at_step(step)],
                ..StepScalars::default()
            };
            rig.backend.run(&update, &scalars).unwrap();
            rig.backend.run(&encode, &scalars).unwrap();
            let reference = Reference {
                shape,
                kernel: case.kernel,
                values: &rig.content::<f32>(&master),
                source_rounding,
                tensor: 0.0,
                random: None,
            };
            let amax = reference.tensor_amax();
            let reference = Reference {
                tensor: made(&case.kernel, amax, WAYS[0]),
                ..reference
            };
            for target in &targets {
                let expected = reference.encode(&target.spec).unwrap();
                assert!(rig.content::<u8>(&target.bytes) == expected, "{step}");
            }
            assert_eq!(rig.content::<f32>(&slot.buffer), [0.0, -amax]);
        }
    }
}

/// A known encode scale is taken as it stands, whatever it is; of a known tensor amax the magnitude
/// counts, so a consumed entry gives what it gave before.
pub(super) fn known_values_are_taken_as_they_stand<B: Backend>(rig: &Rig<B>) {
    let entries = [
        -3.75,
        3.75,
        -0.0,
        0.0,
        -1e30,
        1e-40,
        f32::INFINITY,
        f32::NAN,
    ];
    let entries = entries.into_iter().chain([f32::NEG_INFINITY]);
    for (entry, case) in entries.flat_map(|x| cases().into_iter().map(move |case| (x, case))) {
        if !needs_tensor(&case) {
            continue;
        }
        let shape = Shape::new(33, 64usize.next_multiple_of(case.columns()));
        let (source, values) = source(rig, &values(shape.elements(), 8, true), false);
        let job = encode_job(rig, case.kernel, &case.specs, shape, source, entry);
        rig.run(Work::Encode(vec![job.clone()]));
        let reference = |tensor| Reference {
            shape,
            kernel: case.kernel,
            values: &values,
            source_rounding: SourceRounding::F32,
            tensor,
            random: None,
        };
        for target in &job.targets {
            let found = rig.content::<u8>(&target.bytes);
            let expected = reference(entry).encode(&target.spec).unwrap();
            let nan = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap()).is_nan();
            let scale = target.spec.key.part.is_per_tensor();
            let same = found == expected || scale && nan(&found) && nan(&expected);
            assert!(same, "{entry} {:?} {:?}", target.spec, case.kernel);
            if case.kernel.scale == ScaleRule::TwoLevel && !entry.is_nan() {
                let magnitude = reference(entry.abs()).encode(&target.spec).unwrap();
                assert_eq!(found, magnitude, "{entry}");
            }
        }
        let slot = job.tensor.as_ref().unwrap().slot();
        let left = rig.content::<f32>(&slot.buffer)[slot.index];
        assert_eq!(
            left.to_bits(),
            entry.to_bits(),
            "a known entry is not consumed"
        );
    }
}

pub(super) fn observations_must_fit<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(4, 64);
    let job = |element, scale, blocks, way| {
        let case = case(element, scale, blocks, Some(ROW_MAJOR));
        let source = Source::F32(rig.buffer(&[1f32; 256]));
        let job = encode_job(rig, case.kernel, &case.specs, shape, source, 0.0);
        let slot = Slot {
            buffer: rig.buffer(&[2f32]),
            index: 0,
        };
        observed(job, &slot, way)
    };
    let lines = |n| Some([[1, n], [n, 1]]);
    let none = ScaleRule::E8M0(MxScale::Te);
    for (rejected, words) in [
        (job(Code::E4M3, none, lines(32), WAYS[0]), "E8M0"),
        (
            job(Code::E2M1, ScaleRule::TwoLevel, lines(16), WAYS[1]),
            "pow2",
        ),
        (
            job(Code::E2M1, ScaleRule::TwoLevel, lines(16), WAYS[2]),
            "epsilon",
        ),
    ] {
        let error = rig.plan(Work::Encode(vec![rejected])).unwrap_err();
        assert!(matches!(
            error,
            KernelError::ObservedAmax { .. } | KernelError::TensorOptions { .. }
        ));
        assert!(error.to_string().contains(words), "{error}");
    }
    let encode = job(Code::E4M3, ScaleRule::Tensor, None, WAYS[0]);
    let Source::F32(master) = encode.source.clone() else {
        unreachable!()
    };
    let [exp_avg, exp_avg_sq] = [0, 0].map(|_| rig.buffer(&[0f32; 256]));
    let fused = AdamwJob {
        master,
        moments: Moments::F32 {
            exp_avg,
            exp_avg_sq,
        },
        grad: Source::F32(rig.buffer(&[0f32; 256])),
        group: 0,
        mode: AdamMode::AdamW,
        source_rounding: SourceRounding::F32,
        amax: None,
        encode: Some(Box::new(encode)),
    };
    let error = rig.plan(Work::Adamw(vec![fused])).unwrap_err();
    assert!(error.to_string().contains("a plan of its own"), "{error}");
}
