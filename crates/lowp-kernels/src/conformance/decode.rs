//! Decoding against the reference, and exhaustive round trips of codes.

use super::*;
use crate::DecodeJob;
use crate::reference;

fn decode_job<B: Backend>(rig: &Rig<B>, job: &EncodeJob<B>, usage: Usage) -> Option<DecodeJob<B>> {
    let part = |part| {
        job.targets
            .iter()
            .find(|t| t.spec.key == key(usage, part))
            .cloned()
    };
    let tensor = job.targets.iter().find(|t| t.spec.key.part.is_per_tensor());
    Some(DecodeJob {
        shape: job.shape,
        kernel: job.kernel,
        data: part(Part::Data)?,
        block_scale: part(Part::BlockScale),
        tensor_scale: tensor.map(|t| t.bytes.clone()),
        out: rig.buffer(&vec![f32::NAN; job.shape.elements()]),
    })
}

pub(super) fn every_ingredient_equals_the_reference<B: Backend>(rig: &Rig<B>) {
    for (n, case) in cases().into_iter().enumerate() {
        for shape in shapes(&case) {
            let given = values(shape.elements(), n as u64, true);
            let source = Source::F32(rig.buffer(&given));
            let job = encode_job(rig, case.kernel, &case.specs, shape, source, 3.0);
            rig.run(Work::Encode(vec![job.clone()]));
            for usage in [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH] {
                let Some(decode) = decode_job(rig, &job, usage) else {
                    continue;
                };
                rig.run(Work::Decode(vec![decode.clone()]));
                let data = rig.content::<u8>(&decode.data.bytes);
                let scales = decode.block_scale.as_ref();
                let bytes = scales.map(|t| rig.content::<u8>(&t.bytes));
                let scales = scales.zip(bytes.as_ref()).map(|(t, b)| (&t.spec, &b[..]));
                let tensor = match case.kernel.scale {
                    ScaleRule::Tensor => 1.0 / 3.0,
                    _ => 3.0,
                };
                let codes = (&decode.data.spec, &data[..]);
                let expected = reference::decode(shape, &case.kernel, codes, scales, tensor);
                let found = rig.content::<f32>(&decode.out);
                assert_eq!(
                    bits(&found),
                    bits(&expected),
                    "{rig:?} {shape} {usage} {:?}",
                    case.kernel
                );
            }
        }
    }
}

/// Every finite value of a code survives decode and encode with a scale of 1.
pub(super) fn codes_survive_a_round_trip<B: Backend>(rig: &Rig<B>) {
    for element in [Code::E4M3, Code::E5M2] {
        let case = case(element, ScaleRule::Tensor, None, Some(TRANSPOSED));
        let codes: Vec<u8> = (0..=255u8).collect();
        let shape = Shape::new(2, 128);
        let spec = case.specs[0];
        let out = rig.buffer(&[0f32; 256]);
        let data = Target::new(spec, rig.buffer(&codes));
        rig.run(Work::Decode(vec![DecodeJob {
            shape,
            kernel: case.kernel,
            data,
            block_scale: None,
            tensor_scale: Some(rig.buffer(&1f32.to_le_bytes())),
            out: out.clone(),
        }]));
        let job = encode_job(
            rig,
            case.kernel,
            &[spec],
            shape,
            Source::F32(out.clone()),
            1.0,
        );
        let targets = job.targets.clone();
        rig.run(Work::Encode(vec![job]));
        let found = rig.content::<u8>(&targets[0].bytes);
        let values = rig.content::<f32>(&out);
        for (code, (found, value)) in codes.iter().zip(found.iter().zip(&values)) {
            if value.is_finite() {
                assert_eq!(code, found, "{element} {code:02X}");
            }
        }
    }
}

/// bf16 values are stored exactly, and all 65536 are read back.
pub(super) fn bf16_survives_a_round_trip<B: Backend>(rig: &Rig<B>) {
    let case = case(Code::Bf16, ScaleRule::None, None, None);
    let shape = Shape::new(256, 256);
    let values: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let source = Source::Bf16(rig.buffer(&values));
    let job = encode_job(rig, case.kernel, &case.specs, shape, source, 1.0);
    rig.run(Work::Encode(vec![job.clone()]));
    let decode = decode_job(rig, &job, Usage::BOTH).unwrap();
    rig.run(Work::Decode(vec![decode.clone()]));
    let expected: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
    assert_eq!(bits(&rig.content::<f32>(&decode.out)), bits(&expected));
}
