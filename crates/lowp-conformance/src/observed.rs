//! Encodes that make their scales of observed amaxes, and consume them.

use lowp_format::{Extent, Orientation};

use super::*;
use lowp_kernels::{AmaxJob, GroupScalars, KernelError, Rule, UpdateJob};

/// Ways to make a scale of an amax; two-level scales know one.
const WAYS: [(bool, f32); 3] = [(false, 0.0), (true, 0.0), (false, 2.5)];

/// The cases whose scales are made of observed amaxes, and of those that have the choice, each in every way.
fn waiting() -> Vec<Case> {
    let mut found = Vec::new();
    for case in cases().into_iter().filter(Case::waits) {
        let current = |key: KernelKey| matches!(key.scale, ScaleRule::Current { .. });
        let ways = match case.kernels().into_iter().any(current) && !case.brief {
            true => &WAYS[..],
            false => &WAYS[..1],
        };
        for &(way, least) in ways {
            found.push(case.with(|key| {
                if let ScaleRule::Current { pow2, epsilon, .. } = &mut key.scale
                    && ways.len() > 1
                {
                    (*pow2, *epsilon) = (way, least);
                }
            }));
        }
    }
    found
}

/// Entries of the vector of `tensor` that `orientation` reads.
fn entries<B: Backend>(
    rig: &Rig<B>,
    tensor: &[Option<TensorInput<B>>; 2],
    outer: &Outer,
    orientation: Orientation,
) -> Vec<f32> {
    let Some(TensorInput::Observed(slot)) = &tensor[orientation as usize] else {
        return Vec::new();
    };
    let all = rig.content::<f32>(&slot.buffer);
    all[slot.index..][..outer[orientation as usize].len()].to_vec()
}

/// Any number of encodes of one plan may read entries; consumed ones can be read again, and the next
/// observation replaces them, however small.
pub fn scales_follow_from_observations<B: Backend>(rig: &Rig<B>) {
    for case in waiting() {
        for (m, shape) in shapes(&case).into_iter().enumerate() {
            let given = values(shape.elements(), m as u64, false);
            for amax in [1e30, 3.7, 0.0, f32::INFINITY] {
                let amaxes = case.outer(shape, amax);
                let tensor = inputs(rig, &case, &amaxes, observed);
                let mut jobs = Vec::new();
                for half in [true, false] {
                    let (source, widened) = source(rig, &given, half);
                    let specs = case.specs();
                    let job = encode_job(rig, &case, &specs, shape, source, &amaxes);
                    let tensor = tensor.clone();
                    jobs.push((EncodeJob { tensor, ..job }, widened));
                }
                let work = || Work::Encode(jobs.iter().map(|(job, _)| job.clone()).collect());
                for _ in 0..2 {
                    rig.run(work());
                    for orientation in Orientation::ALL {
                        let found = entries(rig, &tensor, &amaxes, orientation);
                        let consumed = found.iter().zip(&amaxes[orientation as usize]);
                        for (found, amax) in consumed {
                            assert_eq!(found.to_bits(), (-amax).to_bits(), "{rig:?} {shape}");
                        }
                    }
                }
                // What lies before them is not theirs.
                if let Some(input) = tensor.iter().flatten().next() {
                    assert_eq!(rig.content::<f32>(&input.slot().buffer)[0], 0.5);
                }
                for (job, values) in &jobs {
                    let oracle = Oracle::new(&case, shape, values, amaxes.clone()).under(&amaxes);
                    oracle.assert(rig, &job.targets, &amax);
                }
                observe(rig, &case, &jobs[1].0, &amaxes);
            }
        }
    }
}

/// The amax jobs of an encode replace consumed entries by the amaxes of the values, and raise them from then on. Values
/// of which there are none leave what is there.
fn observe<B: Backend>(rig: &Rig<B>, case: &Case, job: &EncodeJob<B>, before: &Outer) {
    let Source::F32(source) = &job.source else {
        unreachable!()
    };
    let values = rig.content::<f32>(source);
    for (factor, entry) in [(0.5, 0.5), (0.25, 0.5), (1.0, 1.0)] {
        let scaled: Vec<f32> = values.iter().map(|x| x * factor).collect();
        let source = Source::F32(rig.buffer(&scaled));
        let observed = EncodeJob {
            source,
            ..job.clone()
        };
        rig.run(Work::Amax(AmaxJob::before(&rig.backend, &observed)));
        let values: Vec<f32> = values.iter().map(|x| x * entry).collect();
        let expected = Oracle::new(case, job.shape, &values, Outer::default()).amaxes();
        for orientation in Orientation::ALL {
            let found = entries(rig, &job.tensor, before, orientation);
            if !values.is_empty() && !found.is_empty() {
                assert_eq!(found, expected[orientation as usize], "{rig:?} {factor}");
            }
        }
    }
}

