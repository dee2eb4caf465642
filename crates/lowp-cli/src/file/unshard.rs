//! `lowp unshard`: rank files gathered into the file that `lowp quantize` would have written.

use super::args::example;
use super::cast::Tensor;
use super::fields::{self, Content, Field, holding};
use super::meta::{self, Quantized, Shard, Text};
use super::model::Model;
use super::pack::{Packed, wanted};
use super::progress::Progress;
use super::quantize::{copied_metadata, made_items};
use super::ranks;
use super::refuse::{refuse, refuse_file};
use super::target::FileTarget;
use super::write::{Item, Outputs, Parts, Want};
use anyhow::{Context, Result};
use lowp_format::{
    BufferKey, BufferSpec, GatherPlan, GatherStep, Orientation, QuantizedTensor, Recipe, Transport,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer, InterleaveJob, TransposeJob, Work};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Gather rank files into one quantized model
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:
  lowp shard model.safetensors -o ranks --world-size 4 --recipe {recipe}
  lowp unshard ranks -o q.safetensors

Every tensor of the result equals that of `lowp quantize` with the same options, byte for byte.", recipe = example()))]
pub(crate) struct Args {
    /// The folder that `lowp shard` wrote
    input: PathBuf,

    /// The file to write
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
}

/// The rank files with what their metadata say.
struct World {
    models: Vec<Model>,
    /// The quantized tensors of each rank.
    tensors: Vec<BTreeMap<String, Quantized>>,
}

/// Runs the command.
///
/// # Errors
/// Rank files that are missing, cannot be read or do not belong together; an output that cannot be written.
pub(super) fn main(args: &Args) -> Result<()> {
    let models = ranks::open(&args.input)?;
    let tensors = models.iter().map(meta::quantized).collect::<Result<_>>()?;
    let world = World { models, tensors };
    world.check()?;
    let target = FileTarget::new(&args.output, world.models.iter().flat_map(Model::files))?;
    let outputs = outputs(&world)?;
    outputs.check()?;
    let progress = Progress::new("unshard", outputs.bytes());
    target.fill(|draft| outputs.write(draft, &progress))
}

/// The shard of a tensor of a rank file.
fn shard(tensor: &Quantized) -> Result<&Shard> {
    tensor
        .shard
        .as_ref()
        .with_context(|| format!("'{}' is no shard", tensor.name))
}

