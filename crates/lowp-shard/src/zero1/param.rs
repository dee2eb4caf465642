//! [`FlatParam`]: one full weight and this rank's slice of its masters, laid out as casts, moves and
//! transposes.

use lowp_format::{
    Axis, BufferSpec, Code, FormatError, GatherPlan, Part, QuantizedTensor, Recipe, RowCuts,
};
use lowp_kernels::{Backend, KernelError, Master, Target, TransposeJob, Work};

use crate::cast_plan::check_flat;
use crate::gather::{MemoryStep, PoolBuffer, check_derived, memory_steps};
use crate::{CastItem, FlatShard, ScaleBookBuilder, ShardError};

/// One parameter of [`FlatWeights`](crate::FlatWeights). Parameters of any recipes go together.
#[derive(Debug)]
pub struct FlatParam<B: Backend> {
    pub(super) item: CastItem<B>,
    pub(super) shard: FlatShard,
    /// Whole data buffers in the order of the flattened matrix: what is cast into and gathered.
    pub(super) data: Vec<(Code, B::Buffer<u8>)>,
    /// Whole buffers of block scales in the order of blocks, with what they are: of the blocks that a rank has whole, it alone casts them.
    pub(super) scales: Vec<(BufferSpec, B::Buffer<u8>)>,
    /// Brings data and scales into an order of their own.
    pub(super) turned: Vec<TransposeJob<B>>,
    /// Makes buffers of others.
    pub(super) derived: Vec<TransposeJob<B>>,
    /// What ranks must have in common.
    pub(super) text: String,
    staged_bytes: usize,
}

impl<B: Backend> FlatParam<B> {
    /// The full weight `tensor`, of which this rank casts the elements from `start` on, in the order of the
    /// flattened matrix: those of `master`, which may begin and end anywhere, and may be none. Registers the
    /// scales in `book`.
    ///
    /// Buffers that the cast needs and the tensor does not keep are allocated: the rowwise codes of a tensor that
    /// only holds their transpose, and the codes in the order of the flattened matrix where the tensor has
    /// them in another.
    ///
    /// # Errors
    /// A slice outside the matrix, a shape that the recipe cannot take, scales that whole blocks choose (four over
    /// six), derived buffers that are no transposes, or no room.
    pub fn new<R: Recipe>(
        backend: &B,
        tensor: &QuantizedTensor<B::Buffer<u8>, R>,
        start: usize,
        master: impl Into<Master<B>>,
        book: &mut ScaleBookBuilder,
    ) -> Result<Self, ShardError> {
        let master = master.into();
        let (recipe, shape, usage) = (tensor.recipe(), tensor.shape(), tensor.usage());
        check_flat(&recipe, usage)?;
        let len = master.len(backend);
        // Cuts lie where those of the narrowest codes may.
        let stored = recipe.stored(usage);
        let codes = stored.iter().filter(|spec| spec.key.part == Part::Data);
        let code = codes.map(|spec| spec.code).min_by_key(|code| code.bits());
        let shard = FlatShard::new(shape, code.unwrap_or(Code::F32), start..start + len)?;
        // The plan of one rank: what it would fetch is what all ranks cast, and the rest is derived.
        let cuts = RowCuts::new(shape.rows, 1, recipe.row_quantum(usage))?;
        let plan = GatherPlan::with_cuts(&recipe, shape, &cuts, usage, usage, &[])?;
        check_derived(&recipe, &plan)?;
        let mut staged_bytes = 0;
        let mut stage = |bytes: usize| -> Result<B::Buffer<u8>, KernelError> {
            staged_bytes += bytes;
            backend.alloc(bytes)
        };
        // Buffers that the tensor does not keep.
        let mut made: Vec<(PoolBuffer, B::Buffer<u8>)> = Vec::new();
        let find = |made: &[(PoolBuffer, B::Buffer<u8>)], name: PoolBuffer| {
            let (key, arrivals) = (name.key, name.arrivals);
            if let (Ok(kept), false) = (tensor.buffer(key), arrivals) {
                return Ok(kept.storage.clone());
            }
            let mut made = made.iter();
            let found = made.find(|(known, _)| (known.key, known.arrivals) == (key, arrivals));
            let found = found.map(|(_, buffer)| buffer.clone());
            found.ok_or(FormatError::MissingBuffer { key, usage })
        };
        let (mut targets, mut data, mut scales) = (Vec::new(), Vec::new(), Vec::new());
        let (mut turned, mut derived) = (Vec::new(), Vec::new());
        for step in memory_steps(&plan) {
            let mut make = |name: PoolBuffer| -> Result<B::Buffer<u8>, KernelError> {
                if let Ok(found) = find(&made, name) {
                    return Ok(found);
                }
                let buffer = stage(name.bytes)?;
                made.push((name, buffer.clone()));
                Ok(buffer)
            };
            match step {
                MemoryStep::Fetch { spec, to, .. } if !spec.key.part.is_outer() => {
                    let (mut spec, mut flat) = (*spec, make(to)?);
                    if spec.axes[0] == Axis::Cols {
                        spec.axes.reverse();
                        spec.tile.reverse();
                        let to = flat;
                        flat = stage(spec.bytes(shape))?;
                        if shape.elements() > 0 {
                            turned.push(TransposeJob {
                                code: spec.code,
                                entries: spec.entries(shape),
                                from: flat.clone(),
                                to,
                            });
                        }
                    }
                    if spec.key.part == Part::Data {
                        let own = shard.stored_as(spec.code).bytes();
                        targets.push(Target::new(spec, backend.view::<u8>(&flat, own)?));
                        data.push((spec.code, flat));
                    } else {
                        targets.push(Target::new(spec, flat.clone()));
                        scales.push((spec, flat));
                    }
                }
                MemoryStep::Fetch { spec, to, .. } => targets.push(Target::new(*spec, make(to)?)),
                MemoryStep::Replicated(spec) => {
                    let (key, bytes) = (spec.key, spec.bytes(shape));
                    let arrivals = false;
                    targets.push(Target::new(
                        *spec,
                        make(PoolBuffer {
                            key,
                            arrivals,
                            bytes,
                        })?,
                    ));
                }
                step => {
                    if let MemoryStep::Interleave { to, .. } | MemoryStep::Transpose { to, .. } =
                        &step
                    {
                        make(*to)?;
                    }
                    match step.work(|name| find(&made, name))? {
                        Some(Work::Transpose(jobs)) => derived.extend(jobs),
                        // One rank has one piece of each buffer.
                        other => other.map_or(Ok(()), |work| backend.once(work))?,
                    }
                }
            }
        }
        Ok(Self {
            item: CastItem::flat(&recipe, shape, start..start + len, master, targets, book),
            shard,
            data,
            scales,
            turned,
            derived,
            text: format!("{} {shape} {usage} {recipe:?}", recipe.name()),
            staged_bytes,
        })
    }

    /// The elements that this rank casts.
    pub fn shard(&self) -> &FlatShard {
        &self.shard
    }

    /// The cast of the slice.
    pub fn item(&self) -> &CastItem<B> {
        &self.item
    }

    /// Bytes of buffers that the tensor does not keep.
    pub fn staged_bytes(&self) -> usize {
        self.staged_bytes
    }
}
