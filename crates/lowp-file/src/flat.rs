//! [`FlatCuts`]: the cast of a matrix by ranks that each own a slice of its flattened elements (ZeRO-1).

use crate::cast::{Tensor, amax_of_all, begin, delayed_slot, empty};
use crate::error::{Context, Result, file_error, input_error};
use crate::meta::MAX_WORLD;
use crate::select::{Choices, Matrix};
use crate::text::shown;
use lowp_comm::{Communicator, run_ranks};
use lowp_format::{AnyRecipe, BufferSpec, Shape};
use lowp_kernels::{Backend, Source};
use lowp_shard::{FlatParam, FlatWeights, ScaleBookBuilder, check_flat};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Longest that a rank waits for the others to cast a tensor.
const PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

/// Where the flattened elements of every matrix are cut.
#[derive(Clone, Debug)]
pub struct FlatCuts(Vec<usize>);

impl FlatCuts {
    /// Those before the elements `cuts`; none where there are none.
    ///
    /// # Errors
    /// Cuts that are not ascending, or for more ranks than there can be.
    pub fn new(cuts: &[usize]) -> Result<Option<Self>> {
        if cuts.is_empty() {
            return Ok(None);
        }
        if let Some(at) = cuts.windows(2).position(|pair| pair[0] > pair[1]) {
            return Err(input_error(format!(
                "cut {} comes after {}; give element offsets in ascending order",
                cuts[at + 1],
                cuts[at]
            )));
        }
        let world = cuts.len() + 1;
        if world > MAX_WORLD {
            return Err(input_error(format!(
                "{} cuts make {world} ranks; give at most {}",
                cuts.len(),
                MAX_WORLD - 1
            )));
        }
        Ok(Some(Self(cuts.to_vec())))
    }

    /// Checks that every cut lies in one of the matrices that are quantized, at least, and that their recipes can be
    /// cast in slices.
    ///
    /// # Errors
    /// A cut beyond the longest, or scales that whole blocks choose.
    pub fn check(&self, choices: &Choices<'_>) -> Result<()> {
        let Choices { model, all, .. } = choices;
        for Matrix { setup, .. } in all.iter().filter_map(|choice| choice.matrix) {
            check_flat(&setup.recipe, setup.usage)
                .map_err(|error| input_error(error.to_string()))?;
        }
        let matrices = all.iter().filter_map(|choice| {
            let Matrix { shape, .. } = choice.matrix?;
            Some((choice.tensor.name, shape))
        });
        let Some((name, shape)) = matrices.max_by_key(|(_, shape)| shape.elements()) else {
            return Ok(());
        };
        match self.0.last() {
            Some(&cut) if cut > shape.elements() => Err(file_error!(
                model.path(),
                "a cut at element {cut} is in none of its tensors; the longest that is quantized is '{}', {shape} with {} elements",
                shown(name),
                shape.elements()
            )),
            _ => Ok(()),
        }
    }

    /// The elements of each rank, of `elements`.
    fn ranges(&self, elements: usize) -> Vec<Range<usize>> {
        let mut start = 0;
        let ends = self.0.iter().map(|&cut| cut.min(elements));
        ends.chain([elements])
            .map(|end| std::mem::replace(&mut start, end)..end)
            .collect()
    }

    /// Makes a tensor of `specs` whose elements `load` gives, each rank a range of them. Returns it as every rank
    /// has it, with the amax of the whole source, where the recipe observes it.
    pub(crate) fn cast<B: Backend>(
        &self,
        backend: &B,
        what: &Flat<'_>,
        load: impl Fn(Range<usize>) -> Result<Source<B>> + Sync,
    ) -> Result<(Tensor<B>, Option<f32>)> {
        let ranges = self.ranges(what.shape.elements());
        let made = run_ranks(backend, ranges.len(), PATIENCE, |rank, comm| {
            let range = ranges[rank].clone();
            let source = load(range.clone())?;
            what.cast(backend, &comm, range.start, source)
        });
        let made = made.map_err(|failed| failed.cause)?;
        made.into_iter().next().context("there is a rank 0")
    }
}

/// What ranks make together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flat<'a> {
    pub(crate) recipe: AnyRecipe,
    pub(crate) shape: Shape,
    pub(crate) specs: &'a [BufferSpec],
    pub(crate) delayed_scale: Option<f32>,
    /// The amax of other tensors that it has one amax with.
    pub(crate) shared: Option<f32>,
}

impl Flat<'_> {
    /// One rank's part: the whole tensor, of whose source it has the elements from `start` on.
    fn cast<B: Backend>(
        &self,
        backend: &B,
        comm: &Arc<dyn Communicator<B>>,
        start: usize,
        source: Source<B>,
    ) -> Result<(Tensor<B>, Option<f32>)> {
        let tensor = empty(backend, self.recipe, self.shape, self.specs)?;
        let mut book = ScaleBookBuilder::default();
        let param = FlatParam::new(backend, &tensor, start, source, &mut book)?;
        let book = book.build(backend)?;
        let flat = FlatWeights::new(backend, comm, &book, &[param])?;
        let item = &flat.items()[0];
        begin(&book, item, self.shared)?;
        let amax = amax_of_all(backend, &**comm, &book, item, &self.recipe, self.shared)?;
        match (self.delayed_scale, delayed_slot(item)) {
            (Some(scale), Some(slot)) => {
                book.set_scale(slot, scale)?;
                flat.cast(&book)?;
            }
            _ => flat.calibrate(&book)?,
        }
        flat.after_cast().run()?;
        Ok((tensor, amax))
    }
}
