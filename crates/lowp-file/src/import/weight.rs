//! [`Weight`]: a weight in the form of another program, as the buffers of a recipe.

use crate::decoding::Decoder;
use crate::error::{Context, Result, file_error};
use crate::export::choice;
use crate::fields::{keeps_amax, worked};
use crate::interchange::amax::{amax_of_scale, nearest};
use crate::interchange::forms::{Content, Form, Stored};
use crate::interchange::record::Numbers;
use crate::meta::Quantized;
use crate::model::{Model, Tensor};
use crate::pack::Packed;
use crate::round::first_f32;
use crate::text::shown;
use crate::unpack::with_transposes;
use crate::write::Parts;
use half::{bf16, f16};
use lowp_format::{
    BufferSpec, Form as ScaleForm, Orientation, Part, QuantizedTensor, Recipe, ScaleLayout, Shape,
    Usage,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer};
use safetensors::Dtype;

#[derive(Debug)]
pub(crate) struct Weight<'a> {
    pub(crate) model: &'a Model,
    pub(crate) tensor: Quantized,
    /// How it is stored; `None` where its tensors are lowp's own.
    pub(crate) form: Option<&'static Form>,
    /// What the file says of its numbers, where it says how it was made.
    pub(crate) recorded: Option<Numbers>,
}

impl<'a> Weight<'a> {
    pub(crate) fn names(&self) -> Vec<String> {
        match self.form {
            Some(form) => form
                .tensors
                .iter()
                .map(|stored| form.name_of(&self.tensor.name, stored))
                .collect(),
            None => self.tensor.fields().collect(),
        }
    }