/// Entries that orientations share are observed once, those of a transform apart from the others.
pub fn observations_are_made_once<B: Backend>(rig: &Rig<B>) {
    for case in cases() {
        let shape = Shape::new(32, case.columns());
        let outer = case.outer(shape, 1.0);
        let source = Source::F32(rig.buffer(&vec![1f32; shape.elements()]));
        let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
        let none = AmaxJob::before(&rig.backend, &job).len();
        assert_eq!(none, 0, "known entries are not observed");
        let tensor = inputs(rig, &case, &outer, observed);
        let jobs = AmaxJob::before(&rig.backend, &EncodeJob { tensor, ..job });
        let kernels = case.kernels();
        let waiting = kernels.iter().filter(|key| key.scale.waits_for_amax());
        let expected = if case.shares() { 1 } else { 2 }.min(waiting.count());
        assert_eq!(jobs.len(), expected, "{kernels:?}");
        let transformed = jobs.iter().filter(|job| job.hadamard).count();
        let keys = kernels
            .iter()
            .filter(|key| key.hadamard && key.scale.waits_for_amax());
        assert_eq!(transformed, keys.count());
    }
}

/// Update, then encode with what it observed: a step in two launches, any number of times. Amaxes of lines are raised by
/// the update, too.
pub fn a_step_in_two_passes_follows_its_masters<B: Backend>(rig: &Rig<B>) {
    let weights = |case: &Case| !case.kernels().iter().any(|key| key.hadamard);
    for case in cases().into_iter().filter(Case::waits).filter(weights) {
        let shape = Shape::new(136, 288usize.next_multiple_of(case.columns()));
        let len = shape.elements();
        let master = rig.buffer(&values(len, 51, false));
        let zeros = case.outer(shape, 0.0);
        let source = Source::F32(master.clone());
        let encode = encode_job(rig, &case, &case.specs(), shape, source, &zeros);
        let source_rounding = SourceRounding::ViaBf16;
        let encode = EncodeJob {
            source_rounding,
            tensor: inputs(rig, &case, &zeros, observed),
            ..encode
        };
        let (targets, tensor) = (encode.targets.clone(), encode.tensor.clone());
        let grad = self::source(rig, &values(len, 52, false), true).0;
        let update = UpdateJob::new(&rig.backend, Rule::AdamW, master.clone(), grad).unwrap();
        let (update, encode) = update.with_encode(encode);
        assert!(update.encode.is_none() && update.rule == Rule::AdamW);
        let update = rig.plan(Work::Update(vec![update])).unwrap();
        let encode = rig.plan(Work::Encode(vec![encode.unwrap()])).unwrap();
        for step in 1..=3 {
            // The rate shrinks the masters: an amax that is not replaced would be too large.
            let group = GroupScalars {
                lr: 0.3,
                weight_decay: 1.0,
                ..GroupScalars::default()
            };
            let scalars = StepScalars {
                groups: vec![group.at_step(step)],
                ..StepScalars::default()
            };
            rig.backend.run(&update, &scalars).unwrap();
            rig.backend.run(&encode, &scalars).unwrap();
            let values = rig.content::<f32>(&master);
            let oracle = Oracle {
                source_rounding,
                ..Oracle::new(&case, shape, &values, Outer::default())
            };
            let amaxes = oracle.amaxes();
            oracle.under(&amaxes).assert(rig, &targets, &step);
            for orientation in Orientation::ALL {
                let found = entries(rig, &tensor, &amaxes, orientation);
                let consumed = found.iter().zip(&amaxes[orientation as usize]);
                assert!(consumed.into_iter().all(|(found, amax)| *found == -amax));
            }
        }
    }
}

