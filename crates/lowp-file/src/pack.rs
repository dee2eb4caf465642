//! A quantized tensor as the bytes of its fields.

use crate::buffer_bytes::{deferred, each_chunk};
use crate::cast::Tensor;
use crate::error::{Context, Result};
use crate::fields::{Content, Field};
use crate::output::background::Deferred;
use crate::write::{Parts, Sink};
use lowp_format::{Form, Part};
use lowp_kernels::Backend;
use lowp_shard::scales_in_form;
use std::sync::Arc;

/// A quantized tensor, and the fields that it is written as.
pub(crate) struct Packed<B: Backend> {
    backend: B,
    /// Held until all of it is written.
    tensor: Arc<Tensor<B>>,
    /// The amax of the source, where it is in no buffer.
    amax: Option<f32>,
    fields: Vec<Field>,
}

impl<B: Backend> Packed<B> {
    pub(crate) fn new(
        backend: &B,
        tensor: impl Into<Arc<Tensor<B>>>,
        amax: Option<f32>,
        fields: Vec<Field>,
    ) -> Self {
        Self {
            backend: backend.clone(),
            tensor: tensor.into(),
            amax,
            fields,
        }
    }

    /// The same as the parts of a job.
    pub(crate) fn parts<'a>(
        backend: &B,
        tensor: impl Into<Arc<Tensor<B>>>,
        amax: Option<f32>,
        fields: Vec<Field>,
    ) -> Box<dyn Parts + 'a> {
        Box::new(Self::new(backend, tensor, amax, fields))
    }
}

impl<B: Backend> Parts for Packed<B> {
    fn deferred(&self, part: usize) -> Option<Box<dyn Deferred>> {
        let field = self.fields.get(part)?;
        let Content::Buffer { key, .. } = field.content else {
            return None;
        };
        let buffer = &self.tensor.buffer(key).ok()?.storage;
        match key.part {
            Part::Data => deferred::<u8, B, _>(&self.backend, buffer, &self.tensor),
            Part::BlockScale | Part::DecodeScale | Part::Amax => None,
        }
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
        each_chunk::<u8, B>(&self.backend, buffer, sink)
    }
}