    /// What makes its fields, or its values where there is a `decoder`.
    pub(crate) fn parts<'p>(
        &'p self,
        decoder: Option<&'p Decoder<Cpu>>,
    ) -> Result<Box<dyn Parts + 'p>> {
        if let Some(decoder) = decoder {
            if self.form.is_none() {
                return decoder.tensor(self.model, &self.tensor, None);
            }
            let codes = self.quantized(&self.tensor.recipe.buffers(Usage::ROWWISE))?;
            return Ok(decoder.codes(codes, Orientation::Rowwise, &self.tensor.name));
        }
        let amax = match keeps_amax(&self.tensor.recipe) {
            true => Some(self.amax()?),
            false => None,
        };
        let tensor = self.quantized(&self.tensor.specs)?;
        let fields = self.tensor.fields.clone();
        Ok(Packed::parts(&Cpu, tensor, amax, fields))
    }

    pub(super) fn quantized(&self, specs: &[BufferSpec]) -> Result<QuantizedTensor<CpuBuffer<u8>>> {
        let Quantized { recipe, full, .. } = self.tensor;
        let shape = worked(full, full, specs);
        with_transposes(recipe, shape, specs, |spec| {
            match shape.elements() == 0 && spec.bytes(shape) == 0 {
                true => Ok(Cpu.alloc::<u8>(0)?),
                false => self.buffer(spec, shape),
            }
        })
    }

    fn find(&self, content: impl Fn(Content) -> bool) -> Result<(&'static Stored, Tensor<'a>)> {
        let form = self.form.context("its tensors are lowp's own")?;
        let stored = form.tensors.iter().find(|stored| content(stored.content));
        let stored = stored.with_context(|| format!("{} has no such tensor", form.name))?;
        let found = self.model.get(&form.name_of(&self.tensor.name, stored));
        Ok((stored, found.context("it was there")?))
    }

    /// A buffer of the rowwise operand; codes lie where the file has them.
    fn buffer(&self, spec: &BufferSpec, shape: Shape) -> Result<CpuBuffer<u8>> {
        let bytes = match spec.key.part {
            Part::Data => {
                let (_, found) = self.find(|content| content == Content::Codes)?;
                if let Some(mapped) = found.values() {
                    return Ok(mapped);
                }
                found.bytes_at(0..found.len())?.to_vec()
            }
            Part::Amax => self.amax()?.to_le_bytes().to_vec(),
            Part::BlockScale | Part::DecodeScale => self.scales(spec, shape)?,
        };
        Ok(CpuBuffer::from_vec(bytes))
    }

    /// The scales of a buffer, from those of the form, of which several may be one of its.
    fn scales(&self, spec: &BufferSpec, shape: Shape) -> Result<Vec<u8>> {
        let (stored, found) = self.find(|content| content == Content::Scales)?;
        let form = self.form.context("its tensors are lowp's own")?;
        let mut raw = found.bytes_at(0..found.len())?.to_vec();
        if stored.dtype == Dtype::F32 {
            raw = widened(found.dtype, raw);
        }
        if spec.is_scalar()
            && let Some(Numbers {
                scale: Some(scale), ..
            }) = self.recorded
        {
            let scale = scale.to_le_bytes();
            if raw.chunks_exact(scale.len()).any(|stored| stored != scale) {
                return Err(file_error!(
                    self.model.path(),
                    "'{}' is not the one scale that its metadata say '{}' has; export the model again",
                    shown(found.name),
                    shown(&self.tensor.name)
                ));
            }
            return Ok(scale.to_vec());
        }
        let width = stored.dtype.bitsize() / 8;
        let layout = ScaleLayout::new(spec, shape, Orientation::Rowwise, ScaleForm::Compact)?;
        let mut out = vec![0; layout.bytes()];
        let mut filled = vec![false; out.len() / width];
        let ([rows, cols], tile) = (form.operand.scales(shape), form.operand.tile());
        for (number, scale) in raw.chunks_exact(width).enumerate().take(rows * cols) {
            let (row, col) = (number / cols, number % cols);
            let at = layout.offset_of([row.saturating_mul(tile[0]), col.saturating_mul(tile[1])]);
            let room = out
                .get_mut(at * width..(at + 1) * width)
                .context("a scale lies outside")?;
            let first = !std::mem::replace(&mut filled[at], true);
            if !first && *room != *scale {
                return Err(file_error!(
                    self.model.path(),
                    "'{}' has another scale at row {row}, column {col} than before in the same block of {}, of which {} says it \
                         is made; export the model again",
                    shown(found.name),
                    self.tensor.recipe.name(),
                    shown(&self.tensor.name)
                ));
            }
            room.copy_from_slice(scale);
        }
        Ok(out)
    }

    /// The amax of the source: the one that the file says, or the nearest of which its scale follows.
    fn amax(&self) -> Result<f32> {
        let recipe = &self.tensor.recipe;
        let choice = choice(recipe);
        let number = |content| -> Result<f32> {
            let (_, found) = self.find(|other| other == content)?;
            let bytes = widened(found.dtype, found.bytes_at(0..found.len())?.to_vec());
            first_f32(&bytes).context("it is empty")
        };
        let stored =
            self.find(|content| matches!(content, Content::EncodeScale | Content::AmaxShare));
        if let Ok((stored, found)) = stored {
            let value = number(stored.content)?;
            if let Some(Numbers {
                amax: Some(amax), ..
            }) = self.recorded
            {
                if stored.outer(amax, choice).to_bits() != value.to_bits() {
                    return Err(file_error!(
                        self.model.path(),
                        "'{}' is {value:?}, and its metadata say that the amax is {amax:?}, which gives {:?}; export the model again",
                        shown(found.name),
                        stored.outer(amax, choice)
                    ));
                }
                return Ok(amax);
            }
            let guess = match stored.content {
                Content::AmaxShare => value * choice.largest(),
                _ => choice.largest() / value,
            };
            return Ok(nearest(value, guess, |amax| stored.outer(amax, choice)));
        }
        if let Some(Numbers {
            amax: Some(amax), ..
        }) = self.recorded
        {
            return Ok(amax);
        }
        Ok(amax_of_scale(number(Content::Scales)?, recipe))
    }
}

fn widened(dtype: Dtype, bytes: Vec<u8>) -> Vec<u8> {
    let each = |value: fn([u8; 2]) -> f32| -> Vec<u8> {
        let (pairs, _) = bytes.as_chunks::<2>();
        pairs
            .iter()
            .flat_map(|pair| value(*pair).to_le_bytes())
            .collect()
    };
    match dtype {
        Dtype::BF16 => each(|pair| bf16::from_le_bytes(pair).to_f32()),
        Dtype::F16 => each(|pair| f16::from_le_bytes(pair).to_f32()),
        _ => bytes,
    }
}
