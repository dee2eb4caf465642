//! Roundings: values are those that a decode of an encode gives, and codes beside them those of the encode.

use lowp_format::{Orientation, Part};
use lowp_kernels::testing::{is_stochastic, rounded_axis};
use lowp_kernels::{AmaxJob, RoundJob, StochasticKey, rounds};

use super::decode::{decode_job, rounded};
use super::*;

/// What becomes of an orientation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Made {
    Values,
    Codes,
    /// Without the codes that they are of.
    Scales,
    Nothing,
}

/// Every bfloat16 once: in order, and far from its neighbours.
fn all_values() -> [Vec<bf16>; 2] {
    [1, 40_503].map(|step: u16| {
        let bits = (0..=u16::MAX).map(|i| i.wrapping_mul(step));
        bits.map(bf16::from_bits).collect()
    })
}

/// Matrices with and without NaNs and infinities, of whole tiles and of others.
fn matrices() -> Vec<(Shape, Vec<bf16>)> {
    let mut all: Vec<_> = all_values()
        .map(|values| (Shape::new(256, 256), values))
        .into();
    for (rows, cols, special) in [
        (0, 64, false),
        (32, 0, false),
        (32, 32, true),
        (64, 288, true),
        (32, 2144, false),
        (128, 320, false),
        (128, 320, false),
        (256, 512, false),
        (256, 512, false),
        (128, 64, true),
    ] {
        let shape = Shape::new(rows, cols);
        let given = values(shape.elements(), rows as u64, special).into_iter();
        all.push((shape, given.map(bf16::from_f32).collect()));
    }
    all
}

/// An encode, and what it makes of its source.
struct Encoded<B: Backend> {
    job: EncodeJob<B>,
    scalars: StepScalars,
    /// What the reference decodes, by orientation.
    values: [Vec<f32>; 2],
    codes: Vec<(BufferKey, Vec<u8>)>,
}

impl<B: Backend> Encoded<B> {
    fn new(rig: &Rig<B>, job: EncodeJob<B>) -> Self {
        let scalars = StepScalars {
            random_step: 5,
            ..StepScalars::default()
        };
        rig.run_with(Work::Encode(vec![job.clone()]), &scalars);
        let values = Orientation::ALL.map(|orientation| {
            let decode = decode_job(rig, &job, orientation, FloatDtype::Bf16);
            rounded(rig, &decode.expect("codes"))
        });
        let codes = contents(rig, &job.targets);
        Self {
            job,
            scalars,
            values,
            codes,
        }
    }

    /// Rounds its source and compares.
    fn assert(&self, rig: &Rig<B>, case: &Case, made: [Made; 2]) {
        let of = |what: Made| {
            let those = Orientation::ALL
                .into_iter()
                .filter(|o| made[*o as usize] == what);
            let usage = those.fold(Usage::empty(), |all, o| all | o.usage());
            match usage.is_empty() {
                true => Vec::new(),
                false => case.of_usage(usage),
            }
        };
        let mut specs = of(Made::Codes);
        let scales = of(Made::Scales).into_iter();
        specs.extend(scales.filter(|spec| spec.key.part == Part::BlockScale));
        let shape = self.job.shape;
        let garbage =
            |spec: &BufferSpec| Target::new(*spec, rig.buffer(&vec![0xA5u8; spec.bytes(shape)]));
        let values = made.map(|made| {
            let room = || rig.buffer(&vec![bf16::NAN; shape.elements()]);
            (made == Made::Values).then(room)
        });
        let encode = EncodeJob {
            targets: specs.iter().map(garbage).collect(),
            ..self.job.clone()
        };
        let targets = encode.targets.clone();
        let job = RoundJob {
            encode,
            values: values.clone(),
        };
        rig.run_with(Work::Round(vec![job]), &self.scalars);
        let what = || format!("{rig:?} {:?} {made:?} {shape}", case.kernels());
        for (expected, found) in self.values.iter().zip(&values) {
            let Some(found) = found else { continue };
            let found = rig.widened(&Source::Bf16(found.clone()));
            assert!(bits(&found) == bits(expected), "{}", what());
        }
        for (key, bytes) in contents(rig, &targets) {
            let mut codes = self.codes.iter();
            let expected = codes
                .find(|(other, _)| *other == key)
                .map(|(_, bytes)| bytes);
            assert!(Some(&bytes) == expected, "{} {key}", what());
        }
    }
}

/// Whether codes and scales lie as a rounding fills them.
pub(super) fn in_order(case: &Case) -> bool {
    let specs = case.specs();
    let mut blocks = specs.iter().filter(|spec| !spec.key.part.is_outer());
    blocks.all(|spec| {
        let mut served = spec.key.usage.orientations();
        served.all(|o| spec.axes[0] == rounded_axis(&case.kernels()[o as usize], o))
    })
}

