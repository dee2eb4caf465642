//! [`NewModel`]: a safetensors file of tensors in memory, quantized or not.

use crate::cast::{cast, empty, observe};
use crate::codes::{Codes, amax_of, check_dtype};
use crate::error::{Context, FileError, Result, input_error, of_tensor};
use crate::fields::{self, Field, worked};
use crate::keys;
use crate::out::Out;
use crate::outputs::{Group, Outputs};
use crate::pack::Packed;
use crate::quantize::text;
use crate::round;
use crate::select::Setup;
use crate::text::shown;
use crate::write::{Item, Parts, Sink};
use half::{bf16, f16};
use lowp_comm::LocalComm;
use lowp_format::{QuantizedTensor, Recipe};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Tensors that become a file: values, bytes, and codes.
#[derive(Debug, Default)]
pub struct NewModel<'a> {
    tensors: Vec<Tensor<'a>>,
    /// The names of tensors that have one amax, sorted.
    groups: Vec<Vec<String>>,
}

#[derive(Debug)]
struct Tensor<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    data: Data<'a>,
    /// How it is quantized, and what it becomes; `None` keeps the bytes.
    quantized: Option<(Setup, Vec<Field>)>,
}

#[derive(Debug)]
enum Data<'a> {
    Values(&'a [f32]),
    /// Bytes of its dtype.
    Bytes(&'a [u8]),
    Codes(Arc<QuantizedTensor<CpuBuffer<u8>>>, Option<f32>),
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
        self.add(name, Dtype::F32, shape, Data::Values(values), Some(setup))
    }

    /// [`NewModel::quantize`] of values as the `bytes` of their dtype: F32, BF16 or F16.
    ///
    /// # Errors
    /// The same, and another dtype.
    pub fn quantize_bytes(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: Dtype,
        bytes: &'a [u8],
        setup: Setup,
    ) -> Result<&mut Self> {
        check_dtype(name, dtype)?;
        self.add(name, dtype, shape, Data::Bytes(bytes), Some(setup))
    }

    /// Adds a tensor that is quantized already, scales as TransformerEngine keeps them. An amax that is not known becomes one that has the
    /// same scale.
    ///
    /// # Errors
    /// A dtype that is not quantized.
    pub fn codes(&mut self, name: &str, codes: Codes) -> Result<&mut Self> {
        check_dtype(name, codes.dtype)?;
        let shape = codes.tensor.shape();
        let setup = Setup {
            usage: codes.usage,
            ..Setup::new(codes.tensor.recipe())
        };
        let amax = amax_of(&codes)?;
        let data = Data::Codes(Arc::new(codes.tensor), amax);
        let shape = [shape.rows, shape.cols];
        self.add(name, codes.dtype, &shape, data, Some(setup))
    }

    /// Adds a tensor that keeps its values.
    ///
    /// # Errors
    /// A shape with another number of elements.
    pub fn keep(&mut self, name: &str, shape: &[usize], values: &'a [f32]) -> Result<&mut Self> {
        self.add(name, Dtype::F32, shape, Data::Values(values), None)
    }

    /// Adds a tensor that keeps the `bytes` of its dtype.
    ///
    /// # Errors
    /// A shape with another number of bytes.
    pub fn keep_bytes(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: Dtype,
        bytes: &'a [u8],
    ) -> Result<&mut Self> {
        self.add(name, dtype, shape, Data::Bytes(bytes), None)
    }

    /// Gives the tensors of each group one amax, that of them all. They are named, and quantized by this model from values, by one recipe
    /// whose scale follows from the amax of a tensor.
    pub fn share_amax(&mut self, groups: impl IntoIterator<Item = Vec<String>>) -> &mut Self {
        self.groups.extend(groups.into_iter().map(|mut group| {
            group.sort();
            group
        }));
        self
    }

    fn add(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        data: Data<'a>,
        setup: Option<Setup>,
    ) -> Result<&mut Self> {
        let elements = shape
            .iter()
            .try_fold(1usize, |all, dim| all.checked_mul(*dim));
        let (found, expected, what) = match &data {
            Data::Values(values) => (values.len(), elements, "values"),
            Data::Bytes(bytes) => {
                let bits = elements.and_then(|all| all.checked_mul(dtype.bitsize()));
                (bytes.len(), bits.map(|bits| bits.div_ceil(8)), "bytes")
            }
            Data::Codes(..) => (0, Some(0), "codes"),
        };
        if expected != Some(found) {
            return Err(input_error(format!(
                "'{}': {found} {what} for a tensor of shape {shape:?}; give as many as it has elements",
                shown(name),
            )));
        }
        let quantized = setup.map(|setup| {
            setup.check()?;
            Ok((setup, fields_of(&setup, shape)?))
        });
        let quantized = quantized.transpose();
        let quantized = quantized.map_err(|why: FileError| of_tensor(name, why))?;
        self.tensors.push(Tensor {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
            data,
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
                None => Group::of(Item::made(
                    job,
                    0,
                    tensor.name.clone(),
                    tensor.dtype,
                    tensor.shape.clone(),
                )),
                Some((setup, fields)) => {
                    let mut text = text(setup, tensor.dtype, &tensor.shape, setup.usage);
                    text.amax_group = self.group_of(&tensor.name).cloned();
                    Group::quantized(job, &tensor.name, fields, &text)?
                }
            });
        }
        let version = (keys::FORMAT_KEY.to_owned(), keys::FORMAT.to_owned());
        let outputs = Outputs {
            groups,
            metadata: BTreeMap::from([version]),
            make: Box::new(|job| self.parts(self.tensors.get(job).context("no such tensor")?)),
            sources: Vec::new(),
        };
        Out::file(path, [])?.write([], &outputs, &(), |_| Ok(0))
    }

    /// The names that a tensor has one amax with.
    fn group_of(&self, name: &str) -> Option<&Vec<String>> {
        let mut groups = self.groups.iter();
        groups.find(|group| group.iter().any(|member| member == name))
    }

    fn parts<'s>(&'s self, tensor: &'s Tensor<'a>) -> Result<Box<dyn Parts + 's>> {
        let Some((setup, fields)) = &tensor.quantized else {
            return Ok(Box::new(Kept(&tensor.data)));
        };
        if let Data::Codes(codes, amax) = &tensor.data {
            let codes = Arc::clone(codes);
            return Ok(Packed::parts(&Cpu, codes, *amax, fields.clone()));
        }
        let specs = setup.recipe.buffers(setup.usage);
        let shape = fields::matrix(&tensor.shape)?;
        let codes = empty(&Cpu, setup.recipe, worked(shape, shape, &specs), &specs)?;
        let (scale, shared) = (setup.delayed_scale, self.shared_amax(setup, &tensor.name)?);
        let (solo, source) = (LocalComm::solo(&Cpu), tensor.source()?);
        let amax = cast(&Cpu, &solo, &codes, source, scale, shared)?;
        Ok(Packed::parts(&Cpu, codes, amax, fields.clone()))
    }

    fn shared_amax(&self, setup: &Setup, name: &str) -> Result<Option<f32>> {
        let Some(group) = self.group_of(name) else {
            return Ok(None);
        };
        let amax = Cpu.alloc::<f32>(1)?;
        let is_member = |tensor: &&Tensor<'_>| group.contains(&tensor.name);
        for member in self.tensors.iter().filter(is_member) {
            observe(&Cpu, &setup.recipe, member.source()?, &amax)?;
        }
        Ok(Some(Cpu.download::<f32>(&amax)?[0]))
    }
}

