//! [`Batch`]: a reduce-scatter that was planned once. Gradients that ranks own uneven parts of first get the sums of even ones, which are then
//! passed on to their owners.

use std::ops::Range;
use std::sync::Arc;

use lowp_comm::{
    Adder, CommError, GradWire, ReduceItem, ReduceStaging, StagedGrad, Traffic, UnevenRun, even,
    spanned,
};
use lowp_kernels::{Backend, Cuda, CudaBuffer, CudaPlan, KernelError, Source};

use crate::parts::Reduction;
use crate::peer_sums::PeerSums;
use crate::peers::Peers;
use crate::plans::run_if;
use crate::raw::{Calls, Op, RankOf};
use crate::staging::{Arrivals, Staging};
use crate::uneven::Delivery;

/// How the sums of a batch are made.
pub(crate) enum Method<'a> {
    /// By NCCL, of gradients in f32, each with its memory.
    Library(Vec<&'a CudaBuffer<f32>>),
    /// By the rank that receives the parts.
    Receiver,
    /// By the rank that owns the sums, which reads the parts in the memory of all ranks.
    Peers(Arc<Peers>),
}

/// What was planned.
#[derive(Debug)]
pub(crate) struct Batch {
    /// The elements that ranks own, by gradient: other calls with the same buffers may have others.
    owned: Vec<Vec<Range<usize>>>,
    even: EvenSums,
    /// None where ranks own even parts of all gradients.
    pub(crate) delivery: Option<Delivery>,
    /// What a rank sends.
    pub(crate) traffic: Traffic,
}

/// How sums of even parts are made.
#[derive(Debug)]
enum EvenSums {
    Library(LibrarySums),
    Receiver(Reduction),
    Peers(PeerSums, Arc<Peers>),
}

/// Sums in NCCL's order.
#[derive(Debug)]
struct LibrarySums {
    /// Gradients of even parts, and where this rank's sums arrive.
    scattered: Vec<[CudaBuffer<f32>; 2]>,
    /// Elements that are summed on all ranks, and where.
    whole: Vec<[CudaBuffer<f32>; 2]>,
    /// What arrived, to earlier sums.
    add: Option<CudaPlan>,
}

