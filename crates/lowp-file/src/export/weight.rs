//! [`Weight`]: a quantized weight of a file or of a checkpoint, and the tensors that it becomes.

use super::checkpoint::{TrainedCheckpoint, TrainedWeight};
use crate::decoding::Decoder;
use crate::dtypes::{Named, OutputDtype};
use crate::error::{Context, FileError, Result, input_error, mend, of_tensor};
use crate::fields::{self, Content as Kind, Field, holding};
use crate::interchange::forms::{self, Axes, Content, ExportTarget, Form, Operand, Stored, base};
use crate::interchange::record::{self, Numbers};
use crate::meta::{Quantized, Text};
use crate::model::Model;
use crate::outputs::Group;
use crate::pack::Packed;
use crate::remedy::Remedy;
use crate::round::first_f32;
use crate::text::shown;
use crate::unpack::unpack;
use crate::write::{Item, Parts, Sink};
use lowp_format::has_tensor_scale;
use lowp_format::{FourOverSix, Orientation, Part, Recipe, ScaleLayout, ScaleRule, Usage};
use lowp_kernels::Cpu;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    Decoded(OutputDtype),
    /// Its own fields, scales padded.
    Fields,
    /// The tensors of a form.
    Stored(&'static Form),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    File(&'a Model),
    Checkpoint(&'a TrainedCheckpoint, &'a TrainedWeight),
}

#[derive(Debug)]
pub(crate) struct Weight<'a> {
    pub(crate) tensor: Quantized,
    source: Source<'a>,
    pub(crate) work: Work,
    /// What is written of the weight itself where its fields are, all of them or rowwise.
    fields: Vec<Field>,
}

/// Entries of a scale array: their bytes, and where each lies.
struct Entries {
    bytes: Vec<u8>,
    layout: Option<ScaleLayout>,
}

impl<'a> Weight<'a> {
    pub(crate) fn new(tensor: Quantized, source: Source<'a>, to: ExportTarget) -> Result<Self> {
        let (name, recipe) = (&tensor.name, &tensor.recipe);
        let work = match to {
            ExportTarget::Fp32 => Work::Decoded(OutputDtype::F32),
            ExportTarget::Bf16 => Work::Decoded(OutputDtype::Bf16),
            ExportTarget::Te => Work::Fields,
            _ => Work::Stored(forms::form(to, recipe).ok_or_else(|| no_form(name, recipe, to))?),
        };
        let mut fields = Vec::new();
        match work {
            Work::Decoded(_) => {}
            Work::Fields => {
                let specs = recipe.buffers(tensor.usage);
                fields = fields::fields(
                    recipe,
                    &specs,
                    tensor.full,
                    tensor.usage,
                    lowp_format::Form::Padded,
                )
                .map_err(|e| of_tensor(name, e))?;
            }
            Work::Stored(form) => check(&tensor, form, to)?,
        }
        Ok(Self {
            tensor,
            source,
            work,
            fields,
        })
    }

    /// Whether it has a columnwise operand that cannot be made of the rowwise one.
    pub(crate) fn loses_columnwise(&self) -> bool {
        restorable(&self.tensor.recipe, self.tensor.usage) != self.tensor.usage
    }

