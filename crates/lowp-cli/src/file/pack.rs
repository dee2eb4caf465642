//! A quantized tensor as the bytes of its fields.

use super::cast::Tensor;
use super::fields::{Content, Field};
use super::write::{Parts, Sink, Want};
use anyhow::{Context, Result};
use lowp_format::{BufferList, BufferSpec, Form, Part};
use lowp_kernels::Cpu;
use lowp_shard::scales_in_form;

/// The buffers among `specs` that the wanted fields are made of.
pub(super) fn wanted(specs: &[BufferSpec], want: Want) -> BufferList {
    let number = |spec: &&BufferSpec| spec.key.part == Part::TensorScale;
    let specs = specs.iter();
    match want {
        Want::Numbers => specs.filter(number).copied().collect(),
        Want::Arrays => specs.copied().collect(),
    }
}

/// A quantized tensor, and the fields that it is written as.
#[derive(Debug)]
pub(super) struct Packed {
    pub(super) tensor: Tensor,
    /// The amax of the source, where it is in no buffer and numbers are wanted.
    pub(super) amax: Option<f32>,
    pub(super) fields: Vec<Field>,
}

impl Parts for Packed {
    fn write(&self, part: usize, sink: &mut Sink<'_>) -> Result<()> {
        let field = self.fields.get(part).context("there is no such field")?;
        let Content::Buffer { key, orientation } = field.content else {
            let amax = self.amax.context("the amax was not taken")?;
            return sink(&amax.to_le_bytes());
        };
        let form = field.layout.map_or(Form::Compact, |layout| layout.form);
        if key.part == Part::BlockScale && form != Form::Compact {
            let scales = scales_in_form(&Cpu, &self.tensor, orientation, form)?;
            let (_, bytes) = scales.context("the recipe has no block scales")?;
            return sink(&bytes);
        }
        sink(&self.tensor.buffer(key)?.storage.read()?)
    }
}
