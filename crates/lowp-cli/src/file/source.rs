//! Values of a file as the input of a cast.

use super::input_error::input_error;
use super::model::Tensor;
use super::progress::Progress;
use crate::output::shown;
use anyhow::Result;
use half::{bf16, f16};
use lowp_kernels::{Backend, Element, Source};
use safetensors::Dtype;
use std::ops::Range;

/// Values that are converted at a time.
const CHUNK: usize = 1 << 16;

/// Elements `range` of `tensor`, read under the eyes of `progress`. F16 is widened to F32, which is exact.
///
/// # Errors
/// The file cannot be read, or the dtype is no float of 16 or 32 bits.
pub(super) fn load<B: Backend>(
    backend: &B,
    tensor: &Tensor<'_>,
    range: Range<usize>,
    progress: &Progress,
) -> Result<Source<B>> {
    let from = (tensor, range, progress);
    Ok(match tensor.dtype {
        Dtype::F32 => Source::F32(convert::<4, _, _>(backend, from, f32_of)?),
        Dtype::F16 => Source::F32(convert::<2, _, _>(backend, from, |b| f16_of(b).to_f32())?),
        Dtype::BF16 => Source::Bf16(convert::<2, _, _>(backend, from, bf16_of)?),
        _ => return Err(no_values(tensor)),
    })
}

/// Reads values of `N` bytes each.
fn convert<const N: usize, T: Element, B: Backend>(
    backend: &B,
    (tensor, range, progress): (&Tensor<'_>, Range<usize>, &Progress),
    value: impl Fn(&[u8]) -> T,
) -> Result<B::Buffer<T>> {
    let buffer = backend.alloc::<T>(range.len())?;
    each_chunk::<N, T>(tensor, range, value, |start, values| {
        progress.add(values.len() * N);
        Ok(backend.write(&buffer, start, values)?)
    })?;
    Ok(buffer)
}

/// Hands values of `N` bytes each to `take`, each chunk with its distance from the start of the range.
fn each_chunk<const N: usize, T>(
    tensor: &Tensor<'_>,
    range: Range<usize>,
    value: impl Fn(&[u8]) -> T,
    mut take: impl FnMut(usize, &[T]) -> Result<()>,
) -> Result<()> {
    let mut values = Vec::with_capacity(CHUNK.min(range.len()));
    tensor.pieces(range.start * N..range.end * N, |start, bytes| {
        for (chunk, bytes) in bytes.chunks(CHUNK * N).enumerate() {
            values.clear();
            values.extend(bytes.chunks_exact(N).map(&value));
            take(start / N + chunk * CHUNK, &values)?;
        }
        Ok(())
    })
}

/// Hands elements `range` of `tensor` to `take` as f32 values, chunk by chunk.
///
/// # Errors
/// As [`load`], or whatever `take` returns.
pub(super) fn each_value(
    tensor: &Tensor<'_>,
    range: Range<usize>,
    take: impl FnMut(usize, &[f32]) -> Result<()>,
) -> Result<()> {
    match tensor.dtype {
        Dtype::F32 => each_chunk::<4, _>(tensor, range, f32_of, take),
        Dtype::F16 => each_chunk::<2, _>(tensor, range, |b| f16_of(b).to_f32(), take),
        Dtype::BF16 => each_chunk::<2, _>(tensor, range, |b| bf16_of(b).to_f32(), take),
        _ => Err(no_values(tensor)),
    }
}

fn f32_of(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn f16_of(bytes: &[u8]) -> f16 {
    f16::from_le_bytes([bytes[0], bytes[1]])
}

fn bf16_of(bytes: &[u8]) -> bf16 {
    bf16::from_le_bytes([bytes[0], bytes[1]])
}

fn no_values(tensor: &Tensor<'_>) -> anyhow::Error {
    input_error(format!(
        "'{}' has dtype {} and only F32, BF16 and F16 hold values to quantize; convert it first",
        shown(tensor.name),
        tensor.dtype
    ))
}