fn fields_of(setup: &Setup, shape: &[usize]) -> Result<Vec<Field>> {
    let matrix = fields::matrix(shape)?;
    setup.recipe.check(matrix)?;
    Ok(fields::called(&setup.fields(matrix)?, setup.dtypes))
}

impl Tensor<'_> {
    fn source(&self) -> Result<Source<Cpu>> {
        let bytes = match &self.data {
            Data::Values(values) => return Ok(Source::F32(Cpu.upload(values)?)),
            Data::Bytes(bytes) => *bytes,
            Data::Codes(..) => return Err(input_error("codes have no values to quantize")),
        };
        let (pairs, _) = bytes.as_chunks::<2>();
        Ok(match self.dtype {
            Dtype::BF16 => {
                let values: Vec<bf16> = pairs.iter().copied().map(bf16::from_le_bytes).collect();
                Source::Bf16(Cpu.upload(&values)?)
            }
            Dtype::F16 => {
                let values = pairs.iter().map(|pair| f16::from_le_bytes(*pair).to_f32());
                Source::F32(Cpu.upload(&values.collect::<Vec<f32>>())?)
            }
            _ => {
                let (values, _) = bytes.as_chunks::<4>();
                let values = values.iter().map(|value| f32::from_le_bytes(*value));
                Source::F32(Cpu.upload(&values.collect::<Vec<f32>>())?)
            }
        })
    }
}