impl Method<'_> {
    fn adder(&self) -> Adder {
        match self {
            Self::Library(_) => Adder::Library,
            Self::Receiver => Adder::Receiver,
            Self::Peers(_) => Adder::Reader,
        }
    }

    /// The runs of a batch.
    pub(crate) fn runs(&self, items: &[ReduceItem<'_, Cuda>], world: usize) -> Vec<UnevenRun> {
        let batch = items.iter().map(|item| (item.memory, item.ranges));
        UnevenRun::find(&batch.collect::<Vec<_>>(), world, self.adder())
    }

    /// What a batch stages.
    pub(crate) fn staging(
        &self,
        items: &[ReduceItem<'_, Cuda>],
        wire: GradWire,
        runs: &[UnevenRun],
        RankOf { rank, world }: RankOf,
    ) -> ReduceStaging {
        let grads = items.iter().map(|item| StagedGrad {
            dtype: item.grad.dtype(),
            wire,
            len: spanned(item.ranges).len(),
            own: item.ranges[rank].len(),
            accumulate: item.accumulate,
        });
        ReduceStaging::of_batch(&grads.collect::<Vec<_>>(), runs, self.adder(), rank, world)
    }
}

impl Batch {
    /// Of `items`, with their `runs`, as this rank has them; `staging` has room for it.
    pub(crate) fn new(
        cuda: &Cuda,
        staging: &Staging,
        items: &[ReduceItem<'_, Cuda>],
        wire: GradWire,
        method: &Method<'_>,
        runs: Vec<UnevenRun>,
        of: RankOf,
    ) -> Result<Self, CommError> {
        let rank = of.rank;
        let lens = runs
            .iter()
            .map(|run| [run.parts[rank].len(), run.remainder.len()]);
        let passed_on = staging.passed_on(cuda, lens)?;
        let even = match method {
            Method::Library(grads) => {
                let planned = LibrarySums::new(cuda, staging, items, grads, &runs, &passed_on);
                EvenSums::Library(planned?)
            }
            Method::Peers(peers) => {
                let planned = PeerSums::new(cuda, staging, items, wire, of);
                EvenSums::Peers(planned?, Arc::clone(peers))
            }
            Method::Receiver => {
                let mut batch: Vec<_> = UnevenRun::others(&runs, items.len())
                    .map(|item| ReduceItem { ..items[item] })
                    .collect();
                let of_run = runs
                    .iter()
                    .zip(&passed_on)
                    .map(|(run, [sums, _])| ReduceItem {
                        ranges: &run.parts,
                        out: sums,
                        accumulate: false,
                        ..items[run.items.start]
                    });
                batch.extend(of_run);
                let planned = Reduction::new(cuda, staging, &batch, wire, of);
                EvenSums::Receiver(planned?)
            }
        };
        let delivery = match runs.is_empty() {
            true => None,
            false => Some(Delivery::new(
                cuda, staging, items, &runs, &passed_on, rank,
            )?),
        };
        let on_wire = items
            .iter()
            .map(|item| (item.ranges, item.wire(wire).bytes()));
        Ok(Self {
            traffic: Traffic::of_reduction(&on_wire.collect::<Vec<_>>(), &runs, rank),
            owned: items.iter().map(|item| item.ranges.to_vec()).collect(),
            even,
            delivery,
        })
    }

    /// Whether it was planned for these ranges.
    pub(crate) fn is_of(&self, items: &[ReduceItem<'_, Cuda>]) -> bool {
        let owned = self.owned.iter().map(Vec::as_slice);
        owned.eq(items.iter().map(|item| item.ranges))
    }

    /// Before ranks send anything.
    pub(crate) fn begin(&self, cuda: &Cuda) -> Result<(), CommError> {
        match &self.even {
            EvenSums::Library(_) => Ok(()),
            EvenSums::Receiver(parts) => parts.convert(cuda),
            EvenSums::Peers(sums, _) => sums.convert(cuda),
        }
    }

    /// Sums of parts that ranks read and do not send.
    pub(crate) fn of_peers(&self) -> Option<(&PeerSums, &Arc<Peers>)> {
        match &self.even {
            EvenSums::Peers(sums, peers) => Some((sums, peers)),
            EvenSums::Library(_) | EvenSums::Receiver(_) => None,
        }
    }

    /// What the sums of even parts use.
    pub(crate) fn memory(&self) -> Vec<Source<Cuda>> {
        match &self.even {
            EvenSums::Library(sums) => {
                let all = sums.scattered.iter().chain(&sums.whole).flatten();
                all.map(|values| Source::F32(values.clone())).collect()
            }
            EvenSums::Receiver(parts) => parts.memory(),
            EvenSums::Peers(..) => Vec::new(),
        }
    }

    pub(crate) fn send(&self, calls: &Calls) -> Result<(), KernelError> {
        match &self.even {
            EvenSums::Library(sums) => sums.send(calls),
            EvenSums::Receiver(parts) => parts.send_parts(calls),
            EvenSums::Peers(..) => Ok(()),
        }
    }

    /// After the ranks have sent: adds what was received, so that the sums of even parts are there.
    pub(crate) fn end(&self, cuda: &Cuda) -> Result<(), CommError> {
        match &self.even {
            EvenSums::Library(sums) => run_if(cuda, sums.add.as_ref()),
            EvenSums::Receiver(parts) => parts.add(cuda),
            EvenSums::Peers(..) => Ok(()),
        }
    }
}

impl LibrarySums {
    /// Of gradients with their memory, and of runs with where the sums of each arrive.
    fn new(
        cuda: &Cuda,
        staging: &Staging,
        items: &[ReduceItem<'_, Cuda>],
        grads: &[&CudaBuffer<f32>],
        runs: &[UnevenRun],
        passed_on: &[[CudaBuffer<f32>; 2]],
    ) -> Result<Self, CommError> {
        let others: Vec<usize> = UnevenRun::others(runs, items.len()).collect();
        let outs = others.iter().map(|&item| &items[item]);
        let outs = outs.map(|item| (item.out, item.accumulate));
        let Arrivals { into, add } = staging.arrivals(cuda, outs)?;
        let (mut scattered, mut whole) = (vec![], vec![]);
        for (item, into) in others.into_iter().zip(into) {
            let all = even(items[item].ranges).ok_or_else(|| CommError::ItemLength {
                op: "reduce-scatter of even parts",
                item,
                what: "a gradient of uneven parts",
                found: grads[item].len(),
                needed: 0,
            })?;
            scattered.push([cuda.view(grads[item], all)?, into]);
        }
        for (run, [sums, of_remainder]) in runs.iter().zip(passed_on) {
            let grad = grads[run.items.start];
            let parts = run.elements().start..run.remainder.start;
            scattered.push([cuda.view(grad, parts)?, sums.clone()]);
            whole.push([
                cuda.view(grad, run.remainder.clone())?,
                of_remainder.clone(),
            ]);
        }
        Ok(Self {
            scattered,
            whole,
            add,
        })
    }

    fn send(&self, calls: &Calls) -> Result<(), KernelError> {
        for [grad, sums] in &self.scattered {
            calls.reduce_scatter(grad, sums)?;
        }
        for [grad, sums] in &self.whole {
            calls.all_reduce(grad, sums, &Op::Sum)?;
        }
        Ok(())
    }
}
