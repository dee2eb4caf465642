//! Decoding against the reference, and exhaustive round trips of codes.

use lowp_format::{Buffer, Orientation};

use super::*;
use lowp_kernels::DecodeJob;
use lowp_kernels::reference;

/// A decode of what `job` encodes; `None` where it has no data for `orientation`.
pub(super) fn decode_job<B: Backend>(
    rig: &Rig<B>,
    job: &EncodeJob<B>,
    orientation: Orientation,
    dtype: FloatDtype,
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
        out: unwritten(rig, dtype, job.shape.elements()),
    })
}

/// Where values go that nothing has written yet.
fn unwritten<B: Backend>(rig: &Rig<B>, dtype: FloatDtype, len: usize) -> Source<B> {
    match dtype {
        FloatDtype::F32 => Source::F32(rig.buffer(&vec![f32::NAN; len])),
        FloatDtype::Bf16 => Source::Bf16(rig.buffer(&vec![bf16::NAN; len])),
    }
}

/// What was written, as f32.
pub(super) fn content<B: Backend>(rig: &Rig<B>, out: &Source<B>) -> Vec<f32> {
    match out {
        Source::F32(buffer) => rig.content::<f32>(buffer),
        Source::Bf16(buffer) => {
            let halves = rig.content::<bf16>(buffer);
            halves.iter().map(|x| x.to_f32()).collect()
        }
    }
}

/// What the reference decodes from the buffers of `job`, as its dtype holds it.
pub(super) fn rounded<B: Backend>(rig: &Rig<B>, job: &DecodeJob<B>) -> Vec<f32> {
    let values = expected(rig, job);
    match job.out {
        Source::F32(_) => values,
        Source::Bf16(_) => values
            .into_iter()
            .map(|x| bf16::from_f32(x).to_f32())
            .collect(),
    }
}

/// What the reference decodes from the buffers of `job`.
pub(super) fn expected<B: Backend>(rig: &Rig<B>, job: &DecodeJob<B>) -> Vec<f32> {
    let content = |target: &Target<B>| Buffer {
        spec: target.spec,
        storage: rig.content::<u8>(&target.bytes),
    };
    let (data, scales) = (content(&job.data), job.block_scale.as_ref().map(content));
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
        orientation,
        &job.kernel,
        &data,
        scales.as_ref(),
        &tensor,
    )
}

pub fn every_ingredient_equals_the_reference<B: Backend>(rig: &Rig<B>) {
    for (n, case) in rig.some_of(cases(), 4).into_iter().enumerate() {
        for shape in shapes(&case) {
            let given = values(shape.elements(), n as u64, true);
            let source = Source::F32(rig.buffer(&given));
            let outer = case.outer(shape, 3.0);
            let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
            rig.run(Work::Encode(vec![job.clone()]));
            for orientation in Orientation::ALL {
                let decode = |dtype| decode_job(rig, &job, orientation, dtype).unwrap();
                // Of one dtype, and of both in one plan.
                let alone = [FloatDtype::F32, FloatDtype::Bf16].map(|dtype| vec![decode(dtype)]);
                let both = vec![decode(FloatDtype::Bf16), decode(FloatDtype::F32)];
                for jobs in alone.into_iter().chain([both]) {
                    rig.run(Work::Decode(jobs.clone()));
                    for job in jobs {
                        let what = (shape, orientation, job.kernel, job.out.dtype());
                        let found = content(rig, &job.out);
                        assert_eq!(bits(&found), bits(&rounded(rig, &job)), "{rig:?} {what:?}");
                    }
                }
            }
        }
    }
}

/// Every finite value of a code survives decode and encode with a scale of 1.
pub fn codes_survive_a_round_trip<B: Backend>(rig: &Rig<B>) {
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
            out: Source::F32(out.clone()),
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
pub fn bf16_survives_a_round_trip<B: Backend>(rig: &Rig<B>) {
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
    let expected: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
    // Rounding sets the bit of quiet NaNs.
    let quiet: Vec<f32> = expected
        .iter()
        .map(|&x| bf16::from_f32(x).to_f32())
        .collect();
    for (dtype, expected) in [(FloatDtype::F32, expected), (FloatDtype::Bf16, quiet)] {
        let decode = decode_job(rig, &job, Orientation::Columnwise, dtype).unwrap();
        rig.run(Work::Decode(vec![decode.clone()]));
        assert_eq!(bits(&content(rig, &decode.out)), bits(&expected));
    }
}
