//! [`TrainedCheckpoint`]: the weights of a checkpoint of `lowp train --save`.

use crate::decoding::Decoder;
use crate::dtypes::OutputDtype;
use crate::error::{Context, Result, file_error, input_error, mend_file};
use crate::fields::keeps_amax;
use crate::interchange::amax::nearest;
use crate::interchange::hub::{CARRIED, OtherFiles};
use crate::json::JsonObject;
use crate::meta::{Quantized, Text};
use crate::remedy::Remedy;
use crate::round::first_f32;
use crate::text::{message, shown};
use crate::unpack::with_transposes;
use crate::write::{Item, Parts, Sink};
use lowp_checkpoint::{
    Block, Checkpoint, Dtype as Kind, TensorInfo, is_weight_record, weight_record,
};
use lowp_format::{
    AnyRecipe, BufferSpec, Form, Orientation, Part, QuantizedTensor, Recipe, RecipeOptions, Shape,
    Usage,
};
use lowp_format::{has_tensor_scale, is_in_bf16, magnitude};
use lowp_kernels::{Backend, Cpu, CpuBuffer};
use safetensors::Dtype;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What follows the name of a parameter in that of its f32 values.
const MASTER: &str = ".master";

/// Values that are read at a time.
const CHUNK: usize = 1 << 18;

#[derive(Debug)]
pub(crate) struct TrainedWeight {
    saved: String,
    /// The weight under its name in files, which ends in `.weight`.
    pub(crate) tensor: Quantized,
}

#[derive(Debug)]
struct Master {
    /// The tensor of the checkpoint.
    saved: String,
    /// Its rows and columns, or one row of values.
    full: [usize; 2],
    name: String,
    dims: Vec<usize>,
    /// Whether it is the master of a quantized weight.
    of_weight: bool,
}

/// A checkpoint.
#[derive(Debug)]
pub struct TrainedCheckpoint {
    checkpoint: Checkpoint,
    pub(crate) weights: Vec<TrainedWeight>,
    numbers: BTreeMap<String, usize>,
    masters: Vec<Master>,
    other_files: OtherFiles,
}

