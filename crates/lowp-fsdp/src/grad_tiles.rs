//! [`GradTiles`]: a gradient that is computed row-major and reduced in the order of tiles.

use std::ops::Range;
use std::sync::Arc;

use lowp_format::ShardTiles;
use lowp_kernels::{
    Backend, FloatDtype, RearrangeJob, Rearranged, Runs, Source, StepScalars, Work,
};
use lowp_shard::{GatherPool, Scratch, Scratches, ShardError, tall_to_matrix};

/// The memory of a bucket, and the number of that of a row-major gradient.
type Places = (Range<usize>, u64);

/// The row-major gradient of a weight, and the copies from there to its buckets.
#[derive(Debug)]
pub(crate) struct GradTiles<B: Backend> {
    len: usize,
    runs: Runs,
    scratches: Option<(FloatDtype, Arc<Scratches<B>>)>,
    /// What the gradient is written to at the moment.
    lent: Option<Scratch<B>>,
    /// Planned once per places.
    plans: Vec<(Places, B::Plan)>,
}

impl<B: Backend> GradTiles<B> {
    /// None for tiles that are in the order of the matrix.
    pub(crate) fn new(tiles: &ShardTiles) -> Option<Self> {
        (!tiles.are_in_order()).then(|| Self {
            len: tiles.full().elements(),
            runs: tall_to_matrix(tiles).reversed(),
            scratches: None,
            lent: None,
            plans: Vec::new(),
        })
    }

    /// Memory for the row-major gradient, until [`GradTiles::put`].
    pub(crate) fn lend(
        &mut self,
        pool: &GatherPool<B>,
        dtype: FloatDtype,
    ) -> Result<Source<B>, ShardError> {
        if let Some(lent) = &self.lent
            && lent.values().dtype() == dtype
        {
            return Ok(lent.values().clone());
        }
        let scratches = match self.scratches.take() {
            Some((known, scratches)) if known == dtype => scratches,
            _ => pool.scratches(dtype, self.len),
        };
        let lent = self.lent.insert(scratches.lend()?);
        self.scratches = Some((dtype, scratches));
        Ok(lent.values().clone())
    }

    /// Gives the memory back.
    pub(crate) fn forget(&mut self) {
        self.lent = None;
    }

    /// Enqueues that the gradient goes to `into` in the order of tiles; false where there is none of its dtype.
    pub(crate) fn put(&mut self, backend: &B, into: &Source<B>) -> Result<bool, ShardError> {
        let Some(lent) = self.lent.take() else {
            return Ok(false);
        };
        let Some(buffers) = Rearranged::values(lent.values(), into) else {
            return Ok(false);
        };
        let key = (into.span(backend), lent.id());
        let known = self.plans.iter().position(|(known, _)| *known == key);
        let index = match known {
            Some(index) => index,
            None => {
                let copies = vec![self.runs];
                let job = RearrangeJob { copies, buffers };
                let plan = backend.plan(Work::Rearrange(vec![job]))?;
                self.plans.push((key, plan));
                self.plans.len() - 1
            }
        };
        backend.run(&self.plans[index].1, &StepScalars::default())?;
        Ok(true)
    }
}