/// Known encode scales are taken as they stand, whatever they are; of known amaxes the magnitude
/// counts, so a consumed entry gives what it gave before.
pub fn known_values_are_taken_as_they_stand<B: Backend>(rig: &Rig<B>) {
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
    let outer = |case: &Case| case.kernels().iter().any(|key| key.scale.outer().is_some());
    let cases: Vec<Case> = cases().into_iter().filter(outer).collect();
    for (entry, case) in entries.flat_map(|x| cases.iter().map(move |case| (x, case))) {
        let shape = Shape::new(33, 64usize.next_multiple_of(case.columns()));
        let (source, values) = source(rig, &values(shape.elements(), 8, true), false);
        let outer = case.outer(shape, entry);
        let job = encode_job(rig, case, &case.specs(), shape, source, &outer);
        rig.run(Work::Encode(vec![job.clone()]));
        Oracle::new(case, shape, &values, outer.clone()).assert(rig, &job.targets, &entry);
        // Of one rule for both orientations, which is enough: the magnitude of an amax counts.
        let two_level = |key: KernelKey| matches!(key.scale, ScaleRule::TwoLevel { .. });
        if case.kernels().into_iter().all(two_level) {
            let magnitudes = case.outer(shape, entry.abs());
            Oracle::new(case, shape, &values, magnitudes).assert(rig, &job.targets, &entry);
        }
        for (input, before) in job.tensor.iter().zip(&outer) {
            let Some(input) = input else { continue };
            let Slot { buffer, index } = input.slot();
            let left = &rig.content::<f32>(buffer)[*index..][..before.len()];
            assert_eq!(bits(left), bits(before), "known entries are not consumed");
        }
    }
}

/// Matrices without rows or without columns: lines that are there have scales, of whatever is known.
pub fn lines_of_nothing_have_scales<B: Backend>(rig: &Rig<B>) {
    let of_lines = |case: &Case| {
        let lines = |key: &KernelKey| key.scale.outer().is_some_and(|(e, _)| e == Extent::Line);
        case.kernels().iter().any(lines)
    };
    for case in cases().into_iter().filter(of_lines) {
        for shape in [Shape::new(0, 3 * case.columns()), Shape::new(7, 0)] {
            let amaxes = case.outer(shape, 5.0);
            let source = Source::F32(rig.buffer::<f32>(&[]));
            let job = encode_job(rig, &case, &case.specs(), shape, source, &amaxes);
            let tensor = inputs(rig, &case, &amaxes, observed);
            let job = EncodeJob { tensor, ..job };
            rig.run(Work::Encode(vec![job.clone()]));
            let oracle = Oracle::new(&case, shape, &[], amaxes.clone()).under(&amaxes);
            oracle.assert(rig, &job.targets, &"empty");
            let written = job.targets.iter().filter(|t| t.spec.key.part.is_outer());
            let written = written
                .map(|t| rig.backend.len::<u8>(&t.bytes))
                .sum::<usize>();
            let apart = if case.shares() { 1 } else { 2 };
            let known: usize = amaxes.iter().take(apart).map(Vec::len).sum();
            assert_eq!(written, 4 * known);
            for orientation in Orientation::ALL {
                let found = entries(rig, &job.tensor, &amaxes, orientation);
                assert!(found.iter().all(|x| x.is_sign_negative()));
            }
        }
    }
}

pub fn observations_must_fit<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(4, 64);
    let blocks = Some([[1, 32], [32, 1]]);
    let job = |element, scale, blocks| {
        let case = case(element, scale, blocks, Some(ROW_MAJOR));
        let source = Source::F32(rig.buffer(&[1f32; 256]));
        let outer = case.outer(shape, 0.0);
        encode_job(rig, &case, &case.specs(), shape, source, &outer)
    };
    let delayed = ScaleRule::Delayed {
        window: 3,
        algorithm: lowp_format::AmaxAlgorithm::Max,
        margin: 0,
    };
    // An observation for scales that are made of none, of whichever orientation.
    let none = ScaleRule::E8M0(MxScale::Te);
    for (scale, blocks) in [(none, blocks), (delayed, None)] {
        for side in 0..2 {
            let mut rejected = job(Code::E4M3, scale, blocks);
            rejected.tensor[side] = Some(TensorInput::Observed(Slot {
                buffer: rig.buffer(&[2f32]),
                index: 0,
            }));
            let error = rig.plan(Work::Encode(vec![rejected])).unwrap_err();
            assert_eq!(error, KernelError::ObservedAmax { scale });
            assert!(error.to_string().contains("observed"), "{error}");
        }
    }
    for (scale, side) in [(CURRENT, 0), (CURRENT, 1), (LINES, 0), (LINES, 1)] {
        let mut encode = job(Code::E4M3, scale, None);
        let Some(TensorInput::Known(slot)) = encode.tensor[side].clone() else {
            unreachable!()
        };
        encode.tensor[side] = Some(TensorInput::Observed(slot));
        let Source::F32(master) = encode.source.clone() else {
            unreachable!()
        };
        let grad = Source::F32(rig.buffer(&[0f32; 256]));
        let mut fused = UpdateJob::new(&rig.backend, Rule::AdamW, master, grad).unwrap();
        fused.encode = Some(Box::new(encode));
        let error = rig.plan(Work::Update(vec![fused])).unwrap_err();
        assert_eq!(error, KernelError::FusedObserved);
        assert!(error.to_string().contains("a separate plan"), "{error}");
    }
}
