//! [`FlatWeights`]: full low-precision weights on every rank, cast from flat slices of their masters
//! (ZeRO-1, Megatron's distributed optimizer).

use std::sync::Arc;

use lowp_format::{AnyRecipe, QuantizedTensor, Recipe};
use lowp_kernels::{Backend, Source};

use crate::{CastItem, CastPlan, ScaleBook, ScaleBookBuilder, ShardError};
use lowp_comm::{Communicator, or_abort};

mod gather;
mod moves;
mod param;

pub use gather::FlatGather;
pub use param::FlatParam;

/// Parameters of which every rank holds the full low-precision weight and a flat slice of the masters.
///
/// A cast has three steps, of which [`FlatWeights::run`] makes one call:
///
/// 1. [`FlatWeights::cast`]: amaxes of the own elements, one max-reduction for all parameters, of tensors, lines and the blocks on
///    cuts, then each rank writes its own elements, to the nibble, the scales of tensors, lines, its own blocks and those on cuts, and
///    others in the places of the scales that come.
/// 2. [`FlatGather::gather`]: the elements and block scales of the other ranks, in one batched all-gather, straight to their
///    places. Of a byte that two ranks share each sends its half.
/// 3. [`FlatGather::post_all_gather`]: transposes and other derived buffers, and data and scales that are not in the order of
///    the flattened matrix. It may come later, before the first use of those buffers: until then they are
///    those of the cast before.
///
/// After them the weight equals a full quantize of the masters, bit for bit, for any cuts.
#[derive(Debug)]
pub struct FlatWeights<B: Backend> {
    items: Vec<CastItem<B>>,
    cast: CastPlan<B>,
    gather: FlatGather<B>,
}

impl<B: Backend> FlatWeights<B> {
    /// Plans the casts of `params`, whose entries are in `book`, among the ranks of `comm`. Collective: ranks
    /// tell each other which elements they own.
    ///
    /// # Errors
    /// As [`FlatGather::new`] and [`CastPlan::new`], on every rank.
    pub fn new(
        backend: &B,
        comm: &Arc<dyn Communicator<B>>,
        book: &ScaleBook<B>,
        params: &[FlatParam<B>],
    ) -> Result<Self, ShardError> {
        let gather = FlatGather::new(backend, comm, book, params)?;
        let items: Vec<CastItem<B>> = params.iter().map(|p| p.item.clone()).collect();
        let cast = or_abort(&**comm, CastPlan::new(backend, book, &items))?;
        Ok(Self {
            items,
            cast,
            gather,
        })
    }

    /// What is cast, in the order of the parameters.
    pub fn items(&self) -> &[CastItem<B>] {
        &self.items
    }

    /// Writes the own elements and all scales, as [`CastPlan::run`] does. Collective.
    ///
    /// # Errors
    /// As [`CastPlan::run`].
    pub fn cast(&self, book: &ScaleBook<B>) -> Result<(), ShardError> {
        self.cast.run(book, &*self.gather.comm)
    }

    /// Writes the own elements and all scales, with scales from the values themselves, delayed scales included, as
    /// [`CastPlan::calibrate`] does. Collective.
    ///
    /// # Errors
    /// As [`CastPlan::run`].
    pub fn calibrate(&self, book: &ScaleBook<B>) -> Result<(), ShardError> {
        self.cast.calibrate(book, &*self.gather.comm)
    }

    /// What follows the cast.
    pub fn after_cast(&self) -> &FlatGather<B> {
        &self.gather
    }

    /// [`FlatWeights::cast`], and what follows it ([`FlatGather::run`]). Collective.
    ///
    /// # Errors
    /// As they.
    pub fn run(&self, book: &ScaleBook<B>) -> Result<(), ShardError> {
        self.cast(book)?;
        self.gather.run()
    }
}

