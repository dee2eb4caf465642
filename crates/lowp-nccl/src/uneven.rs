//! [`Uneven`]: the gradients of a batch of which ranks own uneven parts ([`UnevenRun`]). They are summed in even parts, which go to their
//! owners then.

use lowp_comm::{Adds, CommError, Move, ReduceItem, UnevenRun};
use lowp_kernels::{Backend, Cuda, CudaBuffer, KernelError, Source};

use crate::rank_order::RankOrder;
use crate::raw::{Calls, Op};

/// The runs of a batch.
#[derive(Debug)]
pub(crate) struct Uneven {
    runs: Vec<UnevenRun>,
    /// By run: the sums of this rank's part, and of the rest.
    sums: Vec<[CudaBuffer<f32>; 2]>,
    rank: usize,
}

/// What goes from the ranks that have sums to those that own them.
#[derive(Debug, Default)]
pub(crate) struct Delivery {
    /// To each peer.
    sent: Vec<(usize, CudaBuffer<f32>)>,
    /// From each peer.
    received: Vec<(usize, CudaBuffer<f32>)>,
    /// What this rank has and owns: from where, and to where.
    copied: Vec<[CudaBuffer<f32>; 2]>,
}

impl Uneven {
    /// Those of `items`, as rank `rank` of `world` has them.
    pub(crate) fn new(
        cuda: &Cuda,
        items: &[ReduceItem<'_, Cuda>],
        adds: Adds,
        (rank, world): (usize, usize),
        ordered: &mut RankOrder,
    ) -> Result<Self, CommError> {
        let memory = |item: &ReduceItem<'_, Cuda>| (item.grad.span(cuda), item.grad.dtype());
        let batch = items.iter().map(|item| (memory(item), item.ranges));
        let runs = UnevenRun::find(&batch.collect::<Vec<_>>(), world, adds);
        let lens = runs
            .iter()
            .map(|run| [run.parts[rank].len(), run.rest.len()]);
        let sums = ordered.even_sums(cuda, &lens.collect::<Vec<_>>())?;
        Ok(Self { runs, sums, rank })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Whether gradient `item` of the batch is in a run.
    pub(crate) fn has(&self, item: usize) -> bool {
        self.runs.iter().any(|run| run.items.contains(&item))
    }

    /// The batch in even parts: each run as one gradient.
    pub(crate) fn in_even_parts<'a>(
        &'a self,
        items: &[ReduceItem<'a, Cuda>],
    ) -> Vec<ReduceItem<'a, Cuda>> {
        let others = items
            .iter()
            .enumerate()
            .filter(|(item, _)| !self.has(*item));
        let others = others.map(|(_, item)| ReduceItem { ..*item });
        let runs = self
            .runs
            .iter()
            .zip(&self.sums)
            .map(|(run, [sums, _])| ReduceItem {
                grad: items[run.items.start].grad,
                ranges: &run.parts,
                out: sums,
                accumulate: false,
            });
        others.chain(runs).collect()
    }

    /// The rest after the parts of gradients in f32, and where its sums go on all ranks.
    pub(crate) fn rests(
        &self,
        cuda: &Cuda,
        items: &[ReduceItem<'_, Cuda>],
    ) -> Result<Vec<[CudaBuffer<f32>; 2]>, KernelError> {
        let mut rests = Vec::new();
        for (run, [_, sums]) in self.runs.iter().zip(&self.sums) {
            if let Source::F32(grad) = items[run.items.start].grad {
                rests.push([cuda.view(grad, run.rest.clone())?, sums.clone()]);
            }
        }
        Ok(rests)
    }

    /// How the sums reach their owners: those of this rank go to `into`, by item.
    pub(crate) fn delivery(
        &self,
        cuda: &Cuda,
        items: &[ReduceItem<'_, Cuda>],
        into: &[&CudaBuffer<f32>],
    ) -> Result<Delivery, KernelError> {
        let rank = self.rank;
        let batch: Vec<_> = items.iter().map(|item| item.ranges).collect();
        let part_of = |buffer, start: usize, elements: std::ops::Range<usize>| {
            cuda.view(buffer, elements.start - start..elements.end - start)
        };
        let own = |item: usize, elements| part_of(into[item], batch[item][rank].start, elements);
        let mut delivery = Delivery::default();
        for (run, [sums, rest]) in self.runs.iter().zip(&self.sums) {
            let part = run.parts[rank].start;
            for Move { peer, elements, .. } in run.sent(&batch, rank) {
                delivery.sent.push((peer, part_of(sums, part, elements)?));
            }
            for Move {
                peer,
                item,
                elements,
            } in run.received(&batch, rank)
            {
                let place = own(item, elements.clone())?;
                if peer == rank {
                    let from = part_of(sums, part, elements)?;
                    delivery.copied.push([from, place]);
                } else {
                    delivery.received.push((peer, place));
                }
            }
            for (item, elements) in run.of_rest(&batch, rank) {
                let from = part_of(rest, run.rest.start, elements.clone())?;
                delivery.copied.push([from, own(item, elements)?]);
            }
        }
        Ok(delivery)
    }
}

impl Delivery {
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

    pub(crate) fn copy(&self, cuda: &Cuda) -> Result<(), KernelError> {
        for [from, into] in &self.copied {
            cuda.copy(from, 0..from.len(), into, 0)?;
        }
        Ok(())
    }
}

/// Sums the rests over the ranks, on all of them.
pub(crate) fn sum_rests(rests: &[[CudaBuffer<f32>; 2]], calls: &Calls) -> Result<(), KernelError> {
    let mut each = rests.iter();
    each.try_for_each(|[from, into]| calls.all_reduce(from, into, &Op::Sum))
}
