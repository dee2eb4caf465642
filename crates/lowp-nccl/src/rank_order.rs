//! [`RankOrder`]: sums that are the same bits on every engine. The ranks exchange their parts, and the one that receives a
//! sum adds them in rank order, in one pass. Also sums of NCCL that are added to earlier ones.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use lowp_comm::{CommError, GradWire, ReduceItem, ReduceStaging, spanned};
use lowp_kernels::{
    Backend, ConvertJob, Cuda, CudaBuffer, CudaPlan, FloatDtype, KernelError, Source, StepScalars,
    SumJob, SumPartsJob, Work,
};

use crate::raw::Calls;

/// Most batches that are kept: callers whose gradients move all the time plan anew.
const MOST: usize = 4096;

/// What was planned, by the buffers that it is planned for. All of it works in one memory, in turn, on one stream.
#[derive(Debug, Default)]
pub(crate) struct RankOrder {
    reductions: HashMap<Vec<Place>, Reduction>,
    additions: HashMap<Vec<[Range<usize>; 2]>, Addition>,
    sums: HashMap<Range<usize>, WholeSum>,
    staging: Staging,
}

/// Memory between what arrives and the sums. Graphs keep what it was when they were captured.
#[derive(Debug, Default)]
struct Staging {
    /// Parts that arrive, by dtype.
    arrivals: [Option<Source<Cuda>>; 2],
    /// Gradients in the dtype of the wire.
    narrow: Option<Source<Cuda>>,
    /// Sums of NCCL that are added to others.
    added: Option<Source<Cuda>>,
    /// Sums of even parts, on their way to the ranks that own uneven ones.
    passed_on: Option<Source<Cuda>>,
}

/// What adding the parts of `item` stages.
fn needed(
    item: &ReduceItem<'_, Cuda>,
    wire: GradWire,
    (rank, world): (usize, usize),
) -> ReduceStaging {
    let lens = (spanned(item.ranges).len(), item.ranges[rank].len());
    ReduceStaging::of_parts((item.grad.dtype(), wire), lens, world)
}

