//! [`RankFiles`]: rank files, gathered into the file that quantizing the whole model would have written.

use crate::cast::Tensor;
use crate::dtypes::Dtypes;
use crate::error::{Context, Result, file_error, mend_file, of_tensor};
use crate::fields::{self, Content, Field, holding, worked};
use crate::interchange::hub::OtherFiles;
use crate::meta::{self, Quantized, Shard, Text};
use crate::model::Model;
use crate::out::Out;
use crate::outputs::{Group, Outputs};
use crate::pack::Packed;
use crate::progress::Progress;
use crate::quantize::copied_metadata;
use crate::rank_names::{file_name, paths};
use crate::remedy::Remedy;
use crate::round::first_f32;
use crate::text::shown;
use crate::write::Item;
use lowp_format::{
    BufferKey, BufferSpec, Form, GatherPlan, Orientation, QuantizedTensor, Recipe, RowCuts,
    ScaleLayout,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer};
use lowp_shard::{MemoryStep, PoolBuffer, memory_steps, piece_ranges};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The rank files of one `lowp shard`. What they say of each tensor is the same but for the rows, so it is kept once; of
/// each file only where its tensors begin.
#[derive(Debug)]
pub struct RankFiles {
    folder: PathBuf,
    /// What the metadata of rank 0 say besides.
    metadata: BTreeMap<String, String>,
    /// The quantized tensors as rank 0 has them, each with the number of its first field.
    tensors: BTreeMap<String, (Quantized, usize)>,
    ranks: Vec<Rank>,
}

#[derive(Debug)]
struct Rank {
    /// Only those of its tensors that passed through.
    model: Model,
    /// Where the fields of all quantized tensors begin, in their order.
    starts: Vec<usize>,
    bytes: u64,
}

fn shard(tensor: &Quantized) -> Result<&Shard> {
    tensor
        .shard
        .as_ref()
        .with_context(|| format!("'{}' is no shard", shown(&tensor.name)))
}

impl RankFiles {
    /// Opens the rank files of a folder, one after the other.
    ///
    /// # Errors
    /// Rank files that are missing, cannot be read or do not belong together.
    pub fn open(folder: &Path) -> Result<Self> {
        let paths = paths(folder)?;
        let mut opened = Self {
            folder: folder.to_owned(),
            metadata: BTreeMap::new(),
            tensors: BTreeMap::new(),
            ranks: Vec::new(),
        };
        for (rank, path) in paths.iter().enumerate() {
            let model = Model::open(path)?;
            let tensors = meta::quantized(&model)?;
            if rank == 0 {
                opened.metadata = copied_metadata(&model);
                let mut first = 0;
                for (name, tensor) in &tensors {
                    opened.tensors.insert(name.clone(), (tensor.clone(), first));
                    first += tensor.fields.len();
                }
            }
            opened.check(&model, &tensors, rank, paths.len())?;
            opened.ranks.push(Rank::new(model, &tensors)?);
        }
        Ok(opened)
    }