    pub(crate) fn group(&self, job: usize) -> Result<Group<'a>> {
        let Quantized {
            name, text, full, ..
        } = &self.tensor;
        match self.work {
            Work::Decoded(float) => Ok(Group::decoded(job, &self.tensor, float)),
            Work::Fields => {
                let scales = Named::label(lowp_format::Form::Padded).to_owned();
                let text = Text {
                    scales,
                    ..text.clone()
                };
                Group::quantized(job, name, &self.fields, &text)
            }
            Work::Stored(form) => {
                let item = |(part, stored): (usize, &Stored)| {
                    let dims = stored.dims(&form.operand, *full);
                    Item::made(job, part, form.name_of(name, stored), stored.dtype, dims)
                };
                let usage = restorable(&self.tensor.recipe, self.tensor.usage);
                let text = Text {
                    usage: usage.label().to_owned(),
                    ..text.clone()
                };
                let said = (record::key(name), record::value(&text, self.numbers()?)?);
                Ok(Group {
                    name: name.clone(),
                    items: form.tensors.iter().enumerate().map(item).collect(),
                    metadata: BTreeMap::from([said]),
                })
            }
        }
    }

    /// What makes them; values by `decoder`.
    pub(crate) fn parts<'p>(&'p self, decoder: &'p Decoder<Cpu>) -> Result<Box<dyn Parts + 'p>> {
        match (self.work, self.source) {
            (Work::Stored(form), _) => Ok(Box::new(Rewrapped { weight: self, form })),
            (Work::Decoded(_), Source::File(model)) => decoder.tensor(model, &self.tensor, None),
            (Work::Decoded(_), Source::Checkpoint(..)) => {
                Err(input_error("a checkpoint is decoded from its masters"))
            }
            (Work::Fields, source) => {
                let specs = self.tensor.recipe.buffers(self.tensor.usage);
                let tensor = match source {
                    Source::File(model) => unpack(
                        &Cpu,
                        model,
                        &Quantized {
                            specs,
                            ..self.tensor.clone()
                        },
                        None,
                    )?,
                    Source::Checkpoint(trained, weight) => trained.tensor(weight, &specs)?,
                };
                let amax = self.amax()?;
                Ok(Packed::parts(&Cpu, tensor, amax, self.fields.clone()))
            }
        }
    }

    /// The amax of the source, where the file keeps one of the whole tensor.
    fn amax(&self) -> Result<Option<f32>> {
        if let Source::Checkpoint(trained, weight) = self.source {
            return trained.amax(weight);
        }
        let mut fields = self.tensor.fields.iter();
        let number = fields.find(|field| {
            let is_amax = match field.content {
                Kind::Amax => true,
                Kind::Buffer { key, .. } => {
                    key.part == Part::Amax && key.usage.contains(Usage::ROWWISE)
                }
            };
            is_amax && field.layout.is_none()
        });
        let (Some(field), Source::File(model)) = (number, self.source) else {
            return Ok(None);
        };
        let bytes = self.tensor.read(model, field)?;
        Ok(first_f32(&bytes).map(f32::abs))
    }

    /// Whether a scale of what is written follows from the amax of the tensor.
    pub(crate) fn has_tensor_scale(&self) -> bool {
        has_tensor_scale(&self.tensor.recipe) && !matches!(self.work, Work::Decoded(_))
    }

    /// The tensor of its form that holds one scale for all of it.
    pub(crate) fn scale_of_tensor(&self) -> Option<&'static Stored> {
        let Work::Stored(form) = self.work else {
            return None;
        };
        let mut stored = form.tensors.iter();
        stored.find(|stored| matches!(stored.axes, Axes::One | Axes::Scalar))
    }

    /// What that tensor says; 1 where there is none.
    pub(crate) fn stored_scale(&self) -> Result<f32> {
        let Some(stored) = self.scale_of_tensor() else {
            return Ok(1.0);
        };
        if stored.content == Content::Scales {
            let bytes = self.entries(Part::DecodeScale)?.bytes;
            return first_f32(&bytes).context("there is no scale");
        }
        let amax = self.amax()?.context("there is no amax")?;
        Ok(stored.outer(amax, choice(&self.tensor.recipe)))
    }

    pub(crate) fn numbers(&self) -> Result<Numbers> {
        let mut specs = self.tensor.specs.iter();
        let scale = specs.find(|spec| {
            spec.key.serves(Orientation::Rowwise, Part::DecodeScale) && spec.is_scalar()
        });
        let scale = scale.map(|_| self.entries(Part::DecodeScale)).transpose()?;
        Ok(Numbers {
            amax: self.amax()?,
            scale: scale.and_then(|entries| first_f32(&entries.bytes)),
        })
    }

    fn entries(&self, part: Part) -> Result<Entries> {
        let tensor = &self.tensor;
        let mut specs = tensor.specs.iter();
        let spec = specs.find(|spec| spec.key.serves(Orientation::Rowwise, part));
        let spec = spec.with_context(|| format!("'{}' has no {part:?}", shown(&tensor.name)))?;
        match self.source {
            Source::File(model) => {
                let field =
                    holding(&tensor.fields, spec.key, Orientation::Rowwise).with_context(|| {
                        format!("'{}' has no field for {}", shown(&tensor.name), spec.key)
                    })?;
                Ok(Entries {
                    bytes: tensor.read(model, field)?,
                    layout: field.layout,
                })
            }
            Source::Checkpoint(trained, weight) => {
                let layout = ScaleLayout::new(
                    spec,
                    tensor.full,
                    Orientation::Rowwise,
                    lowp_format::Form::Compact,
                )?;
                Ok(Entries {
                    bytes: trained.bytes_of(weight, spec)?,
                    layout: Some(layout),
                })
            }
        }
    }

    /// Hands the codes to `sink`, piece by piece where they lie in a file.
    fn codes(&self, sink: &mut Sink<'_>) -> Result<()> {
        let Source::File(model) = self.source else {
            return sink(&self.entries(Part::Data)?.bytes);
        };
        let tensor = &self.tensor;
        let is_codes = |field: &&Field| match field.content {
            Kind::Buffer { key, orientation } => {
                key.part == Part::Data && orientation == Orientation::Rowwise
            }
            Kind::Amax => false,
        };
        let field = tensor
            .fields
            .iter()
            .find(is_codes)
            .context("there are no codes")?;
        let found = model.expect(&field.name(&tensor.name), field.dtype, &field.shape)?;
        found.pieces(0..found.len(), |_, bytes| sink(bytes))
    }
}

