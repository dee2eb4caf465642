//! Roundings: values are those that a decode of an encode gives, and codes beside them those of the encode.

use lowp_format::Orientation;
use lowp_kernels::testing::rounded_axis;
use lowp_kernels::{RoundJob, rounds};

use super::decode::{decode_job, rounded};
use super::*;

/// What becomes of an orientation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Made {
    Values,
    Codes,
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
        (96, 1280, false),
        (64, 288, true),
        (32, 2144, true),
    ] {
        let shape = Shape::new(rows, cols);
        let given = values(shape.elements(), rows as u64, special).into_iter();
        all.push((shape, given.map(bf16::from_f32).collect()));
    }
    all
}

pub fn values_are_those_of_codes<B: Backend>(rig: &Rig<B>) {
    use Made::{Codes, Nothing, Values};
    for case in cases() {
        for (shape, values) in matrices() {
            if !rounds(&case.kernels(), shape) {
                continue;
            }
            let source = Source::Bf16(rig.buffer(&values));
            let outer = case.outer(shape, 3.75);
            let encode = encode_job(rig, &case, &case.specs(), shape, source, &outer);
            rig.run(Work::Encode(vec![encode.clone()]));
            for made in [
                [Values, Values],
                [Values, Codes],
                [Codes, Values],
                [Values, Nothing],
                [Nothing, Values],
            ] {
                if made.contains(&Codes) && !in_order(&case) {
                    continue;
                }
                equal_those_of(rig, &case, &encode, made);
            }
        }
    }
}

/// Whether codes and scales lie as a rounding fills them.
fn in_order(case: &Case) -> bool {
    let specs = case.specs();
    let mut blocks = specs.iter().filter(|spec| !spec.key.part.is_outer());
    blocks.all(|spec| {
        let mut served = spec.key.usage.orientations();
        served.all(|o| spec.axes[0] == rounded_axis(&case.kernels()[o as usize], o))
    })
}

fn equal_those_of<B: Backend>(rig: &Rig<B>, case: &Case, encode: &EncodeJob<B>, made: [Made; 2]) {
    let of = |what| {
        let here = |o: &Orientation| made[*o as usize] == what;
        let here = Orientation::ALL.into_iter().filter(here);
        here.fold(Usage::empty(), |all, o| all | o.usage())
    };
    let specs = match of(Made::Codes) {
        usage if usage.is_empty() => Vec::new(),
        usage => case.of_usage(usage),
    };
    let garbage =
        |spec: &BufferSpec| Target::new(*spec, rig.buffer(&vec![0xA5u8; spec.bytes(encode.shape)]));
    let elements = encode.shape.elements();
    let room = |made| match made {
        Made::Values => Some(rig.buffer(&vec![bf16::NAN; elements])),
        Made::Codes | Made::Nothing => None,
    };
    let job = RoundJob {
        encode: EncodeJob {
            targets: specs.iter().map(garbage).collect(),
            ..encode.clone()
        },
        values: made.map(room),
    };
    rig.run(Work::Round(vec![job.clone()]));
    let what = || format!("{rig:?} {:?} {made:?} {}", case.kernels(), encode.shape);
    for (orientation, found) in Orientation::ALL.into_iter().zip(&job.values) {
        let Some(found) = found else { continue };
        let decode = decode_job(rig, encode, orientation, FloatDtype::Bf16);
        let expected = rounded(rig, &decode.expect("codes"));
        let found = rig.widened(&Source::Bf16(found.clone()));
        assert!(bits(&found) == bits(&expected), "{}", what());
    }
    for (key, bytes) in contents(rig, &job.encode.targets) {
        let expected = contents(rig, &encode.targets);
        let (_, expected) = expected
            .iter()
            .find(|(other, _)| *other == key)
            .expect("codes");
        assert!(bytes == *expected, "{} {key}", what());
    }
}

pub fn what_is_not_rounded_is_said<B: Backend>(rig: &Rig<B>) {
    let shape = Shape::new(32, 64);
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
        let odd = Shape::new(33, 64);
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
