//! The cast of one matrix, or of one rank's rows of it.

use crate::error::Result;
use crate::fields::keeps_amax;
use lowp_comm::Communicator;
use lowp_format::{
    AnyRecipe, BufferSpec, Extent, Orientation, QuantizedTensor, Recipe, Shape, Usage,
};
use lowp_kernels::{AmaxJob, Backend, Cpu, Source, Work};
use lowp_shard::{CastItem, CastPlan, ScaleBook, ScaleBookBuilder, ScaleSlot, ShardError};

/// A quantized tensor in memory.
pub(crate) type Tensor<B = Cpu> = QuantizedTensor<<B as Backend>::Buffer<u8>>;

/// Fills the buffers of `tensor` from `source`; every rank of `comm` calls it for the same tensor with its own rows. `shared` is the amax of
/// other tensors that it has one amax with. Returns that amax, else that of the whole source, where the recipe observes it.
pub(crate) fn cast<B: Backend>(
    backend: &B,
    comm: &dyn Communicator<B>,
    tensor: &Tensor<B>,
    source: Source<B>,
    delayed_scale: Option<f32>,
    shared: Option<f32>,
) -> Result<Option<f32>, ShardError> {
    let mut book = ScaleBookBuilder::default();
    let item = CastItem::rows(tensor, source, &mut book);
    let slot = delayed_slot(&item);
    let book = book.build(backend)?;
    begin(&book, &item, shared)?;
    let amax = amax_of_all(backend, comm, &book, &item, &tensor.recipe(), shared)?;
    let cast = CastPlan::new(backend, &book, &[item])?;
    match (delayed_scale, slot) {
        (Some(scale), Some(slot)) => {
            book.set_scale(slot, scale)?;
            cast.run(&book, comm)?;
        }
        _ => cast.calibrate(&book, comm)?,
    }
    Ok(amax)
}

/// The amax of the sources of `item` of all ranks, and of other tensors whose amax is `shared`, where files of `recipe` keep it.
pub(crate) fn amax_of_all<B: Backend>(
    backend: &B,
    comm: &dyn Communicator<B>,
    book: &ScaleBook<B>,
    item: &CastItem<B>,
    recipe: &impl Recipe,
    shared: Option<f32>,
) -> Result<Option<f32>, ShardError> {
    let job = item.amax_job(book)?;
    let Some(job) = job.filter(|_| keeps_amax(recipe)) else {
        return Ok(None);
    };
    // A history takes its observation away when it rolls, so the file's amax has a vector of its own.
    let out = backend.upload(&[shared.unwrap_or(0.0)])?;
    backend.once(Work::Amax(vec![AmaxJob {
        out: out.clone(),
        tensor: Some(0),
        blocks: Vec::new(),
        ..job
    }]))?;
    comm.all_reduce_max(&out)?;
    Ok(Some(backend.download::<f32>(&out)?[0]))
}

/// Fills the buffers of `tensor`, some or all rows of a tensor whose amax is `amax`, from `source`.
pub(crate) fn cast_known<B: Backend>(
    backend: &B,
    tensor: &Tensor<B>,
    source: Source<B>,
    delayed_scale: Option<f32>,
    amax: Option<f32>,
) -> Result<(), ShardError> {
    let mut book = ScaleBookBuilder::default();
    let item = CastItem::rows(tensor, source, &mut book);
    let slot = delayed_slot(&item);
    let book = book.build(backend)?;
    begin(&book, &item, amax)?;
    match (delayed_scale, slot) {
        (Some(scale), Some(slot)) => book.set_scale(slot, scale)?,
        _ => book.roll()?,
    }
    Ok(backend.once(Work::Encode(Vec::from_iter(item.encode_job(&book)?)))?)
}

/// Amaxes that all rows of a tensor share: of the tensor, and of its columns.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedAmaxes {
    tensor: Option<f32>,
    columns: Vec<f32>,
}

impl SharedAmaxes {
    /// Whether rows of a tensor have any for `recipe` and `usage`: the amax of a row is its own.
    pub(crate) fn are_any(recipe: &impl Recipe, usage: Usage) -> bool {
        usage.orientations().any(|orientation| {
            let outer = recipe.kernel(orientation).scale.outer();
            let is_of_rows = orientation == Orientation::Rowwise;
            outer.is_some_and(|(extent, _)| extent != Extent::Line || !is_of_rows)
        })
    }

    /// Raises them to those of `source`, rows of `shape` of a tensor that is cast as `recipe` says for `usage`.
    pub(crate) fn observe<B: Backend>(
        &mut self,
        backend: &B,
        recipe: &impl Recipe,
        usage: Usage,
        shape: Shape,
        source: Source<B>,
    ) -> Result<(), ShardError> {
        let mut book = ScaleBookBuilder::default();
        let item = CastItem::observed(recipe, shape, usage, source, &mut book);
        let (book, item) = observed(backend, book, item)?;
        let (of_tensor, lines) = book.observation(item.slots)?;
        let observed = backend.download::<f32>(book.observed())?;
        // NaN is no amax of a rank either.
        if let Some(at) = of_tensor {
            self.tensor = Some(observed[at].max(self.tensor.unwrap_or(0.0)));
        }
        if let Some(start) = lines[Orientation::Columnwise as usize] {
            let columns = &observed[start..start + shape.cols];
            self.columns.resize(columns.len(), 0.0);
            for (shared, own) in self.columns.iter_mut().zip(columns) {
                *shared = own.max(*shared);
            }
        }
        Ok(())
    }

