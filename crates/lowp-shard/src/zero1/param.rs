//! [`FlatParam`]: one full weight and this rank's slice of its masters, laid out as casts, moves and
//! transposes.

use std::ops::Range;

use lowp_format::{
    Axis, BufferKey, BufferSpec, Code, GatherPlan, Part, QuantizedTensor, Recipe, RowCuts,
};
use lowp_kernels::{Backend, InterleaveJob, Source, Target, TransposeJob, Work};

use crate::cast_plan::check_flat;
use crate::gather::check_derived;
use crate::{CastItem, FlatShard, GatherTarget, ScaleBookBuilder, ShardError, run_steps};

/// One parameter of [`FlatWeights`](crate::FlatWeights). Parameters of any recipes go together.
#[derive(Debug)]
pub struct FlatParam<B: Backend> {
    pub(super) item: CastItem<B>,
    pub(super) shard: FlatShard,
    /// Whole data buffers in the order of the flattened matrix: what is cast into and gathered.
    pub(super) data: Vec<(Code, B::Buffer<u8>)>,
    /// Brings data into an order of their own.
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
        master: Source<B>,
        book: &mut ScaleBookBuilder,
    ) -> Result<Self, ShardError> {
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
        let mut laid = Laid {
            backend,
            tensor,
            shard,
            made: Vec::new(),
            targets: Vec::new(),
            data: Vec::new(),
            turned: Vec::new(),
            derived: Vec::new(),
            staged_bytes: 0,
        };
        run_steps(&plan, &mut laid)?;
        let Laid {
            targets,
            data,
            turned,
            derived,
            staged_bytes,
            ..
        } = laid;
        Ok(Self {
            item: CastItem::flat(&recipe, shape, (start, len), master, targets, book),
            shard,
            data,
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

    /// Their cast.
    pub fn item(&self) -> &CastItem<B> {
        &self.item
    }

    /// Bytes of buffers that the tensor does not keep.
    pub fn staged_bytes(&self) -> usize {
        self.staged_bytes
    }
}

/// A plan of one rank as casts and transposes.
struct Laid<'a, B: Backend, R> {
    backend: &'a B,
    tensor: &'a QuantizedTensor<B::Buffer<u8>, R>,
    shard: FlatShard,
    /// Buffers that the tensor does not keep.
    made: Vec<(BufferKey, B::Buffer<u8>)>,
    targets: Vec<Target<B>>,
    data: Vec<(Code, B::Buffer<u8>)>,
    turned: Vec<TransposeJob<B>>,
    derived: Vec<TransposeJob<B>>,
    staged_bytes: usize,
}

impl<B: Backend, R> Laid<'_, B, R> {
    fn stage(&mut self, bytes: usize) -> Result<B::Buffer<u8>, ShardError> {
        self.staged_bytes += bytes;
        Ok(self.backend.alloc(bytes)?)
    }
}

impl<B: Backend, R: Recipe> GatherTarget<B> for Laid<'_, B, R> {
    type Error = ShardError;

    fn full(&mut self, spec: &BufferSpec, bytes: usize) -> Result<B::Buffer<u8>, ShardError> {
        if let Ok(kept) = self.tensor.buffer(spec.key) {
            return Ok(kept.storage.clone());
        }
        let made = self.stage(bytes)?;
        self.made.push((spec.key, made.clone()));
        Ok(made)
    }

    fn filled(&self, key: BufferKey) -> Result<B::Buffer<u8>, ShardError> {
        let made = self.made.iter().find(|(known, _)| *known == key);
        match made {
            Some((_, buffer)) => Ok(buffer.clone()),
            None => Ok(self.tensor.buffer(key)?.storage.clone()),
        }
    }

    fn arrivals(&mut self, _: &BufferSpec, bytes: usize) -> Result<B::Buffer<u8>, ShardError> {
        self.stage(bytes)
    }

    fn fetch(
        &mut self,
        spec: &BufferSpec,
        dest: B::Buffer<u8>,
        _: Vec<Range<usize>>,
    ) -> Result<(), ShardError> {
        if spec.key.part != Part::Data {
            self.targets.push(Target::new(*spec, dest));
            return Ok(());
        }
        let (shape, mut spec, mut flat) = (self.shard.shape(), *spec, dest);
        if spec.axes[0] == Axis::Cols {
            spec.axes = [Axis::Rows, Axis::Cols];
            let to = flat;
            flat = self.stage(spec.bytes(shape))?;
            if shape.elements() > 0 {
                self.turned.push(TransposeJob {
                    code: spec.code,
                    entries: spec.entries(shape),
                    from: flat.clone(),
                    to,
                });
            }
        }
        let own = self.shard.stored_as(spec.code).bytes();
        let own = self.backend.view::<u8>(&flat, own)?;
        self.targets.push(Target::new(spec, own));
        self.data.push((spec.code, flat));
        Ok(())
    }

    fn interleave(&mut self, job: InterleaveJob<B>) -> Result<(), ShardError> {
        // One rank has one piece of each buffer.
        Ok(self.backend.once(Work::Interleave(vec![job]))?)
    }

    fn transpose(&mut self, job: TransposeJob<B>) -> Result<(), ShardError> {
        self.derived.push(job);
        Ok(())
    }

    fn replicated(&mut self, spec: &BufferSpec) -> Result<(), ShardError> {
        let bytes = spec.bytes(self.shard.shape());
        let whole = self.full(spec, bytes)?;
        self.targets.push(Target::new(*spec, whole));
        Ok(())
    }
}
