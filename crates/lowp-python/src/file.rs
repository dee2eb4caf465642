//! [`File`] and [`save`]: files of quantized tensors, which `lowp-file` reads and writes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use lowp_file::codes::{Codes, Quantized, quantized};
use lowp_file::dtypes::dtype_of;
use lowp_file::export::run_as_one;
use lowp_file::{Hub, Model, NewModel, Setup};
use lowp_format::{Shape, has_tensor_scale};
use lowp_kernels::{Cpu, CpuBuffer};
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{MemoryArg, Place};
use crate::recipe::{Recipe, usage};
use crate::tensor::{Named, tensor};

/// An open file, the index of several, or a folder as Hugging Face keeps models.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct File {
    model: Model,
    quantized: BTreeMap<String, Quantized>,
}

/// A tensor of a file: name, dtype, shape, and of a quantized one its recipe and usage.
type Listed = (String, String, Vec<usize>, Option<(Recipe, &'static str)>);

#[pymethods]
impl File {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> Result<Self, Error> {
        py.detach(|| {
            let model = Hub::open(&path)?.model;
            let quantized = quantized(&model)?;
            Ok(Self { model, quantized })
        })
    }

    /// Its tensors, by name. A quantized one is one of them.
    fn tensors(&self) -> Vec<Listed> {
        let parts: BTreeSet<String> = self
            .quantized
            .values()
            .flat_map(Quantized::fields)
            .collect();
        let plain = self.model.tensors().filter(|t| !parts.contains(t.name));
        let plain = plain.map(|t| {
            (
                t.name.to_owned(),
                t.dtype.to_string(),
                t.shape.to_vec(),
                None,
            )
        });
        let quantized = self.quantized.iter().map(|(name, tensor)| {
            let Shape { rows, cols } = tensor.matrix();
            let recipe = Recipe {
                recipe: tensor.recipe(),
            };
            let dtype = tensor
                .dtype()
                .map_or(String::new(), |dtype| dtype.to_string());
            let kept = Some((recipe, tensor.usage().label()));
            (name.clone(), dtype, vec![rows, cols], kept)
        });
        let mut all: Vec<Listed> = plain.chain(quantized).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// Reads the bytes of a plain tensor.
    fn read(&self, py: Python<'_>, name: &str, into: MemoryArg) -> Result<(), Error> {
        let into = Cpu.wrap::<u8>(into.into())?;
        let found = self.model.get(name);
        let found = found.ok_or_else(|| Error::new(format!("no tensor '{name}' in the file")))?;
        py.detach(|| Ok(found.read(&mut into.write()?)?))
    }

    /// Reads the buffers of a quantized tensor. Returns the amax of what it was made of, where the file says one that no buffer has.
    fn read_codes(&self, py: Python<'_>, name: &str, into: Named) -> Result<Option<f32>, Error> {
        let found = self.quantized.get(name);
        let found = found.ok_or_else(|| Error::new(format!("no codes '{name}' in the file")))?;
        let mut places = Vec::new();
        for (buffer, memory) in into {
            places.push((buffer, Cpu.wrap::<u8>(memory.into())?));
        }
        py.detach(|| {
            let codes = self.model.codes(found)?;
            for buffer in codes.tensor.buffers() {
                let key = buffer.spec.key.to_string();
                let place = places.iter().find(|(name, _)| *name == key);
                let (_, place) = place.ok_or_else(|| Error::new(format!("no memory for {key}")))?;
                let from = buffer.storage.read()?;
                let mut place = place.write()?;
                if from.len() != place.len() {
                    return Err(Error::new(format!(
                        "{key} of '{name}' has {} bytes, and there is memory for {}",
                        from.len(),
                        place.len()
                    )));
                }
                place.copy_from_slice(&from);
            }
            Ok(codes.amax)
        })
    }
}

/// A tensor that is written: what `lowp._files` makes of one.
#[derive(FromPyObject)]
pub(crate) struct Saved {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    /// Bytes of a plain tensor.
    memory: MemoryArg,
    /// How it is quantized, or is to be.
    recipe: Option<Py<Recipe>>,
    usage: String,
    /// Of codes.
    buffers: Named,
    amax: Option<f32>,
}

/// Writes a file that is there when it is complete. Codes stay as they are; other tensors that have a recipe are quantized as the command does.
#[pyfunction]
pub(crate) fn save(py: Python<'_>, path: PathBuf, tensors: Vec<Saved>) -> Result<(), Error> {
    let mut buffers = Vec::new();
    for saved in &tensors {
        let (pointer, bytes, device, _) = saved.memory;
        buffers.push(Cpu.wrap::<u8>((pointer, bytes, device, None).into())?);
    }
    let memory: Vec<_> = buffers
        .iter()
        .map(CpuBuffer::read)
        .collect::<Result<_, _>>()?;
    let mut new = NewModel::default();
    let mut one_scale = Vec::new();
    for (saved, bytes) in tensors.into_iter().zip(&memory) {
        let Saved { name, shape, .. } = saved;
        let dtype = dtype_of(&saved.dtype)?;
        let Some(recipe) = saved.recipe.map(|recipe| recipe.get().recipe) else {
            new.keep_bytes(&name, &shape, dtype, bytes)?;
            continue;
        };
        if saved.buffers.is_empty() {
            let added = new.quantize_bytes(&name, &shape, dtype, bytes, Setup::new(recipe));
            added.map_err(|e| Error::new(format!("{e}; or keep its values: ignore=['{name}']")))?;
            if has_tensor_scale(&recipe) {
                one_scale.push(name);
            }
            continue;
        }
        let shape = Shape::from_dims(&shape)?;
        let codes = Codes {
            tensor: tensor(&Cpu, recipe, shape, saved.buffers)?,
            usage: usage(&saved.usage)?,
            dtype,
            amax: saved.amax,
        };
        new.codes(&name, codes)?;
    }
    one_scale.sort();
    let names: Vec<&str> = one_scale.iter().map(String::as_str).collect();
    let groups = run_as_one(&names).into_iter();
    new.share_amax(groups.map(|group| group.iter().map(|n| one_scale[*n].clone()).collect()));
    py.detach(|| Ok(new.write(&path).map(|_| ())?))
}