impl TrainedCheckpoint {
    /// The latest checkpoint of `folder`, which may be one itself; for `values` of weights alone, whatever their codes are.
    ///
    /// # Errors
    /// There is none, it is damaged, it was saved by another program, or codes are asked for that no recipe makes.
    pub fn open(folder: &Path, values: bool) -> Result<Self> {
        let checkpoint = Checkpoint::latest(folder).and_then(|checkpoint| {
            checkpoint.check_files()?;
            Ok(checkpoint)
        });
        let checkpoint = checkpoint.map_err(|e| input_error(e.to_string()))?;
        let path = checkpoint.folder().to_owned();
        let about = checkpoint.about();
        let said = about["weights"].as_object().ok_or_else(|| {
            mend_file(
                &path,
                "it does not say what its weights are",
                Remedy::GiveTrained,
            )
        })?;
        let mut weights = Vec::new();
        for (saved, about) in said.iter().filter(|(_, about)| is_weight_record(about)) {
            let tensor = weight(saved, about).map_err(|why| {
                let (name, why) = (shown(saved), message(&why));
                file_error!(
                    &path,
                    "what it says of '{name}' makes no sense: {why}; use the lowp that saved it"
                )
            })?;
            match tensor {
                Some(tensor) => weights.push(TrainedWeight {
                    saved: saved.clone(),
                    tensor,
                }),
                // Its values are there all the same.
                None if values && checkpoint.has(&format!("{saved}{MASTER}")) => {}
                None => {
                    return Err(mend_file(
                        &path,
                        format!(
                            "the codes of '{}' are of no recipe as it stands: of a modified one, of a precision tail, or of another lowp",
                            shown(saved)
                        ),
                        Remedy::ExportValues,
                    ));
                }
            }
        }
        group(&mut weights, &about["config"]["amax_groups"]);
        let by_saved = numbers(&weights, |weight| &weight.saved);
        let master = |tensor: TensorInfo<'_>| {
            let saved = tensor.name.strip_suffix(MASTER)?;
            let weight = by_saved.get(saved).map(|&number| &weights[number].tensor);
            let about = said.get(saved);
            let is_weight = about.is_some_and(is_weight_record);
            let Some(dims) = dims_of(&tensor, about, is_weight) else {
                let (name, [rows, cols]) = (shown(tensor.name), tensor.shape);
                return Some(Err(file_error!(
                    &path,
                    "'{name}' is {:?} {rows}x{cols}, which are not the values of such a parameter; use the lowp that saved it",
                    tensor.dtype
                )));
            };
            Some(Ok(Master {
                saved: tensor.name.to_owned(),
                full: tensor.shape,
                name: match weight {
                    Some(weight) => weight.name.clone(),
                    None if is_weight => file_name(saved),
                    None => saved.to_owned(),
                },
                dims,
                of_weight: weight.is_some(),
            }))
        };
        let masters = checkpoint.tensors().filter_map(master);
        let masters = masters.collect::<Result<_>>()?;
        let numbers = numbers(&weights, |weight| &weight.tensor.name);
        let carried = path.parent().map(|run| run.join(CARRIED));
        let other_files = match carried.filter(|carried| carried.is_dir()) {
            Some(carried) => OtherFiles::next_to(&carried)?,
            None => OtherFiles::default(),
        };
        Ok(Self {
            checkpoint,
            weights,
            numbers,
            masters,
            other_files,
        })
    }

    /// What exports carry along.
    pub(crate) fn other_files(&self) -> &OtherFiles {
        &self.other_files
    }

    /// The model as transformers configures it, where they have it.
    pub(crate) fn config(&self) -> Option<JsonObject> {
        self.checkpoint.about()["transformers"]
            .as_object()
            .map(JsonObject::from)
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        let bytes = |tensor: TensorInfo<'_>| {
            let [rows, cols] = tensor.shape;
            (rows * cols * tensor.dtype.bytes()) as u64
        };
        self.checkpoint.tensors().map(bytes).sum()
    }

    /// The parameters that are written in f32, or as `float`: those that were never quantized, and `all` where the weights are
    /// decoded, too. Their jobs follow those of the weights.
    pub(crate) fn plain_items(
        &self,
        all: bool,
        float: Option<OutputDtype>,
    ) -> Result<Vec<Item<'static>>> {
        let said = self.checkpoint.about()["weights"].as_object();
        let needed = said.into_iter().flatten();
        let needed = needed.filter(|(_, about)| all || !is_weight_record(about));
        for name in needed.map(|(saved, _)| format!("{saved}{MASTER}")) {
            if !self.checkpoint.has(&name) {
                return Err(file_error!(
                    self.checkpoint.folder(),
                    "it has no '{}', the values of a parameter; give a whole checkpoint",
                    shown(&name)
                ));
            }
        }
        let dtype = float.map_or(Dtype::F32, Dtype::from);
        let items = self
            .masters
            .iter()
            .enumerate()
            .filter(|(_, master)| all || !master.of_weight);
        let item = |(number, master): (usize, &Master)| {
            let job = self.weights.len() + number;
            Item::made(job, 0, master.name.clone(), dtype, master.dims.clone())
        };
        Ok(items.map(item).collect())
    }

    pub(crate) fn parts<'p>(
        &'p self,
        job: usize,
        decoder: &'p Decoder<Cpu>,
    ) -> Result<Box<dyn Parts + 'p>> {
        let number = job.checked_sub(self.weights.len());
        let master = number.and_then(|number| self.masters.get(number));
        Ok(Box::new(Values {
            trained: self,
            master: master.context("there is no such parameter")?,
            decoder,
        }))
    }

    pub(crate) fn bytes_of(&self, weight: &TrainedWeight, spec: &BufferSpec) -> Result<Vec<u8>> {
        let full = weight.tensor.full;
        let shape = [spec.entries(full)[0], spec.row_bytes(full)];
        let name = format!("{}.{}", weight.saved, spec.key);
        let read = self
            .checkpoint
            .read(&name, Kind::U8, shape, Block::whole(shape));
        let mut bytes = read.map_err(|e| input_error(e.to_string()))?;
        if spec.key.part == Part::Amax {
            // One that was consumed has its sign set.
            bytes
                .iter_mut()
                .skip(3)
                .step_by(4)
                .for_each(|byte| *byte &= 0x7F);
        }
        Ok(bytes)
    }

    pub(crate) fn tensor(
        &self,
        weight: &TrainedWeight,
        specs: &[BufferSpec],
    ) -> Result<QuantizedTensor<CpuBuffer<u8>>> {
        let Quantized { recipe, full, .. } = weight.tensor;
        with_transposes(recipe, full, specs, |spec| {
            Ok(Cpu.upload(&self.bytes_of(weight, spec)?)?)
        })
    }

    /// The weight that was trained as the parameter `master`, where it was trained in bf16.
    fn in_bf16(&self, master: &Master) -> Option<&TrainedWeight> {
        let number = self.numbers.get(&master.name).filter(|_| master.of_weight);
        let weight = &self.weights[*number?];
        is_in_bf16(&weight.tensor.recipe).then_some(weight)
    }

    /// The amax of a weight, where files keep one: the one that its scales were made of, or that of its values.
    pub(crate) fn amax(&self, weight: &TrainedWeight) -> Result<Option<f32>> {
        let Quantized { recipe, specs, .. } = &weight.tensor;
        let kept = specs
            .iter()
            .find(|spec| spec.key.serves(Orientation::Rowwise, Part::Amax) && spec.is_scalar());
        if let Some(spec) = kept {
            let bytes = self.bytes_of(weight, spec)?;
            return Ok(first_f32(&bytes));
        }
        if !keeps_amax(recipe) {
            return Ok(None);
        }
        let group = weight.tensor.text.amax_group.as_deref().unwrap_or_default();
        let numbers = group.iter().filter_map(|member| self.numbers.get(member));
        let others = numbers.map(|&number| &self.weights[number]);
        let mut amax = 0;
        for member in others
            .filter(|other| other.saved != weight.saved)
            .chain([weight])
        {
            let name = format!("{}{MASTER}", member.saved);
            let rounding = recipe.source_rounding();
            let Shape { rows, cols } = member.tensor.full;
            self.each_value(&name, [rows, cols], |values| {
                let magnitudes = values.iter().map(|value| magnitude(rounding.apply(*value)));
                amax = magnitudes.fold(amax, u32::max);
                Ok(())
            })?;
        }
        Ok(Some(f32::from_bits(amax)))
    }

    /// Hands the values of a matrix to `take`, some at a time: besides them one rank's piece is held.
    fn each_value(
        &self,
        name: &str,
        full: [usize; 2],
        mut take: impl FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let len = full[0] * full[1];
        for start in (0..len).step_by(CHUNK) {
            let elements = start..len.min(start + CHUNK);
            let values = self.checkpoint.read_elements(name, full, elements);
            take(&values.map_err(|e| input_error(e.to_string()))?)?;
        }
        Ok(())
    }

    /// The encode scale that a weight's codes were made with, where it is not that of its amax.
    fn delayed_scale(&self, weight: &TrainedWeight) -> Result<Option<f32>> {
        let Quantized { recipe, specs, .. } = &weight.tensor;
        let spec = specs
            .iter()
            .find(|spec| spec.key.serves(Orientation::Rowwise, Part::DecodeScale));
        let delayed = recipe.kernel(Orientation::Rowwise).scale.is_delayed();
        let Some(spec) = spec.filter(|_| delayed) else {
            return Ok(None);
        };
        let bytes = self.bytes_of(weight, spec)?;
        let Some(decode) = first_f32(&bytes) else {
            return Ok(None);
        };
        let scale = nearest(decode, 1.0 / decode, |scale| 1.0 / scale);
        Ok(Some(scale).filter(|scale| crate::cast::is_scale(*scale)))
    }

    pub(crate) fn quantized(&self, weight: &TrainedWeight) -> Result<Quantized> {
        let mut tensor = weight.tensor.clone();
        tensor.text.delayed_scale = self.delayed_scale(weight)?;
        Ok(tensor)
    }
}