fn no_form(name: &str, recipe: &impl Recipe, to: ExportTarget) -> FileError {
    let kernel = recipe.kernel(Orientation::Rowwise);
    let what = format!(
        "'{}' is {} with {} codes, which {} has no form for",
        shown(name),
        recipe.name(),
        kernel.element,
        to.name()
    );
    let targets = forms::targets(recipe);
    mend(what, Remedy::Target { targets })
}

/// The orientations that can be made of the buffers that serve the rowwise one.
fn restorable(recipe: &impl Recipe, usage: Usage) -> Usage {
    let stored = recipe.stored(Usage::BOTH);
    let rowwise = stored
        .iter()
        .all(|spec| spec.key.usage.contains(Usage::ROWWISE));
    if rowwise {
        usage | Usage::ROWWISE
    } else {
        Usage::ROWWISE
    }
}

/// Most rows of a tensor without elements whose scales are written: a file states any number of them.
const MAX_EMPTY_LINES: usize = 1 << 20;

/// Rejects a weight that `form` has no source for.
fn check(tensor: &Quantized, form: &Form, to: ExportTarget) -> Result<()> {
    let name = shown(&tensor.name);
    if !tensor.usage.contains(Usage::ROWWISE) {
        let what = format!(
            "'{name}' was quantized for {}, and {} stores the rowwise operand",
            tensor.usage,
            to.name()
        );
        let target = ExportTarget::Te.name();
        return Err(mend(what, Remedy::TargetOrBoth { target }));
    }
    let [rows, cols] = form.operand.scales(tensor.full);
    if tensor.full.elements() == 0 && rows.saturating_mul(cols) > MAX_EMPTY_LINES {
        let what = format!(
            "'{name}' is {} and has no elements, and {} keeps a scale of each line; at most {MAX_EMPTY_LINES} are written of \
             such a tensor",
            tensor.full,
            to.name()
        );
        return Err(mend(what, Remedy::LeaveOut));
    }
    // These put nothing in the source of a name, and take any number of axes.
    let targets =
        [ExportTarget::Te, ExportTarget::Fp32, ExportTarget::Bf16].map(ExportTarget::name);
    let targets = targets.to_vec();
    if form.tensors.len() > 1 && base(&tensor.name).is_none() {
        let what = format!(
            "'{name}' does not end in .weight, in whose source {} puts other names",
            to.name()
        );
        return Err(mend(what, Remedy::TargetOrLeaveOut { targets }));
    }
    if form.tensors.len() > 1 && tensor.text.shape.len() != 2 {
        let what = format!(
            "'{name}' has {} axes, and {} stores weights of two",
            tensor.text.shape.len(),
            to.name()
        );
        return Err(mend(what, Remedy::TargetOrLeaveOut { targets }));
    }
    Ok(())
}

/// A weight as the tensors of a form: each is read when it is written.
struct Rewrapped<'a> {
    weight: &'a Weight<'a>,
    form: &'static Form,
}

impl Parts for Rewrapped<'_> {
    fn write(&self, part: usize, sink: &mut Sink<'_>) -> Result<()> {
        let stored = self
            .form
            .tensors
            .get(part)
            .context("there is no such tensor")?;
        match stored.content {
            Content::Codes => self.weight.codes(sink),
            Content::Scales => self.scales(sink),
            Content::EncodeScale | Content::AmaxShare => {
                sink(&self.weight.stored_scale()?.to_le_bytes())
            }
        }
    }
}

impl Rewrapped<'_> {
    /// The scale of every block of the form, by the scale that covers its first element.
    fn scales(&self, sink: &mut Sink<'_>) -> Result<()> {
        let weight = self.weight;
        let block = weight.tensor.recipe.kernel(Orientation::Rowwise).block;
        let part = if block.is_some() {
            Part::BlockScale
        } else {
            Part::DecodeScale
        };
        let Entries { bytes, layout } = weight.entries(part)?;
        let width = layout.map_or(size_of::<f32>(), |layout| layout.code().bits() / 8);
        let operand: &Operand = &self.form.operand;
        let ([rows, cols], tile) = (operand.scales(weight.tensor.full), operand.tile());
        let mut line = Vec::with_capacity(cols * width);
        for row in 0..rows * usize::from(cols > 0) {
            line.clear();
            for col in 0..cols {
                let element = [row.saturating_mul(tile[0]), col.saturating_mul(tile[1])];
                let at = layout.map_or(0, |layout| layout.offset_of(element)) * width;
                line.extend_from_slice(bytes.get(at..at + width).context("a scale lies outside")?);
            }
            sink(&line)?;
        }
        Ok(())
    }
}

/// Whether blocks of `recipe` may aim at 4, which changes what the amax is mapped to.
pub(crate) fn choice(recipe: &impl Recipe) -> FourOverSix {
    match recipe.kernel(Orientation::Rowwise).scale {
        ScaleRule::TwoLevel { four_over_six, .. } => four_over_six,
        _ => FourOverSix::Off,
    }
}