impl World {
    /// Refuses rank files that are not of one `lowp shard`.
    fn check(&self) -> Result<()> {
        let names = |rank: usize| self.tensors[rank].keys().collect::<BTreeSet<_>>();
        let (first, expected) = (&self.tensors[0], names(0));
        for (rank, model) in self.models.iter().enumerate() {
            let found = names(rank);
            if let Some(name) = found.symmetric_difference(&expected).next() {
                return Err(refuse_file(
                    model.path(),
                    format!("'{name}' is not in the files of all ranks; shard the model again"),
                ));
            }
            for (name, tensor) in &self.tensors[rank] {
                let Some(shard) = &tensor.shard else {
                    return Err(refuse_file(
                        model.path(),
                        format!(
                            "'{name}' is a whole tensor; give the files that `lowp shard` wrote"
                        ),
                    ));
                };
                if (shard.rank, shard.cuts.world()) != (rank, self.models.len()) {
                    return Err(refuse_file(
                        model.path(),
                        format!(
                            "'{name}' belongs to rank {} of {}; give the file its own name back",
                            shard.rank,
                            shard.cuts.world()
                        ),
                    ));
                }
                if common(&tensor.text) != common(&first[name].text) {
                    return Err(refuse_file(
                        model.path(),
                        format!(
                            "'{name}' was sharded with other options than on rank 0; shard the model again"
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    /// A number that must be the same in every rank file: a buffer, or the amax that is in none.
    fn agreed(&self, name: &str, key: Option<BufferKey>) -> Result<Vec<u8>> {
        let mut agreed: Option<Vec<u8>> = None;
        for (model, tensors) in self.models.iter().zip(&self.tensors) {
            let tensor = &tensors[name];
            let field = match key {
                Some(key) => holding(&tensor.fields, key, Orientation::Rowwise),
                None => amax_field(tensor),
            };
            let field = field.with_context(|| format!("'{name}' lacks a scale"))?;
            let full = field.name(name);
            let bytes = model.expect(&full, field.dtype, &field.shape)?.to_vec()?;
            if agreed.as_ref().is_some_and(|agreed| *agreed != bytes) {
                return Err(refuse_file(
                    model.path(),
                    format!("'{full}' differs from rank 0's; shard the model again"),
                ));
            }
            agreed = Some(bytes);
        }
        agreed.context("no ranks")
    }

    /// The pieces of a buffer, one after another.
    fn pieces(&self, name: &str, spec: &BufferSpec, pieces: &[usize]) -> Result<CpuBuffer<u8>> {
        let all = Cpu.alloc::<u8>(pieces.iter().sum())?;
        let mut start = 0;
        for ((model, tensors), &piece) in self.models.iter().zip(&self.tensors).zip(pieces) {
            let field = holding(&tensors[name].fields, spec.key, Orientation::Rowwise)
                .with_context(|| format!("'{name}' lacks {}", spec.key))?;
            let found = model.expect(&field.name(name), field.dtype, &field.shape)?;
            if found.len() != piece {
                return Err(refuse_file(
                    model.path(),
                    format!(
                        "'{}' has {} bytes, not {piece}; shard the model again",
                        field.name(name),
                        found.len()
                    ),
                ));
            }
            found.pieces(0..piece, |at, bytes| {
                Ok(Cpu.write(&all, start + at, bytes)?)
            })?;
            start += piece;
        }
        Ok(all)
    }

    /// Runs the gather plan of one tensor.
    fn gather(&self, name: &str, want: Want) -> Result<Tensor> {
        let tensor = &self.tensors[0][name];
        let Shard { cuts, usage, .. } = shard(tensor)?;
        let plan = GatherPlan::with_cuts(&tensor.recipe, tensor.full, cuts, *usage, *usage, &[])?;
        let mut buffers: Vec<(BufferKey, CpuBuffer<u8>)> = Vec::new();
        for step in &plan.steps {
            let spec = step.spec();
            if want == Want::Numbers && !matches!(step, GatherStep::Replicated { .. }) {
                continue;
            }
            let buffer = match step {
                GatherStep::Concat {
                    transport, pieces, ..
                } => {
                    let from = self.pieces(name, spec, pieces)?;
                    let [outer, _] = spec.entries(plan.full);
                    if *transport == Transport::Rows || outer == 0 {
                        from
                    } else {
                        let to = Cpu.alloc(spec.bytes(plan.full))?;
                        let widths = pieces.iter().map(|bytes| bytes / outer).collect();
                        let job = InterleaveJob {
                            outer,
                            widths,
                            from,
                            to: to.clone(),
                        };
                        Cpu.once(Work::Interleave(vec![job]))?;
                        to
                    }
                }
                GatherStep::Derive { from, .. } => {
                    let to = Cpu.alloc(spec.bytes(plan.full))?;
                    let [inner, outer] = spec.entries(plan.full);
                    if inner * outer > 0 {
                        let (from, to) = (find(&buffers, *from)?, to.clone());
                        let job = TransposeJob {
                            code: spec.code,
                            entries: [outer, inner],
                            from,
                            to,
                        };
                        Cpu.once(Work::Transpose(vec![job]))?;
                    }
                    to
                }
                GatherStep::Replicated { .. } => Cpu.upload(&self.agreed(name, Some(spec.key))?)?,
            };
            buffers.push((spec.key, buffer));
        }
        let specs = wanted(&tensor.recipe.buffers(*usage), want);
        QuantizedTensor::with_buffers(tensor.recipe, tensor.full, specs, |spec, _| {
            find(&buffers, spec.key)
        })
    }
}

fn find(buffers: &[(BufferKey, CpuBuffer<u8>)], key: BufferKey) -> Result<CpuBuffer<u8>> {
    let found = buffers.iter().find(|(known, _)| *known == key);
    Ok(found
        .with_context(|| format!("{key} was not gathered"))?
        .1
        .clone())
}

/// What the texts of all ranks have in common, with what the whole tensor serves in the place of what a rank holds.
fn common(text: &Text) -> Text {
    let mut whole = text.clone();
    if let Some(shard) = whole.shard.take() {
        (whole.usage, whole.scales) = (shard.usage, shard.scales);
    }
    whole
}

/// The tensors of the output file.
fn outputs(world: &World) -> Result<Outputs<'_>> {
    let mut metadata = copied_metadata(&world.models[0]);
    let mut items = Vec::new();
    let mut jobs: Vec<(&Quantized, Vec<Field>)> = Vec::new();
    for (model, tensors) in world.models.iter().zip(&world.tensors) {
        let field_names = |tensor: &Quantized| -> Vec<String> {
            tensor
                .fields
                .iter()
                .map(|field| field.name(&tensor.name))
                .collect()
        };
        let fields: BTreeSet<String> = tensors.values().flat_map(field_names).collect();
        let passed = model
            .tensors()
            .filter(|tensor| !fields.contains(tensor.name));
        items.extend(passed.map(Item::input));
    }
    for (name, tensor) in &world.tensors[0] {
        let Shard { usage, form, .. } = *shard(tensor)?;
        let specs = tensor.recipe.buffers(usage);
        let fields = fields::fields(&tensor.recipe, &specs, tensor.full, usage, form)
            .map_err(|e| refuse(format!("'{name}': {e}")))?;
        items.extend(made_items(jobs.len(), name, &fields));
        metadata.insert(
            meta::key(name),
            serde_json::to_string(&common(&tensor.text))?,
        );
        jobs.push((tensor, fields));
    }
    let make = Box::new(move |job: usize, want: Want| {
        let (tensor, fields) = &jobs[job];
        let amax = match amax_field(tensor) {
            Some(_) if want == Want::Numbers => {
                let bytes = world.agreed(&tensor.name, None)?;
                bytes.first_chunk().map(|bytes| f32::from_le_bytes(*bytes))
            }
            _ => None,
        };
        let (tensor, fields) = (world.gather(&tensor.name, want)?, fields.clone());
        Ok(Box::new(Packed {
            backend: Cpu,
            tensor,
            amax,
            fields,
        }) as Box<dyn Parts>)
    });
    Ok(Outputs {
        items,
        metadata,
        make,
    })
}

/// The field of an amax that is in no buffer.
fn amax_field(tensor: &Quantized) -> Option<&Field> {
    tensor
        .fields
        .iter()
        .find(|field| field.content == Content::Amax)
}
