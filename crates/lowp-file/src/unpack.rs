//! A quantized tensor from its fields in a file.

use crate::cast::Tensor;
use crate::error::{Context, FileError, Result, file_error, mend_file};
use crate::fields::{holding, worked};
use crate::meta::{self, Quantized};
use crate::model::Model;
use crate::remedy::Remedy;
use crate::source::{each_value, own};
use crate::text::shown;
use lowp_format::{
    AnyRecipe, BufferList, BufferSpec, Form, Orientation, Origin, Part, QuantizedTensor, Recipe,
    ScaleLayout, Shape, Usage,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer, DecodeJob, RepackJob, Source, TransposeJob, Work};

impl Model {
    /// The values of a tensor, in the order of its elements: those of a quantized one decoded as its metadata say, rowwise where that is
    /// there. A rank file has some rows of a quantized tensor, whose values are returned.
    ///
    /// A file that another process makes shorter meanwhile may end this one by SIGBUS, as of every file that is mapped, unless
    /// [`Hooks::before_map`](crate::process::Hooks::before_map) installs a handler.
    ///
    /// # Errors
    /// There is no such tensor, it holds no floats, or the file cannot be read or was changed since it was opened.
    pub fn decode(&self, name: &str) -> Result<Vec<f32>> {
        self.steady(self.try_decode(name))
    }

    fn try_decode(&self, name: &str) -> Result<Vec<f32>> {
        if let Some(tensor) = meta::find(self, name)? {
            let orientation = orientation(self, &tensor, None)?;
            let codes = unpack(&Cpu, self, &tensor, Some(orientation))?;
            let values = decode(&Cpu, &codes, orientation)?;
            return Ok(Cpu.download(&values)?);
        }
        let Some(tensor) = self.get(name) else {
            let why = format!(
                "it has no tensor '{}'; `Model::tensors` has their names",
                shown(name)
            );
            return Err(FileError::in_file(self.path(), why));
        };
        let mut all = Vec::new();
        each_value(&tensor, 0..tensor.shape.iter().product(), |_, values| {
            all.extend_from_slice(values);
            Ok(())
        })?;
        Ok(all)
    }
}

/// The orientations that `tensor` can be decoded for.
pub(crate) fn served(tensor: &Quantized) -> Usage {
    tensor
        .specs
        .iter()
        .filter(|spec| spec.key.part == Part::Data)
        .fold(Usage::empty(), |usage, spec| usage | spec.key.usage)
}

/// Reads what serves `orientation`, or every buffer if it is `None`.
pub(crate) fn unpack<B: Backend>(
    backend: &B,
    model: &Model,
    tensor: &Quantized,
    orientation: Option<Orientation>,
) -> Result<Tensor<B>> {
    let serves =
        |spec: &&BufferSpec| orientation.is_none_or(|o| spec.key.usage.contains(o.usage()));
    let specs: BufferList = tensor.specs.iter().filter(serves).copied().collect();
    let shape = worked(tensor.shape, tensor.full, &specs);
    QuantizedTensor::with_buffers(tensor.recipe, shape, specs, |spec, _| {
        read(backend, model, tensor, spec, orientation)
    })
}

pub(crate) fn decode<B: Backend>(
    backend: &B,
    tensor: &Tensor<B>,
    orientation: Orientation,
) -> Result<B::Buffer<f32>> {
    let out = backend.alloc::<f32>(tensor.shape().elements())?;
    decode_into(backend, tensor, orientation, &out)?;
    Ok(out)
}