    /// The files of all ranks.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.ranks.iter().flat_map(|rank| rank.model.files())
    }

    /// Their bytes.
    pub fn bytes(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.bytes).sum()
    }

    /// Number of quantized tensors.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Gathers all tensors into `out`, whose codes are called as `dtypes` says. Returns the bytes that were written, and what lies next to
    /// the rank files.
    ///
    /// # Errors
    /// Rank files that cannot be read or do not belong together; the output cannot be written.
    pub fn write(
        &self,
        dtypes: Dtypes,
        out: Out,
        progress: &dyn Progress,
    ) -> Result<(u64, OtherFiles)> {
        let other_files = OtherFiles::in_folder(&self.folder, &paths(&self.folder)?)?;
        let outputs = outputs(self, dtypes)?;
        let inputs = self.ranks.iter().map(|rank| &rank.model);
        let written = out.write(inputs, &outputs, progress, |target| {
            other_files.copy_all(target)
        })?;
        Ok((written, other_files))
    }

    /// Rejects a rank file that is not of the same `lowp shard` as that of rank 0.
    fn check(
        &self,
        model: &Model,
        tensors: &BTreeMap<String, Quantized>,
        rank: usize,
        world: usize,
    ) -> Result<()> {
        let expected: BTreeSet<&String> = self.tensors.keys().collect();
        if let Some(name) = tensors
            .keys()
            .collect::<BTreeSet<_>>()
            .symmetric_difference(&expected)
            .next()
        {
            return Err(file_error!(
                model.path(),
                "'{}' is not in the files of all ranks; shard the model again",
                shown(name)
            ));
        }
        for (name, tensor) in tensors {
            let Some(shard) = &tensor.shard else {
                let first = file_name(0, world);
                return Err(mend_file(
                    model.path(),
                    format!("'{}' is a whole tensor", shown(name)),
                    Remedy::GiveRankFiles { first },
                ));
            };
            if (shard.rank, shard.cuts.world()) != (rank, world) {
                return Err(file_error!(
                    model.path(),
                    "'{}' belongs to rank {} of {}; give the file its own name back",
                    shown(name),
                    shard.rank,
                    shard.cuts.world()
                ));
            }
            let (first, _) = &self.tensors[name];
            if common(&tensor.text) != common(&first.text) || tensor.usage != first.usage {
                return Err(file_error!(
                    model.path(),
                    "'{}' was sharded with other options than on rank 0; shard the model again",
                    shown(name)
                ));
            }
        }
        Ok(())
    }

    /// The number of a field of tensor `name`: that of a buffer, or of the amax that is in none.
    fn field(&self, name: &str, key: Option<BufferKey>) -> Result<(&Field, usize)> {
        let (tensor, first) = &self.tensors[name];
        let found = match key {
            Some(key) => holding(&tensor.fields, key, Orientation::Rowwise),
            None => tensor.amax_field(),
        };
        let position = found.and_then(|found| {
            let mut fields = tensor.fields.iter();
            fields.position(|field| std::ptr::eq(field, found))
        });
        let (found, position) = found
            .zip(position)
            .with_context(|| format!("'{}' lacks a field", shown(name)))?;
        Ok((found, first + position))
    }

    /// A number that must be the same in every rank file: a buffer, or the amax that is in none.
    fn agreed(&self, name: &str, key: Option<BufferKey>) -> Result<Vec<u8>> {
        let (field, number) = self.field(name, key)?;
        let mut agreed: Option<Vec<u8>> = None;
        for Rank { model, starts, .. } in &self.ranks {
            let mut bytes = Vec::new();
            // A number has the same size everywhere.
            let range = model.byte_range(starts[number], field.bytes())?;
            range.pieces(0..field.bytes(), |_, piece| {
                bytes.extend_from_slice(piece);
                Ok(())
            })?;
            if agreed.as_ref().is_some_and(|agreed| *agreed != bytes) {
                return Err(file_error!(
                    model.path(),
                    "'{}' differs from rank 0's; shard the model again",
                    shown(&field.name(name))
                ));
            }
            agreed = Some(bytes);
        }
        agreed.context("no ranks")
    }

    /// Reads each rank's piece of a buffer to its range of `dest`.
    fn fetch(
        &self,
        name: &str,
        spec: &BufferSpec,
        dest: &CpuBuffer<u8>,
        ranges: impl Iterator<Item = Range<usize>>,
    ) -> Result<()> {
        let (field, number) = self.field(name, Some(spec.key))?;
        let (tensor, _) = &self.tensors[name];
        let Shard { cuts, .. } = shard(tensor)?;
        for (rank, (Rank { model, starts, .. }, range)) in self.ranks.iter().zip(ranges).enumerate()
        {
            // The length that the file was found to have when it was opened.
            let rows = tensor.full.with_rows(cuts.range(rank).len());
            let found = match field.content {
                Content::Buffer { orientation, .. } => {
                    ScaleLayout::new(spec, rows, orientation, Form::Compact)?.bytes()
                }
                Content::Amax => field.bytes(),
            };
            let piece = range.len();
            if found != piece {
                return Err(file_error!(
                    model.path(),
                    "'{}' has {found} bytes, not {piece}; shard the model again",
                    shown(&field.name(name))
                ));
            }
            let from = model.byte_range(starts[number], piece)?;
            from.pieces(0..piece, |at, bytes| {
                Ok(Cpu.write(dest, range.start + at, bytes)?)
            })?;
        }
        Ok(())
    }

    fn gather(&self, name: &str) -> Result<Tensor> {
        let (tensor, _) = &self.tensors[name];
        let Shard { cuts, usage, .. } = shard(tensor)?;
        let recipe = tensor.recipe;
        let specs = recipe.buffers(*usage);
        let full = worked(tensor.full, tensor.full, &specs);
        let cuts = match full.rows {
            0 => &RowCuts::new(0, cuts.world(), 1)?,
            _ => cuts,
        };
        let plan = GatherPlan::with_cuts(&recipe, full, cuts, *usage, *usage, &[])?;
        let mut buffers = Vec::new();
        for step in memory_steps(&plan) {
            match step {
                MemoryStep::Fetch { spec, to, pieces } => {
                    self.fetch(name, spec, &make(&mut buffers, to)?, piece_ranges(pieces))?;
                }
                MemoryStep::Replicated(spec) => {
                    let agreed = self.agreed(name, Some(spec.key))?;
                    buffers.push(Gathered {
                        key: spec.key,
                        arrivals: false,
                        buffer: Cpu.upload(&agreed)?,
                    });
                }
                step => {
                    if let MemoryStep::Interleave { to, .. } | MemoryStep::Transpose { to, .. } =
                        &step
                    {
                        make(&mut buffers, *to)?;
                    }
                    let work = step.work(|from| find(&buffers, from.key, from.arrivals))?;
                    work.map_or(Ok(()), |work| Cpu.once(work))?;
                    buffers.retain(|known| !known.arrivals);
                }
            }
        }
        QuantizedTensor::with_buffers(recipe, full, specs, |spec, _| {
            find(&buffers, spec.key, false)
        })
    }
}

