//! [`Reduction`]: sums that are the same bits on every engine. The ranks exchange their parts, and the one that receives a sum adds them in
//! rank order, in one pass.

use std::ops::Range;

use lowp_comm::{CommError, GradWire, ReduceItem, ReduceStaging, spanned};
use lowp_kernels::{
    Backend, ConvertJob, Cuda, CudaPlan, FloatDtype, KernelError, OwnPart, Source, SumPartsJob,
    Work,
};

use crate::plans::run;
use crate::raw::{Calls, RankOf};
use crate::staging::Staging;

/// What adding the parts of `item` stages.
fn needed(
    item: &ReduceItem<'_, Cuda>,
    wire: GradWire,
    RankOf { rank, world }: RankOf,
) -> ReduceStaging {
    let (len, own) = (spanned(item.ranges).len(), item.ranges[rank].len());
    ReduceStaging::of_parts(item.grad.dtype(), wire, len, own, world)
}

/// Elements of the memory where the parts of a range of `own` arrive: nothing arrives at a rank that is alone.
fn arriving(world: usize, own: usize) -> usize {
    if world > 1 { world * own } else { 0 }
}

/// One item: what is sent to each rank, and what each rank sends.
#[derive(Debug)]
struct Item {
    /// Parts of this rank's gradient, by the rank that they are sent to.
    to: Vec<Source<Cuda>>,
    /// Parts of this rank's range, by the rank that they come from; its own where it lies.
    from: Vec<Source<Cuda>>,
}

fn send(part: &Source<Cuda>, calls: &Calls, peer: usize) -> Result<(), KernelError> {
    match part {
        Source::F32(values) => calls.send(values, peer),
        Source::Bf16(values) => calls.send(values, peer),
    }
}

fn recv(part: &Source<Cuda>, calls: &Calls, peer: usize) -> Result<(), KernelError> {
    match part {
        Source::F32(values) => calls.recv(values, peer),
        Source::Bf16(values) => calls.recv(values, peer),
    }
}

/// A planned exchange of parts, and their sums.
#[derive(Debug)]
pub(crate) struct Reduction {
    rank: usize,
    items: Vec<Item>,
    /// Gradients to the dtype of the wire.
    convert: CudaPlan,
    add: CudaPlan,
}

impl Reduction {
    /// Of `items`, as this rank has them.
    pub(crate) fn new(
        cuda: &Cuda,
        staging: &Staging,
        items: &[ReduceItem<'_, Cuda>],
        wire: GradWire,
        of: RankOf,
    ) -> Result<Self, CommError> {
        let RankOf { rank, world } = of;
        let (mut planned, mut convert, mut add) = (vec![], vec![], vec![]);
        let mut used = ReduceStaging::default();
        for item in items {
            let elements = spanned(item.ranges);
            let (len, own) = (elements.len(), item.ranges[rank].len());
            let grad = item.grad.view(cuda, elements.clone())?;
            let place = |range: &Range<usize>| match range.is_empty() {
                true => 0..0,
                false => range.start - elements.start..range.end - elements.start,
            };
            let sent = match (grad, wire) {
                (Source::F32(grad), GradWire::Bf16) => {
                    let narrow = Staging::view(
                        cuda,
                        staging.narrow.as_ref(),
                        FloatDtype::Bf16,
                        used.narrow..used.narrow + len,
                    )?;
                    convert.push(ConvertJob {
                        from: Source::F32(grad),
                        into: narrow.clone(),
                    });
                    narrow
                }
                (grad, _) => grad,
            };
            let dtype = usize::from(sent.dtype() == FloatDtype::Bf16);
            let (memory, start) = (staging.arrivals[dtype].as_ref(), used.arrivals[dtype]);
            let arriving = start..start + arriving(world, own);
            let received = Staging::view(cuda, memory, sent.dtype(), arriving)?;
            let (mut to, mut from) = (vec![], vec![]);
            for (peer, range) in item.ranges.iter().enumerate() {
                to.push(sent.view(cuda, place(range))?);
                from.push(if peer == rank {
                    sent.view(cuda, place(range))?
                } else {
                    received.view(cuda, peer * own..(peer + 1) * own)?
                });
            }
            used = [used, needed(item, wire, of)].into_iter().sum();
            let own = sent.view(cuda, place(&item.ranges[rank]))?;
            // The part of a rank that is alone is the sum.
            let (parts, own) = match world {
                1 => (own, None),
                _ => (
                    received,
                    Some(OwnPart {
                        number: rank,
                        values: own,
                    }),
                ),
            };
            add.push(SumPartsJob {
                parts,
                count: world,
                own,
                into: item.out.clone(),
                accumulate: item.accumulate,
            });
            planned.push(Item { to, from });
        }
        let convert = cuda.plan(Work::Convert(convert))?;
        let add = cuda.plan(Work::SumParts(add))?;
        Ok(Self {
            rank,
            items: planned,
            convert,
            add,
        })
    }

    pub(crate) fn convert(&self, cuda: &Cuda) -> Result<(), CommError> {
        run(cuda, &self.convert)
    }

    /// What sending uses.
    pub(crate) fn memory(&self) -> Vec<Source<Cuda>> {
        let parts = self
            .items
            .iter()
            .flat_map(|item| item.to.iter().chain(&item.from));
        parts.cloned().collect()
    }

    /// Sends and receives all parts but the rank's own.
    pub(crate) fn send_parts(&self, calls: &Calls) -> Result<(), KernelError> {
        for item in &self.items {
            for (peer, (to, from)) in item.to.iter().zip(&item.from).enumerate() {
                if peer != self.rank {
                    send(to, calls, peer)?;
                    recv(from, calls, peer)?;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn add(&self, cuda: &Cuda) -> Result<(), CommError> {
        run(cuda, &self.add)
    }
}
