//! A quantized tensor as the bytes of its fields.

use super::cast::Tensor;
use super::fields::{Content, Field};
use super::write::Want;
use anyhow::{Result, ensure};
use lowp_format::{BufferList, BufferSpec, Form, Part};
use lowp_kernels::Backend;
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

/// The bytes of the wanted ones of `fields`; the others stay empty.
///
/// # Errors
/// A buffer that the tensor does not hold.
pub(super) fn pack<B: Backend>(
    backend: &B,
    tensor: &Tensor<B>,
    amax: Option<f32>,
    fields: &[Field],
    want: Want,
) -> Result<Vec<Vec<u8>>> {
    fields
        .iter()
        .map(|field| {
            if field.layout.is_none() != (want == Want::Numbers) {
                return Ok(Vec::new());
            }
            let bytes = match field.content {
                Content::Amax => amax
                    .map(|amax| amax.to_le_bytes().to_vec())
                    .unwrap_or_default(),
                Content::Buffer { key, orientation } => {
                    let form = field.layout.map_or(Form::Compact, |layout| layout.form);
                    let repacked = match (key.part, form) {
                        (Part::BlockScale, Form::Padded | Form::Swizzled) => {
                            scales_in_form(backend, tensor, orientation, form)?
                        }
                        _ => None,
                    };
                    match repacked {
                        Some((_, bytes)) => bytes,
                        None => backend.download::<u8>(&tensor.buffer(key)?.storage)?,
                    }
                }
            };
            ensure!(
                bytes.len() == field.bytes(),
                "{}: {} bytes were made where {} were announced",
                field.suffix,
                bytes.len(),
                field.bytes()
            );
            Ok(bytes)
        })
        .collect()
}
