//! [`Codes`]: quantized tensors between files and memory, byte for byte.

use crate::dtypes::Named;
use crate::error::{Context, FileError, Result, file_error, input_error};
use crate::fields::{Content, Field, keeps_amax};
use crate::interchange::amax::amax_of_scale;
pub use crate::meta::{Quantized, quantized};
use crate::model::{Model, Tensor};
use crate::round::first_f32;
use crate::text::shown;
use crate::unpack::unpack;
use lowp_format::{AnyRecipe, Part, QuantizedTensor, Shape, Usage};
use lowp_kernels::{Backend, Cpu, CpuBuffer};
use safetensors::Dtype;

/// The buffers of a quantized tensor, and what else a file says of it.
#[derive(Clone, Debug)]
pub struct Codes {
    /// The buffers of one usage, scales in the Compact form.
    pub tensor: QuantizedTensor<CpuBuffer<u8>>,
    /// The orientations that they serve.
    pub usage: Usage,
    /// The dtype of the values that they were made of: F32, BF16 or F16.
    pub dtype: Dtype,
    /// The amax of those values, where the file of the recipe says it and it is in no buffer.
    pub amax: Option<f32>,
}

impl Quantized {
    /// Its recipe with its options.
    pub fn recipe(&self) -> AnyRecipe {
        self.recipe
    }

    /// The matrix that it is, leading dimensions flattened to rows.
    pub fn matrix(&self) -> Shape {
        self.full
    }

    /// The orientations that it was quantized for.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The dtype of the values that it was made of.
    pub fn dtype(&self) -> Option<Dtype> {
        Dtype::named(&self.text.dtype)
    }

    /// The field of an amax that is in no buffer.
    pub(crate) fn amax_field(&self) -> Option<&Field> {
        let mut fields = self.fields.iter();
        fields.find(|field| field.content == Content::Amax)
    }

    /// The bytes of a field.
    pub(crate) fn read(&self, model: &Model, field: &Field) -> Result<Vec<u8>> {
        let found = model.expect(&field.name(&self.name), field.dtype, &field.shape)?;
        Ok(found.bytes_at(0..found.len())?.to_vec())
    }

    /// The names of the tensors of the file that it is.
    pub fn fields(&self) -> impl Iterator<Item = String> + '_ {
        self.fields.iter().map(|field| field.name(&self.name))
    }
}

impl Model {
    /// The buffers of `tensor`, one of [`quantized`], as the file has them.
    ///
    /// # Errors
    /// The rows of one rank, or a file that cannot be read or was changed.
    pub fn codes(&self, tensor: &Quantized) -> Result<Codes> {
        if tensor.shard.is_some() {
            return Err(file_error!(
                self.path(),
                "'{}' is the rows of one rank; gather the folder of rank files first (lowp unshard)",
                shown(&tensor.name)
            ));
        }
        let amax = match tensor.amax_field() {
            Some(field) => first_f32(&tensor.read(self, field)?),
            None => None,
        };
        let codes = unpack(&Cpu, self, tensor, None);
        Ok(Codes {
            tensor: self.steady(codes)?,
            usage: tensor.usage,
            dtype: tensor.dtype().context("it has no dtype")?,
            amax,
        })
    }
}

impl Tensor<'_> {
    /// Reads all its bytes.
    ///
    /// # Errors
    /// `into` has another number of bytes, or the file cannot be read.
    pub fn read(&self, into: &mut [u8]) -> Result<()> {
        if into.len() != self.len() {
            return Err(input_error(format!(
                "'{}' has {} bytes and is read into {}; give as many",
                shown(self.name),
                self.len(),
                into.len()
            )));
        }
        self.pieces(0..self.len(), |start, piece| {
            into[start..start + piece.len()].copy_from_slice(piece);
            Ok(())
        })
    }
}

/// The amax that the file of `codes` says: the one that is known, or the nearest that has the same scale.
pub(crate) fn amax_of(codes: &Codes) -> Result<Option<f32>> {
    let recipe = codes.tensor.recipe();
    if !keeps_amax(&recipe) || codes.amax.is_some() {
        return Ok(codes.amax.filter(|_| keeps_amax(&recipe)));
    }
    let scale = codes.tensor.buffers().iter();
    let mut scale = scale.filter(|buffer| buffer.spec.key.part == Part::DecodeScale);
    let scale = scale.next().context("it has no scale")?;
    let bytes = Cpu.download::<u8>(&scale.storage)?;
    let decode = first_f32(&bytes).context("its scale is empty")?;
    Ok(Some(amax_of_scale(decode, &recipe)))
}

/// Rejects a dtype that no quantized tensor is of.
pub(crate) fn check_dtype(name: &str, dtype: Dtype) -> Result<(), FileError> {
    if <Dtype as Named>::ALL.contains(&dtype) {
        return Ok(());
    }
    Err(input_error(format!(
        "'{}': its dtype is {dtype} and only F32, BF16 and F16 are quantized (convert it first)",
        shown(name)
    )))
}
