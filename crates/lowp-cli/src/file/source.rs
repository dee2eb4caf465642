//! Values of a file as the input of a cast.

use super::model::Tensor;
use super::refuse::refuse;
use anyhow::Result;
use half::{bf16, f16};
use lowp_kernels::{Backend, Cpu, Element, Source};
use safetensors::Dtype;
use std::ops::Range;

/// Values that are converted at a time.
const CHUNK: usize = 1 << 16;

/// Elements `range` of `tensor`. F16 is widened to F32, which is exact.
///
/// # Errors
/// The file cannot be read, or the dtype is no float of 16 or 32 bits.
pub(super) fn load<B: Backend>(
    backend: &B,
    tensor: &Tensor<'_>,
    range: Range<usize>,
) -> Result<Source<B>> {
    let f32_of = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    let word = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    Ok(match tensor.dtype {
        Dtype::F32 => Source::F32(convert::<4, _, _>(backend, tensor, range, f32_of)?),
        Dtype::F16 => Source::F32(convert::<2, _, _>(backend, tensor, range, |b| {
            f16::from_bits(word(b)).to_f32()
        })?),
        Dtype::BF16 => Source::Bf16(convert::<2, _, _>(backend, tensor, range, |b| {
            bf16::from_bits(word(b))
        })?),
        other => {
            return Err(refuse(format!(
                "'{}' has dtype {other}, which holds no values to quantize",
                tensor.name
            )));
        }
    })
}

/// Reads values of `N` bytes each.
fn convert<const N: usize, T: Element, B: Backend>(
    backend: &B,
    tensor: &Tensor<'_>,
    range: Range<usize>,
    value: impl Fn(&[u8]) -> T,
) -> Result<B::Buffer<T>> {
    let buffer = backend.alloc::<T>(range.len())?;
    let mut values = Vec::with_capacity(CHUNK.min(range.len()));
    tensor.pieces(range.start * N..range.end * N, |start, bytes| {
        for (chunk, bytes) in bytes.chunks(CHUNK * N).enumerate() {
            values.clear();
            values.extend(bytes.chunks_exact(N).map(&value));
            backend.write(&buffer, start / N + chunk * CHUNK, &values)?;
        }
        Ok(())
    })?;
    Ok(buffer)
}

/// Elements `range` of `tensor` as f32 values.
///
/// # Errors
/// As [`load`].
pub(super) fn values(tensor: &Tensor<'_>, range: Range<usize>) -> Result<Vec<f32>> {
    Ok(match load(&Cpu, tensor, range)? {
        Source::F32(values) => Cpu.download(&values)?,
        Source::Bf16(values) => Cpu
            .download(&values)?
            .into_iter()
            .map(bf16::to_f32)
            .collect(),
    })
}
