//! Decoding against the reference, and exhaustive round trips of codes.

use super::*;
use crate::DecodeJob;
use crate::reference;

fn decode_job(job: &EncodeJob<Cpu>, usage: Usage) -> Option<DecodeJob<Cpu>> {
    let part = |part| {
        job.targets
            .iter()
            .find(|t| t.spec.key == key(usage, part))
            .cloned()
    };
    let tensor = job
        .targets
        .iter()
        .find(|t| t.spec.key.part == Part::TensorScale);
    Some(DecodeJob {
        shape: job.shape,
        kernel: job.kernel,
        data: part(Part::Data)?,
        block_scale: part(Part::BlockScale),
        tensor_scale: tensor.map(|t| t.bytes.clone()),
        out: CpuBuffer::from_vec(vec![f32::NAN; job.shape.elements()]),
    })
}

#[test]
fn every_ingredient_equals_the_reference() {
    everywhere(|isa| {
        for (n, case) in cases().into_iter().enumerate() {
            for shape in shapes(&case) {
                let given = values(shape.elements(), n as u64, true);
                let source = Source::F32(CpuBuffer::from_vec(given));
                let job = encode_job(case.kernel, &case.specs, shape, source, 3.0);
                run(Work::Encode(vec![job.clone()]));
                for usage in [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH] {
                    let Some(decode) = decode_job(&job, usage) else {
                        continue;
                    };
                    let plan = plan(Work::Decode(vec![decode.clone()]))
                        .unwrap()
                        .with_isa(isa);
                    plan.run(&StepScalars::default()).unwrap();
                    let data = decode.data.bytes.read().unwrap();
                    let scales = decode.block_scale.as_ref();
                    let bytes = scales.map(|t| t.bytes.read().unwrap());
                    let scales = scales.zip(bytes.as_ref()).map(|(t, b)| (&t.spec, &b[..]));
                    let tensor = match case.kernel.scale {
                        ScaleRule::Tensor => 1.0 / 3.0,
                        _ => 3.0,
                    };
                    let codes = (&decode.data.spec, &data[..]);
                    let expected = reference::decode(shape, &case.kernel, codes, scales, tensor);
                    let found = decode.out.read().unwrap();
                    assert_eq!(
                        bits(&found),
                        bits(&expected),
                        "{shape} {usage} {:?}",
                        case.kernel
                    );
                }
            }
        }
    });
}

/// Every finite value of a code survives decode and encode with a scale of 1.
#[test]
fn codes_survive_a_round_trip() {
    for element in [Code::E4M3, Code::E5M2] {
        let case = case(element, ScaleRule::Tensor, None, Some(TRANSPOSED));
        let codes: Vec<u8> = (0..=255u8).collect();
        let shape = Shape::new(2, 128);
        let spec = case.specs[0];
        let out = CpuBuffer::from_vec(vec![0.0; 256]);
        let data = Target {
            spec,
            bytes: CpuBuffer::from_vec(codes.clone()),
        };
        run(Work::Decode(vec![DecodeJob {
            shape,
            kernel: case.kernel,
            data,
            block_scale: None,
            tensor_scale: Some(CpuBuffer::from_vec(1f32.to_le_bytes().to_vec())),
            out: out.clone(),
        }]));
        let job = encode_job(case.kernel, &[spec], shape, Source::F32(out.clone()), 1.0);
        let targets = job.targets.clone();
        run(Work::Encode(vec![job]));
        let found = targets[0].bytes.read().unwrap();
        for (code, (found, value)) in codes.iter().zip(found.iter().zip(&*out.read().unwrap())) {
            if value.is_finite() {
                assert_eq!(code, found, "{element} {code:02X}");
            }
        }
    }
}

/// bf16 values are stored exactly, and all 65536 are read back.
#[test]
fn bf16_survives_a_round_trip() {
    let case = case(Code::Bf16, ScaleRule::None, None, None);
    let shape = Shape::new(256, 256);
    let values: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let source = Source::Bf16(CpuBuffer::from_vec(values.clone()));
    let job = encode_job(case.kernel, &case.specs, shape, source, 1.0);
    run(Work::Encode(vec![job.clone()]));
    let decode = decode_job(&job, Usage::BOTH).unwrap();
    run(Work::Decode(vec![decode.clone()]));
    let expected: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
    assert_eq!(bits(&decode.out.read().unwrap()), bits(&expected));
}