pub fn values_are_those_of_codes<B: Backend>(rig: &Rig<B>) {
    use Made::{Codes, Nothing, Scales, Values};
    let whole = Shape::new(128, 64);
    let known = |case: &Case| rounds(&case.kernels(), whole);
    for case in rig.some_of(cases().into_iter().filter(known), 4) {
        for (n, (shape, values)) in matrices().into_iter().enumerate() {
            if !rounds(&case.kernels(), shape) {
                continue;
            }
            let source = Source::Bf16(rig.buffer(&values));
            let outer = case.outer(shape, 3.75);
            let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
            // Of elements that begin a block of the generator, and of others.
            let random = case.kernels().iter().all(is_stochastic) && n % 2 == 1;
            let stochastic = random.then_some(StochasticKey {
                seed: 9,
                stream: 3,
                first: [1 << 40, 24][n / 2 % 2],
            });
            let encoded = Encoded::new(rig, EncodeJob { stochastic, ..job });
            for made in [
                [Values, Values],
                [Values, Codes],
                [Codes, Values],
                [Values, Nothing],
                [Nothing, Values],
                [Codes, Scales],
                [Scales, Codes],
            ] {
                let rounds_all = !made.contains(&Codes) && !made.contains(&Scales);
                if rounds_all || in_order(&case) {
                    encoded.assert(rig, &case, made);
                }
            }
        }
    }
}

/// Amaxes that are observed are consumed, as by an encode.
pub fn observed_amaxes_are_consumed<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(128, 128);
    let waiting = |case: &Case| case.waits() && rounds(&case.kernels(), shape);
    for case in cases().into_iter().filter(waiting) {
        let given: Vec<bf16> = values(shape.elements(), 4, false)
            .into_iter()
            .map(bf16::from_f32)
            .collect();
        let source = Source::Bf16(rig.buffer(&given));
        let outer = case.outer(shape, 0.0);
        let mut job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
        job.tensor = inputs(rig, &case, &outer, observed);
        let amaxes = Work::Amax(AmaxJob::before(&rig.backend, &job));
        rig.run(amaxes.clone());
        let encoded = Encoded::new(rig, job);
        let slots = || {
            let slots = encoded.job.tensor.iter().flatten().map(TensorInput::slot);
            slots.map(|slot| rig.content::<f32>(&slot.buffer)[slot.index])
        };
        let expected: Vec<f32> = slots().collect();
        assert!(expected.iter().all(|amax| *amax < 0.0), "{expected:?}");
        rig.run(amaxes);
        encoded.assert(rig, &case, [Made::Values; 2]);
        assert_eq!(slots().collect::<Vec<_>>(), expected);
    }
}

pub fn what_is_not_rounded_is_said<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(128, 64);
    for case in cases() {
        let plan = |source, shape: Shape, specs: &[BufferSpec], orientation| {
            let outer = case.outer(shape, 1.0);
            let encode = encode_job(rig, &case, specs, shape, source, &outer);
            let mut values = [None, None];
            values[orientation as usize] = Some(rig.buffer(&vec![bf16::ZERO; shape.elements()]));
            let job = RoundJob { encode, values };
            rig.plan(Work::Round(vec![job])).map(|_| ())
        };
        let halves = |shape: Shape| Source::Bf16(rig.buffer(&vec![bf16::ONE; shape.elements()]));
        let floats = Source::F32(rig.buffer(&vec![1f32; shape.elements()]));
        let found = plan(halves(shape), shape, &[], Orientation::Rowwise);
        let known = rounds(&case.kernels(), shape);
        assert_eq!(found.is_ok(), known, "{:?}: {found:?}", case.kernels());
        if !known {
            continue;
        }
        let other = plan(floats, shape, &[], Orientation::Rowwise).unwrap_err();
        assert!(matches!(other, KernelError::NotRounded { .. }), "{other}");
        let odd = Shape::new(129, 64);
        let other = plan(halves(odd), odd, &[], Orientation::Rowwise).unwrap_err();
        assert!(matches!(other, KernelError::NotRounded { .. }), "{other}");
        // Codes of what has values, codes twice, and transposed codes.
        let rows = case.of_usage(Usage::ROWWISE);
        let other = plan(halves(shape), shape, &rows, Orientation::Rowwise).unwrap_err();
        assert!(matches!(other, KernelError::RoundTarget { .. }), "{other}");
        let twice = [rows[0], rows[0]];
        let other = plan(halves(shape), shape, &twice, Orientation::Columnwise).unwrap_err();
        assert!(matches!(other, KernelError::RoundTarget { .. }), "{other}");
    }
}
