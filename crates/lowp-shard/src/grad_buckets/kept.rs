//! [`KeptGrads`]: the gradients of a bucket that stay on the rank from micro-batch to micro-batch, f32.

use std::collections::HashMap;
use std::ops::Range;

use lowp_kernels::{
    Backend, ConvertJob, FloatDtype, KernelError, Source, StepScalars, SumJob, Work,
};

use crate::ShardError;
use lowp_comm::Started;

/// Most plans that are kept: a bucket whose parameters have gradients in other micro-batches each time plans anew.
const MOST: usize = 64;

/// A gradient that is added to what is kept of its parameter, or kept as the first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Addition {
    /// Where the parameter is in the bucket.
    pub(super) place: Range<usize>,
    /// Whether something is kept there.
    pub(super) adds: bool,
}

/// Memory of one bucket, for as long as there are buckets.
#[derive(Debug)]
pub(super) struct KeptGrads<B: Backend> {
    values: Source<B>,
    /// What reads it since it was sent.
    reader: Option<Started<B>>,
    /// By where the memory begins that is added, and what of it.
    plans: HashMap<(usize, Vec<Addition>), [B::Plan; 2]>,
}

impl<B: Backend> KeptGrads<B> {
    pub(super) fn new(backend: &B, len: usize) -> Result<Self, ShardError> {
        let values = Source::alloc(backend, FloatDtype::F32, len);
        let bytes = size_of::<f32>() * len;
        Ok(Self {
            values: values.map_err(|source| ShardError::KeptGrads { bytes, source })?,
            reader: None,
            plans: HashMap::new(),
        })
    }

    /// The kept gradients of the whole bucket.
    pub(super) fn values(&self) -> &Source<B> {
        &self.values
    }

    /// The kept gradient at `place`.
    pub(super) fn at(&self, backend: &B, place: Range<usize>) -> Result<Source<B>, KernelError> {
        self.values.view(backend, place)
    }

    /// Has later work of the stream, which may write it, follow what reads it.
    pub(super) fn follow_reader(&mut self, backend: &B) -> Result<(), ShardError> {
        if let Some(reader) = self.reader.take() {
            reader.wait(backend)?;
        }
        Ok(())
    }

    /// Adds parts of `bucket`, which lie there as they lie here.
    pub(super) fn add(
        &mut self,
        backend: &B,
        bucket: &Source<B>,
        additions: Vec<Addition>,
    ) -> Result<(), ShardError> {
        self.follow_reader(backend)?;
        let key = (bucket.span(backend).start, additions);
        if !self.plans.contains_key(&key) {
            if self.plans.len() == MOST {
                self.plans.clear();
            }
            let planned = self.plan(backend, bucket, &key.1)?;
            self.plans.insert(key.clone(), planned);
        }
        for plan in &self.plans[&key] {
            backend.run(plan, &StepScalars::default())?;
        }
        Ok(())
    }

    fn plan(
        &self,
        backend: &B,
        bucket: &Source<B>,
        additions: &[Addition],
    ) -> Result<[B::Plan; 2], KernelError> {
        let (mut sums, mut firsts) = (Vec::new(), Vec::new());
        for Addition { place, adds } in additions {
            let from = bucket.view(backend, place.clone())?;
            let into = self.at(backend, place.clone())?;
            match adds {
                true => sums.push(SumJob { from, into }),
                false => firsts.push(ConvertJob { from, into }),
            }
        }
        Ok([
            backend.plan(Work::Sum(sums))?,
            backend.plan(Work::Convert(firsts))?,
        ])
    }

    /// Says that what the stream is given from now on follows the reader.
    pub(super) fn followed(&mut self) {
        self.reader = None;
    }

    /// Says that `reader` reads the kept gradients.
    pub(super) fn sent(&mut self, reader: Started<B>) {
        self.reader = Some(reader);
    }

    pub(super) fn bytes(&self, backend: &B) -> usize {
        size_of::<f32>() * self.values.len(backend)
    }
}
