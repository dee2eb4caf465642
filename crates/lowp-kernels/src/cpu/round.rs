//! A rounding as its definition has it: an encode into memory of the plan, and decodes of it.

use lowp_format::{Code, KernelKey, Orientation, Part, Quantizer, Quantizers, ScaleRule};

use super::Cpu;
use crate::{Backend, DecodeJob, EncodeJob, KernelError, RoundJob, Source, Target};

/// The encode of `job`, with codes of the orientations that have values, and their decodes.
pub(super) fn apart(
    job: &RoundJob<Cpu>,
) -> Result<(EncodeJob<Cpu>, Vec<DecodeJob<Cpu>>), KernelError> {
    let mut encode = job.encode.clone();
    let mut decodes = Vec::new();
    let shape = encode.shape;
    for orientation in Orientation::ALL {
        let Some(values) = &job.values[orientation as usize] else {
            continue;
        };
        let kernel = encode.kernels[orientation as usize];
        let codes = codes(orientation, kernel, shape)?;
        let find = |part| {
            let mut codes = codes.iter();
            codes.find(|target| target.spec.key.part == part).cloned()
        };
        let outer = kernel.scale.outer().and_then(|(_, part)| find(part));
        let missing = || KernelError::Missing {
            what: "the codes of a rounding".to_owned(),
        };
        decodes.push(DecodeJob {
            shape,
            kernel,
            data: find(Part::Data).ok_or_else(missing)?,
            block_scale: find(Part::BlockScale),
            tensor_scale: outer.map(|target| target.bytes),
            out: Source::Bf16(values.clone()),
        });
        encode.targets.extend(codes);
    }
    Ok((encode, decodes))
}

/// Row-major codes and scales of `orientation` alone.
fn codes(
    orientation: Orientation,
    kernel: KernelKey,
    shape: lowp_format::Shape,
) -> Result<Vec<Target<Cpu>>, KernelError> {
    let [of, other] =
        [kernel, KernelKey::new(Code::F32, ScaleRule::None)].map(Quantizer::row_major);
    let quantizers = match orientation {
        Orientation::Rowwise => Quantizers::independent(of, other),
        Orientation::Columnwise => Quantizers::independent(other, of),
    };
    let specs = quantizers.buffers(orientation.usage());
    let target =
        |spec: lowp_format::BufferSpec| Ok(Target::new(spec, Cpu.alloc(spec.bytes(shape))?));
    specs.into_iter().map(target).collect()
}