struct Kept<'a>(&'a Data<'a>);

impl Parts for Kept<'_> {
    fn write(&self, _: usize, sink: &mut Sink<'_>) -> Result<()> {
        match self.0 {
            Data::Bytes(bytes) => sink(bytes),
            Data::Codes(..) => Ok(()),
            Data::Values(values) => {
                let mut bytes = Vec::new();
                for values in values.chunks(1 << 18) {
                    bytes.clear();
                    round::append(crate::dtypes::OutputDtype::F32, values, &mut bytes);
                    sink(&bytes)?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interchange::hub::Hub;
    use crate::meta;
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
            let model = crate::Model::open(&made)?;
            let decoded = model.decode("w")?;
            let error = decoded.iter().zip(&values).map(|(a, b)| (a - b).abs());
            assert!(error.fold(0.0, f32::max) < 512.0, "{recipe:?}");
        }
        assert_eq!(crate::Model::open(&plain)?.decode("w")?, values);
        assert!(NewModel::default().keep("w", &[3], &values).is_err());
        Ok(())
    }

    /// Codes of a file become the same file again, and an amax that is not known one of the same scale.
    #[test]
    fn codes_become_the_file_that_they_are_of() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let [from, made] = ["from", "made"].map(|n| folder.path().join(format!("{n}.safetensors")));
        let values: Vec<f32> = (0..64 * 96)
            .map(|i| (i * 7919 % 4099) as f32 - 2000.0)
            .collect();
        let bits: Vec<u8> = values
            .iter()
            .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
            .collect();
        for recipe in AnyRecipe::low_precision() {
            let setup = Setup::new(recipe);
            let mut new = NewModel::default();
            let names = ["a.q_proj", "a.k_proj"];
            new.quantize_bytes(names[0], &[64, 96], Dtype::BF16, &bits, setup)?;
            new.quantize_bytes(
                names[1],
                &[32, 96],
                Dtype::BF16,
                &bits[..2 * 32 * 96],
                setup,
            )?;
            new.keep_bytes("ids", &[4], Dtype::I32, &bits[..16])?;
            new.write(&from)?;
            let model = crate::Model::open(&from)?;
            for forget in [false, true] {
                let mut again = NewModel::default();
                let mut ids = [0; 16];
                model.get("ids").context("it is there")?.read(&mut ids)?;
                again.keep_bytes("ids", &[4], Dtype::I32, &ids)?;
                for (name, tensor) in &meta::quantized(&model)? {
                    let mut codes = model.codes(tensor)?;
                    codes.amax = codes.amax.filter(|_| !forget);
                    again.codes(name, codes)?;
                }
                again.write(&made)?;
                let same = fs::read(&made)? == fs::read(&from)?;
                assert!(same || forget && fields::keeps_amax(&recipe), "{recipe:?}");
            }
        }
        let mut new = NewModel::default();
        let error = new
            .keep_bytes("w", &[3], Dtype::F32, &bits[..8])
            .unwrap_err();
        assert!(error.to_string().contains("8 bytes"), "{error}");
        let setup = Setup::new(AnyRecipe::low_precision()[0]);
        let error = new.quantize_bytes("w", &[4, 4], Dtype::F64, &bits[..128], setup);
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("only F32, BF16 and F16")
        );
        Ok(())
    }
}
