//! A quantized tensor as the bytes of its fields.

use crate::background::Deferred;
use crate::cast::Tensor;
use crate::error::{Context, Result};
use crate::fields::{Content, Field};
use crate::write::{Parts, Sink};
use lowp_format::{Form, Part};
use lowp_kernels::{Backend, CpuBuffer};
use lowp_shard::scales_in_form;
use std::any::Any;
use std::io;
use std::sync::Arc;

/// Bytes that are copied from the device at a time. Buffers with fewer are written at once. Tests have many with more.
const CHUNK: usize = if cfg!(test) { 1 << 14 } else { 1 << 20 };

/// A quantized tensor, and the fields that it is written as.
pub(crate) struct Packed<B: Backend> {
    pub(crate) backend: B,
    /// Held until all of it is written.
    pub(crate) tensor: Arc<Tensor<B>>,
    /// The amax of the source, where it is in no buffer.
    pub(crate) amax: Option<f32>,
    pub(crate) fields: Vec<Field>,
}

/// A buffer of bytes of `tensor`.
struct Shared<B: Backend> {
    backend: B,
    buffer: B::Buffer<u8>,
    _tensor: Arc<Tensor<B>>,
}

impl<B: Backend> Deferred for Shared<B> {
    fn len(&self) -> usize {
        self.backend.len::<u8>(&self.buffer)
    }

    fn each(&self, take: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let buffer: &dyn Any = &self.buffer;
        if let Some(on_host) = buffer.downcast_ref::<CpuBuffer<u8>>() {
            return take(&on_host.read().map_err(io::Error::other)?);
        }
        let len = self.len();
        let mut bytes = vec![0; CHUNK.min(len)];
        for start in (0..len).step_by(CHUNK) {
            let bytes = &mut bytes[..CHUNK.min(len - start)];
            let read = self.backend.read(&self.buffer, start, bytes);
            read.map_err(io::Error::other)?;
            take(bytes)?;
        }
        Ok(())
    }
}

impl<B: Backend> Parts for Packed<B> {
    fn deferred(&self, part: usize) -> Option<Box<dyn Deferred>> {
        let field = self.fields.get(part)?;
        let Content::Buffer { key, .. } = field.content else {
            return None;
        };
        let buffer = &self.tensor.buffer(key).ok()?.storage;
        let is_long = key.part == Part::Data && self.backend.len::<u8>(buffer) >= CHUNK;
        is_long.then(|| -> Box<dyn Deferred> {
            Box::new(Shared {
                backend: self.backend.clone(),
                buffer: buffer.clone(),
                _tensor: Arc::clone(&self.tensor),
            })
        })
    }

    fn write(&self, part: usize, sink: &mut Sink<'_>) -> Result<()> {
        let field = self.fields.get(part).context("there is no such field")?;
        let Content::Buffer { key, orientation } = field.content else {
            let amax = self.amax.context("the amax was not taken")?;
            return sink(&amax.to_le_bytes());
        };
        let form = field.layout.map_or(Form::Compact, |layout| layout.form());
        if key.part == Part::BlockScale && form != Form::Compact {
            let scales = scales_in_form(&self.backend, &self.tensor, orientation, form)?;
            let (_, bytes) = scales.context("the recipe has no block scales")?;
            return sink(&bytes);
        }
        let buffer = &self.tensor.buffer(key)?.storage;
        let len = self.backend.len::<u8>(buffer);
        let mut bytes = vec![0; CHUNK.min(len)];
        for start in (0..len).step_by(CHUNK) {
            let bytes = &mut bytes[..CHUNK.min(len - start)];
            self.backend.read(buffer, start, bytes)?;
            sink(bytes)?;
        }
        Ok(())
    }
}