    /// Fills the buffers of `tensor`, some rows of a tensor of these amaxes, from `source`. What depends on a row alone is observed here.
    pub(crate) fn cast<B: Backend>(
        &self,
        backend: &B,
        tensor: &Tensor<B>,
        source: Source<B>,
    ) -> Result<(), ShardError> {
        let mut book = ScaleBookBuilder::default();
        let item = CastItem::rows(tensor, source, &mut book);
        let (book, item) = observed(backend, book, item)?;
        let (of_tensor, lines) = book.observation(item.slots)?;
        if let (Some(at), Some(amax)) = (of_tensor, self.tensor) {
            backend.write(book.observed(), at, &[amax])?;
        }
        if let Some(start) = lines[Orientation::Columnwise as usize] {
            backend.write(book.observed(), start, &self.columns)?;
        }
        book.roll()?;
        Ok(backend.once(Work::Encode(Vec::from_iter(item.encode_job(&book)?)))?)
    }
}

/// `item`, and its book with the amaxes of its source that it depends on.
fn observed<B: Backend>(
    backend: &B,
    book: ScaleBookBuilder,
    item: CastItem<B>,
) -> Result<(ScaleBook<B>, CastItem<B>), ShardError> {
    let book = book.build(backend)?;
    if let Some(job) = item.amax_job(&book)? {
        backend.once(Work::Amax(vec![job]))?;
    }
    Ok((book, item))
}

/// Begins the observation of `item` with the amax of other tensors.
pub(crate) fn begin<B: Backend>(
    book: &ScaleBook<B>,
    item: &CastItem<B>,
    shared: Option<f32>,
) -> Result<(), ShardError> {
    let Some(amax) = shared else {
        return Ok(());
    };
    let mut slots = item.slots.into_iter().flatten();
    slots.try_for_each(|slot| book.begin_observation(slot, amax))
}

/// Raises `amax`, one number, to that of `source`, which is rows of a tensor of `recipe`.
pub(crate) fn observe<B: Backend>(
    backend: &B,
    recipe: &impl Recipe,
    source: Source<B>,
    amax: &B::Buffer<f32>,
) -> Result<(), ShardError> {
    Ok(backend.once(Work::Amax(vec![AmaxJob {
        shape: Shape::new(1, source.len(backend)),
        start: 0,
        source,
        source_rounding: recipe.source_rounding(),
        out: amax.clone(),
        tensor: Some(0),
        blocks: Vec::new(),
        hadamard: false,
    }]))?)
}

pub(crate) fn delayed_slot<B: Backend>(item: &CastItem<B>) -> Option<ScaleSlot> {
    let mut kernels = item.kernels.iter().zip(item.slots);
    kernels.find_map(|(key, slot)| slot.filter(|_| key.scale.is_delayed()))
}

/// What a cast of rows needs to know of the other rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    Tensor,
    /// Amaxes of columns, or none where lines are rows.
    Lines,
    /// Two amaxes of the tensor: all rows are cast together.
    All,
}

impl Needs {
    pub(crate) fn of(recipe: &impl Recipe, usage: Usage) -> Self {
        let kernels = || usage.orientations().map(|o| recipe.kernel(o));
        let outer = || kernels().filter_map(|kernel| kernel.scale.outer());
        let lines = outer().any(|(extent, _)| extent == Extent::Line);
        let keeps = keeps_amax(recipe);
        if kernels().any(|kernel| kernel.hadamard) || lines && keeps {
            return Self::All;
        }
        match (lines, keeps || outer().next().is_some()) {
            (true, _) => Self::Lines,
            (false, true) => Self::Tensor,
            (false, false) => Self::Nothing,
        }
    }
}

/// Whether `recipe` encodes with a scale that is known before the values.
pub(crate) fn has_delayed_scale(recipe: &impl Recipe) -> bool {
    let delayed = |orientation| recipe.kernel(orientation).scale.is_delayed();
    Orientation::ALL.into_iter().any(delayed)
}

/// Whether values can be encoded with `scale` and decoded with its reciprocal.
pub(crate) fn is_scale(scale: f32) -> bool {
    scale.is_finite() && scale > 0.0 && (1.0 / scale).is_finite()
}

pub(crate) fn empty<B: Backend>(
    backend: &B,
    recipe: AnyRecipe,
    shape: Shape,
    specs: &[BufferSpec],
) -> Result<Tensor<B>, ShardError> {
    QuantizedTensor::with_buffers(recipe, shape, specs.iter().copied(), |_, bytes| {
        Ok(backend.alloc(bytes)?)
    })
}