/// Memory of a tensor that is gathered.
struct Gathered {
    key: BufferKey,
    /// Whether pieces arrive there.
    arrivals: bool,
    buffer: CpuBuffer<u8>,
}

fn find(buffers: &[Gathered], key: BufferKey, arrivals: bool) -> Result<CpuBuffer<u8>> {
    let found = buffers
        .iter()
        .find(|known| (known.key, known.arrivals) == (key, arrivals));
    let found = found.with_context(|| format!("{key} was not gathered"))?;
    Ok(found.buffer.clone())
}

/// The buffer `to`, which is allocated if there is none.
fn make(buffers: &mut Vec<Gathered>, to: PoolBuffer) -> Result<CpuBuffer<u8>> {
    let PoolBuffer {
        key,
        arrivals,
        bytes,
    } = to;
    if let Ok(found) = find(buffers, key, arrivals) {
        return Ok(found);
    }
    let buffer = Cpu.alloc::<u8>(bytes)?;
    buffers.push(Gathered {
        key,
        arrivals,
        buffer: buffer.clone(),
    });
    Ok(buffer)
}

/// What the texts of all ranks have in common, with what the whole tensor serves in the place of what a rank holds.
fn common(text: &Text) -> Text {
    let mut whole = text.clone();
    if let Some(shard) = whole.shard.take() {
        (whole.usage, whole.scales) = (shard.usage, shard.scales);
    }
    whole
}

fn outputs(files: &RankFiles, dtypes: Dtypes) -> Result<Outputs<'_>> {
    let mut groups = Vec::new();
    let mut jobs: Vec<(&Quantized, Vec<Field>)> = Vec::new();
    for rank in &files.ranks {
        groups.extend(
            rank.model
                .tensors()
                .map(|tensor| Group::of(Item::input(tensor))),
        );
    }
    for (name, (tensor, _)) in &files.tensors {
        let Shard { usage, form, .. } = *shard(tensor)?;
        let specs = tensor.recipe.buffers(usage);
        let fields = fields::fields(&tensor.recipe, &specs, tensor.full, usage, form)
            .map_err(|e| of_tensor(name, e))?;
        let fields = fields::called(&fields, dtypes);
        let text = common(&tensor.text);
        groups.push(Group::quantized(jobs.len(), name, &fields, &text)?);
        jobs.push((tensor, fields));
    }
    let make = Box::new(move |job: usize| {
        let (tensor, fields) = &jobs[job];
        let amax = match tensor.amax_field() {
            Some(_) => first_f32(&files.agreed(&tensor.name, None)?),
            None => None,
        };
        let (tensor, fields) = (files.gather(&tensor.name)?, fields.clone());
        Ok(Packed::parts(&Cpu, tensor, amax, fields))
    });
    Ok(Outputs::sorted(groups, files.metadata.clone(), make))
}

impl Rank {
    /// Notes where the fields of `tensors`, which are all in `model`, begin; the rest of what it says of them is rank 0's.
    fn new(mut model: Model, tensors: &BTreeMap<String, Quantized>) -> Result<Self> {
        let mut starts = Vec::new();
        let mut fields = BTreeSet::new();
        for (name, tensor) in tensors {
            for field in &tensor.fields {
                let full = field.name(name);
                starts.push(model.expect(&full, field.dtype, &field.shape)?.start());
                fields.insert(full);
            }
        }
        model.retain(|name| !fields.contains(name));
        starts.shrink_to_fit();
        let bytes = model.bytes();
        Ok(Self {
            model,
            starts,
            bytes,
        })
    }
}