/// The dimensions of the parameter whose values `tensor` has, of which the index says `about`; one, where it says nothing that fits.
fn dims_of(tensor: &TensorInfo<'_>, about: Option<&Value>, is_weight: bool) -> Option<Vec<usize>> {
    let [rows, cols] = tensor.shape;
    let dims = about.and_then(|about| serde_json::from_value(about["shape"].clone()).ok());
    let fits = |dims: &Vec<usize>| match rows {
        1 => {
            dims.iter()
                .try_fold(1usize, |all, dim| all.checked_mul(*dim))
                == Some(cols)
        }
        _ => *dims == [rows, cols],
    };
    let row = (rows == 1 && !is_weight).then(|| vec![cols]);
    let dims = dims.filter(fits).or(row);
    dims.filter(|_| matches!(tensor.dtype, Kind::F32 | Kind::Bf16))
}

fn weight(saved: &str, about: &Value) -> Result<Option<Quantized>, String> {
    let recipe_name = about["recipe"].as_str().ok_or("it names no recipe")?;
    let mut options = RecipeOptions::default();
    for (name, value) in about["options"].as_object().into_iter().flatten() {
        options.set(
            name,
            value
                .as_str()
                .ok_or_else(|| format!("its option {name} is no text"))?,
        );
    }
    let recipe = AnyRecipe::from_name(recipe_name, &options).map_err(|e| e.to_string())?;
    let shape: [usize; 2] =
        serde_json::from_value(about["shape"].clone()).map_err(|e| e.to_string())?;
    let text = Text::new(&recipe, Dtype::F32, &shape, Usage::BOTH, Form::Padded);
    let tensor = Quantized::from_text(&file_name(saved), text)?;
    Ok((weight_record(&recipe, tensor.full) == *about).then_some(tensor))
}

