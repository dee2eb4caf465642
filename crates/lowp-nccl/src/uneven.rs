//! [`Delivery`]: the sums of even parts go to the ranks that own uneven ones ([`UnevenRun`]).

use std::ops::Range;

use lowp_comm::{CommError, Move, ReduceItem, UnevenRun};
use lowp_kernels::{Backend, ConvertJob, Cuda, CudaBuffer, CudaPlan, KernelError, Source, Work};

use crate::plans::run_if;
use crate::raw::Calls;
use crate::staging::{Arrivals, Staging};

/// What goes from the ranks that have sums to those that own them, planned.
#[derive(Debug)]
pub(crate) struct Delivery {
    /// To each peer.
    sent: Vec<(usize, CudaBuffer<f32>)>,
    /// From each peer.
    received: Vec<(usize, CudaBuffer<f32>)>,
    /// What this rank has and owns, to where it belongs.
    copy: Option<CudaPlan>,
    /// What arrived, to earlier sums.
    add: Option<CudaPlan>,
}

impl Delivery {
    /// Of the sums of `runs` of a batch, by run those of this rank's part and of the elements after all parts.
    pub(crate) fn new(
        cuda: &Cuda,
        staging: &Staging,
        items: &[ReduceItem<'_, Cuda>],
        runs: &[UnevenRun],
        sums: &[[CudaBuffer<f32>; 2]],
        rank: usize,
    ) -> Result<Self, KernelError> {
        let owned: Vec<_> = items.iter().map(|item| item.ranges).collect();
        let in_runs = runs.iter().flat_map(|run| &items[run.items.clone()]);
        let outs = in_runs.map(|item| (item.out, item.accumulate));
        let Arrivals { into, add } = staging.arrivals(cuda, outs)?;
        let mut into = into.as_slice();
        let (mut sent, mut received, mut copies) = (vec![], vec![], vec![]);
        for (run, [sums, remainder]) in runs.iter().zip(sums) {
            let (of_run, others) = into.split_at(run.items.len());
            into = others;
            let own = |item: usize, elements: &Range<usize>| {
                let place = &of_run[item - run.items.start];
                part_of(cuda, place, owned[item][rank].start, elements)
            };
            let first = run.parts[rank].start;
            for Move { peer, elements, .. } in run.sent(&owned, rank) {
                sent.push((peer, part_of(cuda, sums, first, &elements)?));
            }
            for Move {
                peer,
                item,
                elements,
            } in run.received(&owned, rank)
            {
                let place = own(item, &elements)?;
                if peer == rank {
                    copies.push([part_of(cuda, sums, first, &elements)?, place]);
                } else {
                    received.push((peer, place));
                }
            }
            for (item, elements) in run.of_remainder(&owned, rank) {
                let from = part_of(cuda, remainder, run.remainder.start, &elements)?;
                copies.push([from, own(item, &elements)?]);
            }
        }
        let jobs = copies.into_iter().map(|copy| {
            let [from, into] = copy.map(Source::F32);
            ConvertJob { from, into }
        });
        let jobs: Vec<_> = jobs.collect();
        let copy = (!jobs.is_empty()).then(|| cuda.plan(Work::Convert(jobs)));
        Ok(Self {
            sent,
            received,
            copy: copy.transpose()?,
            add,
        })
    }

    /// What sending uses.
    pub(crate) fn memory(&self) -> Vec<CudaBuffer<f32>> {
        let all = self.sent.iter().chain(&self.received);
        all.map(|(_, values)| values.clone()).collect()
    }

    pub(crate) fn send(&self, calls: &Calls) -> Result<(), KernelError> {
        for (peer, values) in &self.sent {
            calls.send(values, *peer)?;
        }
        for (peer, values) in &self.received {
            calls.recv(values, *peer)?;
        }
        Ok(())
    }

    /// After the ranks have sent: adds and copies what was received, so that the sums are where they belong.
    pub(crate) fn end(&self, cuda: &Cuda) -> Result<(), CommError> {
        run_if(cuda, self.copy.as_ref())?;
        run_if(cuda, self.add.as_ref())
    }
}

/// These elements of a memory, of a buffer that begins at element `start` of it.
fn part_of(
    cuda: &Cuda,
    buffer: &CudaBuffer<f32>,
    start: usize,
    elements: &Range<usize>,
) -> Result<CudaBuffer<f32>, KernelError> {
    cuda.view(buffer, elements.start - start..elements.end - start)
}
