//! Values of a file as the input of a cast.

use crate::error::{FileError, Result, input_error};
use crate::model::Tensor;
use crate::progress::Progress;
use crate::reuse::Reused;
use crate::text::shown;
use half::{bf16, f16};
use lowp_kernels::{Backend, CpuBuffer, Element, FloatDtype, Source, zeroed};
use safetensors::Dtype;
use std::any::Any;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Values that are converted at a time.
const CHUNK: usize = 1 << 16;

/// Bytes from which several threads read.
const LARGE: usize = 8 << 20;
/// Most of them.
const MOST_THREADS: usize = 4;

/// Where sources lie one after the other.
pub(crate) type Room<B> = Reused<Source<B>>;

/// Whether `source` has room for `most` values of `tensor` and no more.
pub(crate) fn has_room<B: Backend>(
    backend: &B,
    source: &Source<B>,
    tensor: &Tensor<'_>,
    most: usize,
) -> bool {
    source.len(backend) == most && source.dtype() == float_of(tensor)
}

/// What the values of `tensor` are loaded as.
fn float_of(tensor: &Tensor<'_>) -> FloatDtype {
    match tensor.dtype {
        Dtype::BF16 => FloatDtype::Bf16,
        _ => FloatDtype::F32,
    }
}

/// The values of `tensor` where they lie in its file, where the kernels of `B` can read them there.
pub(crate) fn mapped<B: Backend>(tensor: &Tensor<'_>) -> Option<Source<B>> {
    Some(match tensor.dtype {
        Dtype::F32 => Source::F32(own::<f32, B>(tensor.values()?)?),
        Dtype::BF16 => Source::Bf16(own::<bf16, B>(tensor.values()?)?),
        _ => return None,
    })
}

pub(crate) fn own<T: Element, B: Backend>(buffer: CpuBuffer<T>) -> Option<B::Buffer<T>> {
    let buffer: Box<dyn Any> = Box::new(buffer);
    buffer.downcast().ok().map(|buffer| *buffer)
}

/// Elements `range` of `tensor`, read under the eyes of `progress`. F16 is widened to F32, which is exact.
pub(crate) fn load<B: Backend>(
    backend: &B,
    tensor: &Tensor<'_>,
    range: Range<usize>,
    progress: &dyn Progress,
) -> Result<Source<B>> {
    let (room, most) = (Room::default(), range.len());
    load_in(backend, &room, most, tensor, range, progress)
}

/// [`load`] into `room`, which has the values of one source, and is done with the one before it. It is made for `most` values, so that
/// shorter ones need no other.
pub(crate) fn load_in<B: Backend>(
    backend: &B,
    room: &Room<B>,
    most: usize,
    tensor: &Tensor<'_>,
    range: Range<usize>,
    progress: &dyn Progress,
) -> Result<Source<B>> {
    let most = most.max(range.len());
    let source = room.take(
        |kept| has_room(backend, kept, tensor, most),
        || Source::alloc(backend, float_of(tensor), most),
    )?;
    let source = source.view(backend, 0..range.len())?;
    match (&source, tensor.dtype) {
        (Source::F32(to), Dtype::F32) => {
            convert::<4, _, _>(backend, to, tensor, range, progress, f32::from_le_bytes)?;
        }
        (Source::F32(to), Dtype::F16) => {
            convert::<2, _, _>(backend, to, tensor, range, progress, f32_of_f16)?;
        }
        (Source::Bf16(to), Dtype::BF16) => {
            convert::<2, _, _>(backend, to, tensor, range, progress, bf16::from_le_bytes)?;
        }
        _ => return Err(no_values(tensor)),
    }
    Ok(source)
}

fn convert<const N: usize, T: Element, B: Backend>(
    backend: &B,
    buffer: &B::Buffer<T>,
    tensor: &Tensor<'_>,
    range: Range<usize>,
    progress: &dyn Progress,
    value: impl Fn([u8; N]) -> T + Sync,
) -> Result<()> {
    let fill = |part: Range<usize>| {
        let from = range.start + part.start..range.start + part.end;
        each_chunk::<N, T>(tensor, from, &value, |start, values| {
            progress.add(values.len() * N);
            Ok(backend.write(buffer, part.start + start, values)?)
        })
    };
    let parts = threads_for(range.len() * N);
    let each = range.len().div_ceil(parts).max(1);
    let end = |part: usize| (part * each).min(range.len());
    let parts: Vec<_> = (0..parts).map(|part| end(part)..end(part + 1)).collect();
    on_threads(&parts, fill).map(drop)
}

/// How many threads read so many bytes. Most of the time is the system's, which copies for several threads at once.
fn threads_for(bytes: usize) -> usize {
    match bytes {
        0..LARGE => 1,
        _ => thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MOST_THREADS),
    }
}