/// The name in files of the weight that a checkpoint calls `saved`.
fn file_name(saved: &str) -> String {
    match saved.ends_with(".weight") {
        true => saved.to_owned(),
        false => format!("{saved}.weight"),
    }
}

fn numbers(
    weights: &[TrainedWeight],
    name: impl Fn(&TrainedWeight) -> &String,
) -> BTreeMap<String, usize> {
    let weights = weights.iter().enumerate();
    weights
        .map(|(number, weight)| (name(weight).clone(), number))
        .collect()
}

/// Notes which weights had one amax while they were trained, by the names of the `groups` that the index has.
fn group(weights: &mut [TrainedWeight], groups: &Value) {
    let by_saved = numbers(weights, |weight| &weight.saved);
    for group in groups.as_array().into_iter().flatten() {
        let saved = group.as_array().into_iter().flatten();
        let saved = saved.filter_map(Value::as_str);
        let members = saved.filter_map(|saved| by_saved.get(saved).copied());
        // A set, as a name may stand in the index twice.
        let members: BTreeSet<usize> = members
            .filter(|&number| has_tensor_scale(&weights[number].tensor.recipe))
            .collect();
        let named: Vec<(AnyRecipe, String)> = members
            .iter()
            .map(|&number| &weights[number].tensor)
            .map(|tensor| (tensor.recipe, tensor.name.clone()))
            .collect();
        for number in members {
            let tensor = &mut weights[number].tensor;
            // Those in other recipes have other scales.
            let same = named.iter().filter(|(recipe, _)| *recipe == tensor.recipe);
            let mut names: Vec<String> = same.map(|(_, name)| name.clone()).collect();
            names.sort();
            tensor.text.amax_group = Some(names).filter(|names| names.len() > 1);
        }
    }
}

/// The values of a parameter, its only part: in bf16 those that a weight in bf16 was trained with, else its master.
struct Values<'a> {
    trained: &'a TrainedCheckpoint,
    master: &'a Master,
    decoder: &'a Decoder<Cpu>,
}

impl Parts for Values<'_> {
    fn write(&self, _: usize, sink: &mut Sink<'_>) -> Result<()> {
        let (master, mut bytes) = (self.master, Vec::new());
        let is_bf16 = self.decoder.float == OutputDtype::Bf16;
        if let Some(weight) = self.trained.in_bf16(master).filter(|_| is_bf16) {
            let elements = weight.tensor.specs.first();
            let elements = elements.context("the weight has no elements")?;
            return sink(&self.trained.bytes_of(weight, elements)?);
        }
        self.trained
            .each_value(&master.saved, master.full, |values| {
                bytes.clear();
                self.decoder.append(&master.name, values, &mut bytes);
                sink(&bytes)
            })
    }
}