impl Staging {
    /// Makes room for `needed`. Whether it moved: plans over what it was are of no use.
    fn hold(&mut self, cuda: &Cuda, needed: ReduceStaging) -> Result<bool, KernelError> {
        let [wide, narrow] = needed.arrivals;
        let [arrive_wide, arrive_narrow] = &mut self.arrivals;
        let mut moved = false;
        for (place, dtype, len) in [
            (arrive_wide, FloatDtype::F32, wide),
            (arrive_narrow, FloatDtype::Bf16, narrow),
            (&mut self.narrow, FloatDtype::Bf16, needed.narrow),
            (&mut self.added, FloatDtype::F32, needed.added),
            (&mut self.passed_on, FloatDtype::F32, needed.passed_on),
        ] {
            let has = place.as_ref().map_or(0, |memory| memory.len(cuda));
            if has < len {
                *place = Some(Source::alloc(cuda, dtype, len)?);
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Elements from `start` on of a memory that holds them.
    fn view(
        cuda: &Cuda,
        memory: Option<&Source<Cuda>>,
        dtype: FloatDtype,
        (start, len): (usize, usize),
    ) -> Result<Source<Cuda>, KernelError> {
        match memory {
            Some(memory) => memory.view(cuda, start..start + len),
            None => Source::alloc(cuda, dtype, 0),
        }
    }
}

/// Elements of the memory where the parts of a range of `own` arrive: nothing arrives at a rank that is alone.
fn arriving(world: usize, own: usize) -> usize {
    if world > 1 { world * own } else { 0 }
}

/// What makes one item of a batch another one.
#[derive(Debug, PartialEq, Eq, Hash)]
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
    add: CudaPlan,
}

/// Where NCCL's sums arrive, and their planned addition to earlier ones.
#[derive(Debug)]
pub(crate) struct Addition {
    /// By item.
    pub(crate) sums: Vec<CudaBuffer<f32>>,
    add: CudaPlan,
}

/// A planned sum of vectors.
#[derive(Debug)]
pub(crate) struct WholeSum {
    all: Source<Cuda>,
    add: CudaPlan,
}

fn run(cuda: &Cuda, plan: &CudaPlan) -> Result<(), CommError> {
    Ok(cuda.run(plan, &StepScalars::default())?)
}

impl Reduction {
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

impl Addition {
    pub(crate) fn add(&self, cuda: &Cuda) -> Result<(), CommError> {
        run(cuda, &self.add)
    }
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
    pub(crate) fn reduce(
        &mut self,
        cuda: &Cuda,
        items: &[ReduceItem<'_, Cuda>],
        wire: GradWire,
        rank: usize,
        world: usize,
    ) -> Result<&Reduction, CommError> {
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
        let each = items.iter().map(|item| needed(item, wire, (rank, world)));
        self.hold(cuda, each.sum())?;
        if self.reductions.len() == MOST && !self.reductions.contains_key(&places) {
            self.reductions.clear();
        }
        Ok(match self.reductions.entry(places) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                place.insert(reduction(cuda, &self.staging, items, wire, rank, world)?)
            }
        })
    }

    fn hold(&mut self, cuda: &Cuda, needed: ReduceStaging) -> Result<(), CommError> {
        if self.staging.hold(cuda, needed)? {
            self.reductions.clear();
            self.additions.clear();
            self.sums.clear();
        }
        Ok(())
    }

    /// Memory for the sums of parts and of rests of these lengths.
    pub(crate) fn even_sums(
        &mut self,
        cuda: &Cuda,
        lens: &[[usize; 2]],
    ) -> Result<Vec<[CudaBuffer<f32>; 2]>, CommError> {
        let staged = |&[part, rest]: &[usize; 2]| ReduceStaging::of_run(part, rest);
        self.hold(cuda, lens.iter().map(staged).sum())?;
        let mut start = 0;
        let mut place = |len: usize| {
            let view = start..start + len;
            start += ReduceStaging::of_run(len, 0).passed_on;
            match &self.staging.passed_on {
                Some(Source::F32(memory)) => cuda.view(memory, view),
                _ => cuda.alloc(0),
            }
        };
        let mut sums = Vec::with_capacity(lens.len());
        for &[part, rest] in lens {
            sums.push([place(part)?, place(rest)?]);
        }
        Ok(sums)
    }

    /// Memory for sums of the ranges of `rank` that are added to earlier ones, and their addition, planned the first time; none where none of
    /// `items` is.
    pub(crate) fn additions(
        &mut self,
        cuda: &Cuda,
        items: &[ReduceItem<'_, Cuda>],
        rank: usize,
    ) -> Result<Option<&Addition>, CommError> {
        let later = items.iter().filter(|item| item.accumulate);
        let later: Vec<_> = later.map(|item| ReduceItem { ..*item }).collect();
        match later.is_empty() {
            true => Ok(None),
            false => self.addition(cuda, &later, rank).map(Some),
        }
    }

    fn addition(
        &mut self,
        cuda: &Cuda,
        items: &[ReduceItem<'_, Cuda>],
        rank: usize,
    ) -> Result<&Addition, CommError> {
        let lens = || items.iter().map(|item| item.ranges[rank].len());
        self.hold(cuda, lens().map(ReduceStaging::of_sums).sum())?;
        let places = items
            .iter()
            .map(|item| [item.grad.span(cuda), cuda.span(item.out)]);
        let places: Vec<_> = places.collect();
        if self.additions.len() == MOST && !self.additions.contains_key(&places) {
            self.additions.clear();
        }
        Ok(match self.additions.entry(places) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let (mut sums, mut jobs, mut start) = (vec![], vec![], 0);
                for (item, len) in items.iter().zip(lens()) {
                    let from = Staging::view(
                        cuda,
                        self.staging.added.as_ref(),
                        FloatDtype::F32,
                        (start, len),
                    )?;
                    start += ReduceStaging::of_sums(len).added;
                    if let Source::F32(sum) = &from {
                        sums.push(sum.clone());
                    }
                    let into = Source::F32(item.out.clone());
                    jobs.push(SumJob { from, into });
                }
                let add = cuda.plan(Work::Sum(jobs))?;
                place.insert(Addition { sums, add })
            }
        })
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
                    (0, world * len),
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

fn reduction(
    cuda: &Cuda,
    staging: &Staging,
    items: &[ReduceItem<'_, Cuda>],
    wire: GradWire,
    rank: usize,
    world: usize,
) -> Result<Reduction, CommError> {
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
                    (used.narrow, len),
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
        let received = Staging::view(cuda, memory, sent.dtype(), (start, arriving(world, own)))?;
        let (mut to, mut from) = (vec![], vec![]);
        for (peer, range) in item.ranges.iter().enumerate() {
            to.push(sent.view(cuda, place(range))?);
            from.push(if peer == rank {
                sent.view(cuda, place(range))?
            } else {
                received.view(cuda, peer * own..(peer + 1) * own)?
            });
        }
        used = [used, needed(item, wire, (rank, world))].into_iter().sum();
        let own = sent.view(cuda, place(&item.ranges[rank]))?;
        // The part of a rank that is alone is the sum.
        let (parts, own) = match world {
            1 => (own, None),
            _ => (received, Some((rank, own))),
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
    Ok(Reduction {
        rank,
        items: planned,
        convert,
        add,
    })
}