/// The buffers `specs` of a matrix of `shape`: those that are no transposes of others are read.
pub(crate) fn with_transposes(
    recipe: AnyRecipe,
    shape: Shape,
    specs: &[BufferSpec],
    read: impl Fn(&BufferSpec) -> Result<CpuBuffer<u8>>,
) -> Result<Tensor> {
    let all = recipe.buffers(Usage::BOTH);
    QuantizedTensor::with_buffers(recipe, shape, specs.iter().copied(), |spec, bytes| {
        let Origin::TransposeOf(key) = spec.origin else {
            return read(spec);
        };
        let from = all.iter().find(|spec| spec.key == key);
        let from = read(from.context("there is nothing to transpose")?)?;
        let to = Cpu.alloc::<u8>(bytes)?;
        let [inner, outer] = spec.entries(shape);
        if inner * outer > 0 {
            Cpu.once(Work::Transpose(vec![TransposeJob {
                code: spec.code,
                entries: [outer, inner],
                from,
                to: to.clone(),
            }]))?;
        }
        Ok(to)
    })
}

/// Writes the values of `tensor` as `orientation` serves them to `out`.
pub(crate) fn decode_into<B: Backend>(
    backend: &B,
    tensor: &Tensor<B>,
    orientation: Orientation,
    out: &B::Buffer<f32>,
) -> Result<()> {
    let job = DecodeJob::new(tensor, orientation, Source::F32(out.clone()))?;
    Ok(backend.once(Work::Decode(vec![job]))?)
}

/// One buffer in its Compact form.
fn read<B: Backend>(
    backend: &B,
    model: &Model,
    tensor: &Quantized,
    spec: &BufferSpec,
    orientation: Option<Orientation>,
) -> Result<B::Buffer<u8>> {
    let orientation = orientation
        .or_else(|| (spec.key.usage & tensor.usage).orientations().next())
        .unwrap_or(Orientation::Rowwise);
    let field = holding(&tensor.fields, spec.key, orientation)
        .with_context(|| format!("'{}' has no field for {}", shown(&tensor.name), spec.key))?;
    let found = model.expect(&field.name(&tensor.name), field.dtype, &field.shape)?;
    let bytes = match found.values().and_then(own::<u8, B>) {
        Some(mapped) => mapped,
        None => {
            let bytes = backend.alloc::<u8>(found.len())?;
            found.pieces(0..found.len(), |start, piece| {
                Ok(backend.write(&bytes, start, piece)?)
            })?;
            bytes
        }
    };
    let Some(from_layout) = field.layout.filter(|layout| layout.form() != Form::Compact) else {
        return Ok(bytes);
    };
    if found.len() == 0 {
        return Ok(bytes);
    }
    let to_layout = ScaleLayout::new(spec, tensor.shape, orientation, Form::Compact)?;
    let to = backend.alloc::<u8>(to_layout.bytes())?;
    backend.once(Work::Repack(vec![RepackJob {
        from_layout,
        to_layout,
        from: bytes,
        to: to.clone(),
    }]))?;
    Ok(to)
}

/// The orientation to decode: the one that is requested, or the first there is.
pub(crate) fn orientation(
    model: &Model,
    tensor: &Quantized,
    requested: Option<Orientation>,
) -> Result<Orientation> {
    // A buffer for both orientations may have been asked for and written for one of them only.
    let there = |o: &Orientation| {
        let serving = tensor
            .specs
            .iter()
            .filter(|spec| spec.key.usage.contains(o.usage()));
        served(tensor).contains(o.usage())
            && serving
                .into_iter()
                .all(|spec| holding(&tensor.fields, spec.key, *o).is_some())
    };
    match requested {
        Some(requested) if !there(&requested) => {
            let name = shown(&tensor.name);
            let usage = served(tensor) & tensor.usage;
            Err(mend_file(
                model.path(),
                format!("'{name}' was quantized for {usage} and cannot be decoded {requested}"),
                Remedy::QuantizeForBoth,
            ))
        }
        Some(requested) => Ok(requested),
        None => Orientation::ALL.into_iter().find(there).ok_or_else(|| {
            file_error!(
                model.path(),
                "'{}' has no usage {}",
                shown(&tensor.name),
                Usage::BOTH
            )
        }),
    }
}
