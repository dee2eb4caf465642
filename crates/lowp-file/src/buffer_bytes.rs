//! The bytes of buffers, chunk by chunk where they are on a device.

use crate::error::{FileError, Result};
use crate::output::background::Deferred;
use bytemuck::Pod;
use lowp_kernels::{Backend, CpuBuffer, Element};
use std::any::Any;
use std::io;
use std::sync::Arc;

/// Bytes that are copied from the device at a time. Buffers with fewer are written at once. Tests have many with more.
pub(crate) const CHUNK: usize = if cfg!(test) { 1 << 14 } else { 1 << 20 };

/// Reads the elements of `buffer` and hands them to `take`, at most [`CHUNK`] bytes at a time.
pub(crate) fn each_chunk<T: Element, B: Backend>(
    backend: &B,
    buffer: &B::Buffer<T>,
    mut take: impl FnMut(&[T]) -> Result<()>,
) -> Result<()> {
    let (len, most) = (backend.len::<T>(buffer), CHUNK / size_of::<T>());
    let mut chunk = vec![T::default(); most.min(len)];
    for start in (0..len).step_by(most) {
        let chunk = &mut chunk[..most.min(len - start)];
        backend.read(buffer, start, chunk)?;
        take(chunk)?;
    }
    Ok(())
}

/// The bytes of `buffer` as another thread can read them, where they are enough to be worth it; `owner` is held until then.
pub(crate) fn deferred<T: Element + Pod, B: Backend, O: Send + Sync + 'static>(
    backend: &B,
    buffer: &B::Buffer<T>,
    owner: &Arc<O>,
) -> Option<Box<dyn Deferred>> {
    // Files are little-endian.
    let in_order = size_of::<T>() == 1 || cfg!(target_endian = "little");
    let bytes = BufferBytes {
        backend: backend.clone(),
        buffer: buffer.clone(),
        _owner: Arc::clone(owner),
    };
    (in_order && bytes.len() >= CHUNK).then(|| Box::new(bytes) as Box<dyn Deferred>)
}

struct BufferBytes<T: Element, B: Backend, O> {
    backend: B,
    buffer: B::Buffer<T>,
    _owner: Arc<O>,
}

impl<T: Element + Pod, B: Backend, O: Send + Sync> Deferred for BufferBytes<T, B, O> {
    fn len(&self) -> usize {
        self.backend.len::<T>(&self.buffer) * size_of::<T>()
    }

    fn each(&self, take: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let buffer: &dyn Any = &self.buffer;
        if let Some(on_host) = buffer.downcast_ref::<CpuBuffer<T>>() {
            let values = on_host.read().map_err(io::Error::other)?;
            return take(bytemuck::cast_slice(&values));
        }
        let chunks = each_chunk(&self.backend, &self.buffer, |chunk: &[T]| {
            Ok(take(bytemuck::cast_slice(chunk))?)
        });
        chunks.map_err(|error| match error {
            FileError::Io(error) => error,
            error => io::Error::other(error),
        })
    }
}