/// A full low-precision weight with this rank's slice of its masters.
#[derive(Clone, Debug)]
pub struct FlatMaster<'a, B: Backend, R: Recipe = AnyRecipe> {
    /// The weight, whole on every rank.
    pub tensor: &'a QuantizedTensor<B::Buffer<u8>, R>,
    /// The first element of the slice in the flattened matrix.
    pub start: usize,
    /// The values of the slice, maybe none.
    pub master: Source<B>,
}

/// A cast of master slices into full weights, planned once for where both lie: [`cast_master_weights`] again and again.
#[derive(Debug)]
pub struct MasterCast<B: Backend> {
    book: ScaleBook<B>,
    flat: FlatWeights<B>,
}

impl<B: Backend> MasterCast<B> {
    /// Plans the cast of `weights` among the ranks of `comm`. Collective.
    ///
    /// # Errors
    /// As [`FlatParam::new`] and [`FlatWeights::new`].
    pub fn new<R: Recipe>(
        backend: &B,
        comm: &Arc<dyn Communicator<B>>,
        weights: &[FlatMaster<'_, B, R>],
    ) -> Result<Self, ShardError> {
        let registered = || {
            let mut book = ScaleBookBuilder::default();
            let params = weights.iter().map(|weight| {
                let (start, master) = (weight.start, weight.master.clone());
                FlatParam::new(backend, weight.tensor, start, master, &mut book)
            });
            let params = params.collect::<Result<Vec<_>, ShardError>>()?;
            Ok::<_, ShardError>((book.build(backend)?, params))
        };
        let (book, params) = or_abort(&**comm, registered())?;
        let flat = FlatWeights::new(backend, comm, &book, &params)?;
        Ok(Self { book, flat })
    }

    /// Casts what the masters hold now, with scales from the values, delayed ones included. Collective.
    ///
    /// # Errors
    /// As [`FlatWeights::run`].
    pub fn run(&self) -> Result<(), ShardError> {
        self.flat.calibrate(&self.book)?;
        self.flat.after_cast().run()
    }
}

/// Casts `weights` once, in one call: amaxes, agreement, own elements, gather and derived buffers. Collective. Every
/// scale follows from the values, delayed ones included; who casts every step plans it once
/// ([`MasterCast`]).
///
/// ```
/// use std::time::Duration;
///
/// use lowp_format::{AnyRecipe, QuantizedTensor, RecipeOptions, Shape, Usage};
/// use lowp_kernels::{Backend, Cpu, Source};
/// use lowp_comm::run_ranks;
/// use lowp_shard::{FlatMaster, ShardError, cast_master_weights, quantize};
///
/// let recipe = AnyRecipe::from_name("nvfp4-2d", &RecipeOptions::default())?;
/// let shape = Shape::new(16, 32);
/// let weights: Vec<f32> = (0..shape.elements()).map(|i| (i as f32).sin()).collect();
/// let source = Source::F32(Cpu.upload(&weights)?);
/// let whole = quantize(&Cpu, recipe, shape, Usage::BOTH, source, None)?;
///
/// run_ranks(&Cpu, 2, Duration::from_secs(10), |rank, comm| {
///     let own = [0..101, 101..shape.elements()][rank].clone(); // in the middle of a row, a block and a byte
///     let tensor = QuantizedTensor::new(recipe, shape, Usage::BOTH, |_, n| Cpu.alloc::<u8>(n))?;
///     let master = Source::F32(Cpu.upload(&weights[own.clone()])?);
///     let weight = FlatMaster { tensor: &tensor, start: own.start, master };
///     cast_master_weights(&Cpu, &comm, &[weight])?;
///     for (full, expected) in tensor.buffers().iter().zip(whole.buffers()) {
///         assert_eq!(Cpu.download(&full.storage)?, Cpu.download(&expected.storage)?);
///     }
///     Ok::<(), ShardError>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`MasterCast::new`] and [`MasterCast::run`].
pub fn cast_master_weights<B: Backend, R: Recipe>(
    backend: &B,
    comm: &Arc<dyn Communicator<B>>,
    weights: &[FlatMaster<'_, B, R>],
) -> Result<(), ShardError> {
    MasterCast::new(backend, comm, weights)?.run()
}
