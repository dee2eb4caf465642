//! [`NewModel`]: a safetensors file of tensors in memory, quantized or not.

use crate::cast::{cast, empty};
use crate::error::{Context, Result, input_error};
use crate::fields::{self, Field, worked};
use crate::interchange::shards::{Group, Weights};
use crate::meta;
use crate::out::Out;
use crate::pack::Packed;
use crate::quantize::{made_items, text};
use crate::round;
use crate::select::Setup;
use crate::text::shown;
use crate::write::{Item, ItemSource, Parts, Sink};
use lowp_comm::LocalComm;
use lowp_format::{FormatError, Recipe, Shape};
use lowp_kernels::{Backend, Cpu, Source};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Tensors of f32 values that become a file.
#[derive(Debug, Default)]
pub struct NewModel<'a> {
    tensors: Vec<Tensor<'a>>,
}

#[derive(Debug)]
struct Tensor<'a> {
    name: String,
    shape: Vec<usize>,
    values: &'a [f32],
    /// How it is quantized, the matrix, and what it becomes; `None` keeps the values.
    quantized: Option<(Setup, Shape, Vec<Field>)>,
}

impl<'a> NewModel<'a> {
    /// Adds a tensor that is quantized as `setup` says; leading dimensions of `shape` flatten to rows.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, or that has another number of elements; a setup that no cast has.
    pub fn quantize(
        &mut self,
        name: &str,
        shape: &[usize],
        values: &'a [f32],
        setup: Setup,
    ) -> Result<&mut Self> {
        setup.check()?;
        let fitted = fit(shape, &setup);
        let (matrix, fields) =
            fitted.map_err(|why| input_error(format!("'{}': {why}", shown(name))))?;
        self.add(name, shape, values, Some((setup, matrix, fields)))
    }

    /// Adds a tensor that keeps its values.
    ///
    /// # Errors
    /// A shape with another number of elements.
    pub fn keep(&mut self, name: &str, shape: &[usize], values: &'a [f32]) -> Result<&mut Self> {
        self.add(name, shape, values, None)
    }

    fn add(
        &mut self,
        name: &str,
        shape: &[usize],
        values: &'a [f32],
        quantized: Option<(Setup, Shape, Vec<Field>)>,
    ) -> Result<&mut Self> {
        let elements = shape
            .iter()
            .try_fold(1usize, |all, dim| all.checked_mul(*dim));
        if elements != Some(values.len()) {
            return Err(input_error(format!(
                "'{}': {} values for a tensor of shape {shape:?}; give as many as it has elements",
                shown(name),
                values.len()
            )));
        }
        self.tensors.push(Tensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            values,
            quantized,
        });
        Ok(self)
    }

    /// Writes the file `path`, which appears there when it is complete. Returns its bytes.
    ///
    /// # Errors
    /// Two tensors would have one name, or the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<u64> {
        let mut groups = Vec::new();
        for (job, tensor) in self.tensors.iter().enumerate() {
            groups.push(match &tensor.quantized {
                None => Group::of(Item {
                    name: tensor.name.clone(),
                    dtype: Dtype::F32,
                    shape: tensor.shape.clone(),
                    bytes: size_of_val(tensor.values),
                    source: ItemSource::Made { job, part: 0 },
                }),
                Some((setup, _, fields)) => {
                    let text = text(setup, (Dtype::F32, &tensor.shape[..]), setup.usage);
                    let said = (meta::key(&tensor.name), serde_json::to_string(&text)?);
                    Group {
                        items: made_items(job, &tensor.name, fields),
                        metadata: BTreeMap::from([said]),
                    }
                }
            });
        }
        let version = (meta::FORMAT_KEY.to_owned(), meta::FORMAT.to_owned());
        let weights = Weights {
            groups,
            metadata: BTreeMap::from([version]),
            make: Box::new(|job| self.tensors.get(job).context("no such tensor")?.parts()),
            sources: Vec::new(),
        };
        weights.check()?;
        Out::file(path, [])?.write([], &weights, &(), |_| Ok(0))
    }
}

/// The matrix of a tensor of `shape`, and what it becomes.
fn fit(shape: &[usize], setup: &Setup) -> Result<(Shape, Vec<Field>), FormatError> {
    let matrix = fields::matrix(shape)?;
    setup.recipe.check(matrix)?;
    let specs = setup.recipe.buffers(setup.usage);
    let fields = fields::fields(&setup.recipe, &specs, matrix, setup.usage, setup.form)?;
    Ok((matrix, fields::called(&fields, setup.dtypes)))
}

impl Tensor<'_> {
    fn parts(&self) -> Result<Box<dyn Parts + '_>> {
        let Some((setup, shape, fields)) = &self.quantized else {
            return Ok(Box::new(Values(self.values)));
        };
        let specs = setup.recipe.buffers(setup.usage);
        let codes = empty(&Cpu, setup.recipe, worked([*shape; 2], &specs), &specs)?;
        let source = Source::F32(Cpu.upload(self.values)?);
        let scale = (setup.delayed_scale, None);
        let amax = cast(&Cpu, &LocalComm::solo(&Cpu), &codes, source, scale)?;
        Ok(Box::new(Packed {
            backend: Cpu,
            tensor: Arc::new(codes),
            amax,
            fields: fields.clone(),
        }))
    }
}

/// Values as they are.
struct Values<'a>(&'a [f32]);

impl Parts for Values<'_> {
    fn write(&self, _: usize, sink: &mut Sink<'_>) -> Result<()> {
        let mut bytes = Vec::new();
        for values in self.0.chunks(1 << 18) {
            bytes.clear();
            round::append(crate::names::FloatName::F32, values, &mut bytes);
            sink(&bytes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interchange::hub::Hub;
    use crate::quantize::quantize;
    use crate::select::Choices;
    use lowp_format::AnyRecipe;
    use std::fs;

    /// A tensor in memory becomes the bytes that the same tensor of a file becomes, and both decode to the same values.
    #[test]
    fn tensors_in_memory_become_what_those_of_files_do() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let [plain, made, expected] = ["plain", "made", "expected"]
            .map(|name| folder.path().join(format!("{name}.safetensors")));
        let value = |i: usize| (i.wrapping_mul(0x9e37_79b9) % 4099) as f32 - 2000.0;
        let values: Vec<f32> = (0..64 * 96).map(value).collect();
        let shape = [2, 32, 96];
        NewModel::default()
            .keep("w", &shape, &values)?
            .write(&plain)?;
        for recipe in AnyRecipe::low_precision() {
            let setup = Setup::new(recipe);
            let hub = Hub::open(&plain)?;
            let choices = Choices::new(&hub.model, &setup, |_| true)?;
            quantize(&Cpu, &hub, &choices, None, Out::file(&expected, [])?, &())?;
            let mut new = NewModel::default();
            new.quantize("w", &shape, &values, setup)?.write(&made)?;
            assert!(fs::read(&made)? == fs::read(&expected)?, "{recipe:?}");
            let decoded = crate::Model::open(&made)?.decode("w")?;
            let error = decoded.iter().zip(&values).map(|(a, b)| (a - b).abs());
            assert!(error.fold(0.0, f32::max) < 512.0, "{recipe:?}");
        }
        assert_eq!(crate::Model::open(&plain)?.decode("w")?, values);
        assert!(NewModel::default().keep("w", &[3], &values).is_err());
        Ok(())
    }
}
