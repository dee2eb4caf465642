//! [`RankOrder`]: sums that are the same bits on every engine. The ranks exchange their parts, and the one that receives a
//! sum adds them in rank order.

use std::ops::Range;

use half::bf16;
use lowp_kernels::{
    Backend, ConvertJob, Cuda, CudaBuffer, CudaPlan, FloatDtype, KernelError, Source, StepScalars,
    SumJob, Work,
};
use lowp_shard::{GradWire, ReduceItem, ShardError};

use crate::raw::Calls;

/// Most batches that are kept: callers whose gradients move all the time plan anew.
const MOST: usize = 256;

/// What was planned, by the buffers that it is planned for.
#[derive(Debug, Default)]
pub(crate) struct RankOrder {
    reductions: Vec<(Vec<Place>, Reduction)>,
    sums: Vec<(Range<usize>, WholeSum)>,
}

/// What makes one item of a batch another one.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    grad: Range<usize>,
    dtype: FloatDtype,
    out: Range<usize>,
    ranges: Vec<Range<usize>>,
    wire: GradWire,
    accumulate: bool,
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

/// A planned reduce-scatter of a batch.
#[derive(Debug)]
pub(crate) struct Reduction {
    rank: usize,
    items: Vec<Item>,
    /// Gradients to the dtype of the wire.
    convert: CudaPlan,
    /// The sums, one rank after the other.
    add: Vec<CudaPlan>,
}

/// A planned sum of vectors.
#[derive(Debug)]
pub(crate) struct WholeSum {
    all: CudaBuffer<f32>,
    add: Vec<CudaPlan>,
}

fn run(cuda: &Cuda, plan: &CudaPlan) -> Result<(), ShardError> {
    Ok(cuda.run(plan, &StepScalars::default())?)
}

impl Reduction {
    pub(crate) fn convert(&self, cuda: &Cuda) -> Result<(), ShardError> {
        run(cuda, &self.convert)
    }

    /// What the exchange uses.
    pub(crate) fn memory(&self) -> Vec<Source<Cuda>> {
        let parts = self
            .items
            .iter()
            .flat_map(|item| item.to.iter().chain(&item.from));
        parts.cloned().collect()
    }

    /// Sends and receives all parts but the rank's own.
    pub(crate) fn exchange(&self, calls: &Calls) -> Result<(), KernelError> {
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

    pub(crate) fn add(&self, cuda: &Cuda) -> Result<(), ShardError> {
        self.add.iter().try_for_each(|plan| run(cuda, plan))
    }
}

impl WholeSum {
    /// Where the vectors of all ranks come together.
    pub(crate) fn all(&self) -> &CudaBuffer<f32> {
        &self.all
    }

