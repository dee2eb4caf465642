//! [`RankOrder`]: what was planned of reductions, by the buffers that it is planned for.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use lowp_comm::{CommError, GradWire, ReduceItem, ReduceStaging};
use lowp_kernels::{Backend, Cuda, CudaBuffer, CudaPlan, FloatDtype, Source, SumPartsJob, Work};

use crate::batch::{Batch, Method};
use crate::plans::run;
use crate::raw::RankOf;
use crate::staging::Staging;

/// Most batches that are kept: callers whose gradients move all the time plan anew.
const MOST: usize = 4096;

/// All of them work in one memory, one after the other, on one stream.
#[derive(Debug, Default)]
pub(crate) struct RankOrder {
    batches: HashMap<(GradWire, Vec<Place>), Batch>,
    sums: HashMap<Range<usize>, WholeSum>,
    staging: Staging,
}

/// What makes one item of a batch another one, beside its ranges.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Place {
    grad: Range<usize>,
    memory: usize,
    dtype: FloatDtype,
    out: Range<usize>,
    accumulate: bool,
}

/// A planned sum of vectors.
#[derive(Debug)]
pub(crate) struct WholeSum {
    all: Source<Cuda>,
    add: CudaPlan,
}

impl WholeSum {
    /// Where the vectors of all ranks come together.
    pub(crate) fn all(&self) -> &Source<Cuda> {
        &self.all
    }

    pub(crate) fn add(&self, cuda: &Cuda) -> Result<(), CommError> {
        run(cuda, &self.add)
    }
}

impl RankOrder {
    /// The reduce-scatter of `items`, planned the first time.
    pub(crate) fn batch(
        &mut self,
        cuda: &Cuda,
        items: &[ReduceItem<'_, Cuda>],
        wire: GradWire,
        method: &Method<'_>,
        of: RankOf,
    ) -> Result<&Batch, CommError> {
        let places = items.iter().map(|item| Place {
            grad: item.grad.span(cuda),
            memory: item.memory,
            dtype: item.grad.dtype(),
            out: cuda.span(item.out),
            accumulate: item.accumulate,
        });
        let key = (wire, places.collect());
        let known = self.batches.get(&key);
        if !known.is_some_and(|known| known.is_of(items)) {
            let runs = method.runs(items, of.world);
            self.hold(cuda, method.staging(items, wire, &runs, of))?;
            if self.batches.len() == MOST {
                self.batches.clear();
            }
            let planned = Batch::new(cuda, &self.staging, items, wire, method, runs, of)?;
            self.batches.insert(key.clone(), planned);
        }
        Ok(&self.batches[&key])
    }

    pub(crate) fn forget(&mut self) {
        self.batches.clear();
        self.sums.clear();
    }

    fn hold(&mut self, cuda: &Cuda, needed: ReduceStaging) -> Result<(), CommError> {
        if self.staging.hold(cuda, needed)? {
            self.forget();
        }
        Ok(())
    }

    /// The sum of `values`, planned the first time.
    pub(crate) fn sum(
        &mut self,
        cuda: &Cuda,
        values: &CudaBuffer<f32>,
        world: usize,
    ) -> Result<&WholeSum, CommError> {
        let (span, len) = (cuda.span(values), values.len());
        let needed = ReduceStaging {
            arrivals: [world * len, 0],
            ..ReduceStaging::default()
        };
        self.hold(cuda, needed)?;
        if self.sums.len() == MOST && !self.sums.contains_key(&span) {
            self.sums.clear();
        }
        Ok(match self.sums.entry(span) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let all = Staging::view(
                    cuda,
                    self.staging.arrivals[0].as_ref(),
                    FloatDtype::F32,
                    0..world * len,
                )?;
                let add = cuda.plan(Work::SumParts(vec![SumPartsJob {
                    parts: all.clone(),
                    count: world,
                    own: None,
                    into: values.clone(),
                    accumulate: false,
                }]))?;
                place.insert(WholeSum { all, add })
            }
        })
    }
}
