//! Decoding against the reference, and exhaustive round trips of codes.

use lowp_format::Orientation;

use super::*;
use crate::DecodeJob;
use crate::reference;

/// A decode of what `job` encodes; `None` where it has no data for `orientation`.
pub(super) fn decode_job<B: Backend>(
    rig: &Rig<B>,
    job: &EncodeJob<B>,
    orientation: Orientation,
) -> Option<DecodeJob<B>> {
    let part = |part| job.target(orientation, part).cloned();
    let kernel = job.kernels[orientation as usize];
    Some(DecodeJob {
        shape: job.shape,
        kernel,
        data: part(Part::Data)?,
        block_scale: part(Part::BlockScale),
        tensor_scale: kernel
            .scale
            .outer()
            .and_then(|o| part(o.1))
            .map(|t| t.bytes),
        out: rig.buffer(&vec![f32::NAN; job.shape.elements()]),
    })
}

/// What the reference decodes from the buffers of `job`.
pub(super) fn expected<B: Backend>(rig: &Rig<B>, job: &DecodeJob<B>) -> Vec<f32> {
    let content = |target: &Target<B>| rig.content::<u8>(&target.bytes);
    let scales = job.block_scale.as_ref().map(|t| (&t.spec, content(t)));
    let tensor = job.tensor_scale.as_ref().map_or(Vec::new(), |bytes| {
        let bytes = rig.content::<u8>(bytes);
        bytes
            .as_chunks()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect()
    });
    // Of one copy, that of either orientation.
    let orientation = match job.data.spec.key.usage {
        Usage::COLUMNWISE => Orientation::Columnwise,
        _ => Orientation::Rowwise,
    };
    reference::decode(
        job.shape,
        (orientation, &job.kernel),
        (&job.data.spec, &content(&job.data)),
        scales.as_ref().map(|(spec, bytes)| (*spec, &bytes[..])),
        &tensor,
    )
}

pub(super) fn every_ingredient_equals_the_reference<B: Backend>(rig: &Rig<B>) {
    for (n, case) in cases().into_iter().enumerate() {
        for shape in shapes(&case) {
            let given = values(shape.elements(), n as u64, true);
            let source = Source::F32(rig.buffer(&given));
            let outer = case.outer(shape, 3.0);
            let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
            rig.run(Work::Encode(vec![job.clone()]));
            for orientation in Orientation::ALL {
                let decode = decode_job(rig, &job, orientation).unwrap();
                rig.run(Work::Decode(vec![decode.clone()]));
                let found = rig.content::<f32>(&decode.out);
                let what = (shape, orientation, decode.kernel);
                assert_eq!(
                    bits(&found),
                    bits(&expected(rig, &decode)),
                    "{rig:?} {what:?}"
                );
            }
        }
    }
}

/// Every finite value of a code survives decode and encode with a scale of 1.
pub(super) fn codes_survive_a_round_trip<B: Backend>(rig: &Rig<B>) {
    for (element, scale) in [Code::E4M3, Code::E5M2]
        .into_iter()
        .flat_map(|e| [(e, CURRENT), (e, LINES)])
    {
        let case = case(element, scale, None, Some(TRANSPOSED));
        let codes: Vec<u8> = (0..=255u8).collect();
        let shape = Shape::new(2, 128);
        let spec = case.specs()[0];
        let out = rig.buffer(&[0f32; 256]);
        let data = Target::new(spec, rig.buffer(&codes));
        let ones: Vec<u8> = if scale == LINES {
            [1f32; 2].to_vec()
        } else {
            vec![1.0]
        }
        .into_iter()
        .flat_map(f32::to_le_bytes)
        .collect();
        rig.run(Work::Decode(vec![DecodeJob {
            shape,
            kernel: case.kernels()[0],
            data,
            block_scale: None,
            tensor_scale: Some(rig.buffer(&ones)),
            out: out.clone(),
        }]));
        let outer = [vec![1.0; 2], vec![1.0; 128]];
        let source = Source::F32(out.clone());
        let job = encode_job(rig, &case, &[spec], shape, source, &outer);
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
    let job = encode_job(
        rig,
        &case,
        &case.specs(),
        shape,
        source,
        &Default::default(),
    );
    rig.run(Work::Encode(vec![job.clone()]));
    let decode = decode_job(rig, &job, Orientation::Columnwise).unwrap();
    rig.run(Work::Decode(vec![decode.clone()]));
    let expected: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
    assert_eq!(bits(&rig.content::<f32>(&decode.out)), bits(&expected));
}