    pub(crate) fn add(&self, cuda: &Cuda) -> Result<(), ShardError> {
        self.add.iter().try_for_each(|plan| run(cuda, plan))
    }
}

impl RankOrder {
    /// The reduce-scatter of `items`, planned the first time.
    pub(crate) fn reduce(
        &mut self,
        cuda: &Cuda,
        items: &[ReduceItem<'_, Cuda>],
        wire: GradWire,
        rank: usize,
        world: usize,
    ) -> Result<&Reduction, ShardError> {
        let places: Vec<Place> = items
            .iter()
            .map(|item| Place {
                grad: item.grad.span(cuda),
                dtype: item.grad.dtype(),
                out: cuda.span(item.out),
                ranges: item.ranges.to_vec(),
                wire,
                accumulate: item.accumulate,
            })
            .collect();
        let found = self
            .reductions
            .iter()
            .position(|(known, _)| *known == places);
        let at = match found {
            Some(at) => at,
            None => {
                let made = reduction(cuda, items, wire, rank, world)?;
                if self.reductions.len() == MOST {
                    self.reductions.remove(0);
                }
                self.reductions.push((places, made));
                self.reductions.len() - 1
            }
        };
        Ok(&self.reductions[at].1)
    }

    /// The sum of `values`, planned the first time.
    pub(crate) fn sum(
        &mut self,
        cuda: &Cuda,
        values: &CudaBuffer<f32>,
        world: usize,
    ) -> Result<&WholeSum, ShardError> {
        let span = cuda.span(values);
        let found = self.sums.iter().position(|(known, _)| *known == span);
        let at = match found {
            Some(at) => at,
            None => {
                let len = values.len();
                let all = cuda.alloc::<f32>(world * len)?;
                let mut parts = Vec::new();
                for rank in 0..world {
                    let part = cuda.view(&all, rank * len..(rank + 1) * len)?;
                    parts.push(Source::F32(part));
                }
                let add = sums(cuda, vec![(parts, values.clone())])?;
                if self.sums.len() == MOST {
                    self.sums.remove(0);
                }
                self.sums.push((span, WholeSum { all, add }));
                self.sums.len() - 1
            }
        };
        Ok(&self.sums[at].1)
    }
}

fn reduction(
    cuda: &Cuda,
    items: &[ReduceItem<'_, Cuda>],
    wire: GradWire,
    rank: usize,
    world: usize,
) -> Result<Reduction, ShardError> {
    let (mut planned, mut convert, mut add, mut into) = (vec![], vec![], vec![], vec![]);
    for item in items {
        let end = item.ranges.iter().map(|range| range.end).max().unwrap_or(0);
        let grad = item.grad.view(cuda, 0..end)?;
        let own = item.ranges[rank].len();
        let sent = match (grad, wire) {
            (Source::F32(grad), GradWire::Bf16) => {
                let narrow = cuda.alloc::<bf16>(end)?;
                convert.push(ConvertJob {
                    from: Source::F32(grad),
                    into: Source::Bf16(narrow.clone()),
                });
                Source::Bf16(narrow)
            }
            (grad, _) => grad,
        };
        let received = Source::alloc(cuda, sent.dtype(), world * own)?;
        let (mut to, mut from) = (vec![], vec![]);
        for (peer, range) in item.ranges.iter().enumerate() {
            to.push(sent.view(cuda, range.clone())?);
            from.push(if peer == rank {
                sent.view(cuda, range.clone())?
            } else {
                received.view(cuda, peer * own..(peer + 1) * own)?
            });
        }
        let sum = if item.accumulate {
            let sum = cuda.alloc::<f32>(own)?;
            into.push(SumJob {
                from: Source::F32(sum.clone()),
                into: Source::F32(item.out.clone()),
            });
            sum
        } else {
            item.out.clone()
        };
        add.push((from.clone(), sum));
        planned.push(Item { to, from });
    }
    let convert = cuda.plan(Work::Convert(convert))?;
    let mut add = sums(cuda, add)?;
    add.push(cuda.plan(Work::Sum(into))?);
    Ok(Reduction {
        rank,
        items: planned,
        convert,
        add,
    })
}

/// Plans that add the parts of every vector in rank order: the first is taken as it is.
fn sums(
    cuda: &Cuda,
    vectors: Vec<(Vec<Source<Cuda>>, CudaBuffer<f32>)>,
) -> Result<Vec<CudaPlan>, ShardError> {
    let ranks = vectors.first().map_or(0, |(parts, _)| parts.len());
    let mut plans = Vec::new();
    for rank in 0..ranks {
        let of_rank = vectors.iter().map(|(parts, into)| {
            let (from, into) = (parts[rank].clone(), Source::F32(into.clone()));
            (from, into)
        });
        let work = if rank == 0 {
            Work::Convert(
                of_rank
                    .map(|(from, into)| ConvertJob { from, into })
                    .collect(),
            )
        } else {
            Work::Sum(of_rank.map(|(from, into)| SumJob { from, into }).collect())
        };
        plans.push(cuda.plan(work)?);
    }
    Ok(plans)
}