/// Does `work` on all `parts`, the first on this thread and each other on one of its own, if the system has one for it. Returns what it gave, in
/// order.
pub(crate) fn on_threads<T: Send>(
    parts: &[Range<usize>],
    work: impl Fn(Range<usize>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (first, others) = parts.split_at(parts.len().min(1));
    thread::scope(|scope| {
        let work = &work;
        let start = |part: &Range<usize>| {
            let own = part.clone();
            let thread = thread::Builder::new().spawn_scoped(scope, move || work(own));
            thread.map_err(|_| part.clone())
        };
        let others: Vec<_> = others.iter().map(start).collect();
        let mut done: Vec<Result<T>> = first.iter().cloned().map(work).collect();
        done.extend(others.into_iter().map(|other| match other {
            Ok(thread) => {
                let panicked = |_| Err(FileError::Missing("a reader panicked".to_owned()));
                thread.join().unwrap_or_else(panicked)
            }
            Err(part) => work(part),
        }));
        done.into_iter().collect()
    })
}

/// Hands values of `N` bytes each to `take`, each chunk with its distance from the start of the range.
fn each_chunk<const N: usize, T>(
    tensor: &Tensor<'_>,
    range: Range<usize>,
    value: impl Fn([u8; N]) -> T,
    mut take: impl FnMut(usize, &[T]) -> Result<()>,
) -> Result<()> {
    let mut values = Vec::with_capacity(CHUNK.min(range.len()));
    tensor.pieces(range.start * N..range.end * N, |start, bytes| {
        for (chunk, bytes) in bytes.chunks(CHUNK * N).enumerate() {
            values.clear();
            let (all, _) = bytes.as_chunks::<N>();
            values.extend(all.iter().map(|bytes| value(*bytes)));
            take(start / N + chunk * CHUNK, &values)?;
        }
        Ok(())
    })
}

/// Hands elements `range` of `tensor` to `take` as f32 values, chunk by chunk.
pub(crate) fn each_value(
    tensor: &Tensor<'_>,
    range: Range<usize>,
    take: impl FnMut(usize, &[f32]) -> Result<()>,
) -> Result<()> {
    match tensor.dtype {
        Dtype::F32 => each_chunk::<4, _>(tensor, range, f32::from_le_bytes, take),
        Dtype::F16 => each_chunk::<2, _>(tensor, range, f32_of_f16, take),
        Dtype::BF16 => each_chunk::<2, _>(tensor, range, f32_of_bf16, take),
        _ => Err(no_values(tensor)),
    }
}

/// Elements `range` of `tensor` as f32 values.
pub(crate) fn f32_values(tensor: &Tensor<'_>, range: Range<usize>) -> Result<Vec<f32>> {
    let mut values = zeroed(range.len())?;
    let threads = threads_for(size_of_val(values.as_slice()));
    let each = range.len().div_ceil(threads).max(1);
    let fill = |start: usize, part: &mut [f32]| {
        each_value(tensor, start..start + part.len(), |at, read| {
            part[at..at + read.len()].copy_from_slice(read);
            Ok(())
        })
    };
    // A part for each thread. Where the system has none, the others take its part.
    let parts = Mutex::new((range.start..).step_by(each).zip(values.chunks_mut(each)));
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let fill_some = |_: Range<usize>| {
        while let Some((start, part)) = next() {
            fill(start, part)?;
        }
        Ok(())
    };
    on_threads(&vec![0..0; threads], fill_some)?;
    Ok(values)
}

fn f32_of_f16(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

fn f32_of_bf16(bytes: [u8; 2]) -> f32 {
    bf16::from_le_bytes(bytes).to_f32()
}

fn no_values(tensor: &Tensor<'_>) -> FileError {
    input_error(format!(
        "'{}' has dtype {} and only F32, BF16 and F16 hold values to quantize; convert it first",
        shown(tensor.name),
        tensor.dtype
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;
    use lowp_kernels::Cpu;
    use std::fs;

    /// A source that several threads read is the one that one thread reads, and a second one takes its place.
    #[test]
    fn large_sources_are_read_in_parts() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("in.safetensors");
        for (dtype, width) in [("F32", 4), ("BF16", 2), ("F16", 2)] {
            let len = LARGE / width + 12_345;
            let bytes = len * width;
            let entry = |name: &str, at: usize| {
                format!(
                    "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":[{len}],\"data_offsets\":[{},{}]}}",
                    at * bytes,
                    (at + 1) * bytes
                )
            };
            let header = format!("{{{},{}}}", entry("a", 0), entry("b", 1));
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend(header.bytes());
            // Finite numbers, and no two parts alike.
            file.extend(
                (0..2 * bytes as u64)
                    .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57) as u8 & 0x3b),
            );
            fs::write(&path, file)?;
            let model = Model::open(&path)?;
            let (room, progress) = (Room::default(), ());
            for tensor in model.tensors() {
                let whole = 0..len - 7;
                let mut expected = Vec::new();
                each_value(&tensor, whole.clone(), |start, values| {
                    assert_eq!(start, expected.len());
                    expected.extend_from_slice(values);
                    Ok(())
                })?;
                let found: Vec<f32> = match load_in(&Cpu, &room, len, &tensor, whole, &progress)? {
                    Source::F32(values) => Cpu.download(&values)?,
                    Source::Bf16(values) => {
                        Cpu.download(&values)?.iter().map(|x| x.to_f32()).collect()
                    }
                };
                assert!(found == expected, "{dtype}");
                let end = f32_values(&tensor, 5..len - 7)?;
                assert!(end == expected[5..], "{dtype}");
            }
        }
        Ok(())
    }
}
