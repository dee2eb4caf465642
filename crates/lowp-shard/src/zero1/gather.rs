//! [`FlatGather`]: full weights of what every rank cast of them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lowp_kernels::{Backend, StepScalars, TransposeJob, Work};

use super::FlatParam;
use super::moves::Moves;
use crate::{CastRange, FlatShard, ScaleBook, ShardError};
use lowp_comm::{Communicator, GatherItem, or_abort, ordered};

/// The gather of flat weights, and the derived buffers after it: for who casts their items
/// ([`FlatParam::item`]) beside others, as an optimizer does. [`FlatWeights`](crate::FlatWeights) is both.
#[derive(Debug)]
pub struct FlatGather<B: Backend> {
    backend: B,
    pub(super) comm: Arc<dyn Communicator<B>>,
    moves: Moves<B>,
    /// Work after the gather: what arrived in the order of rows goes into that of columns.
    turned: Option<B::Plan>,
    /// Work after that: makes the buffers that follow from others.
    derived: Option<B::Plan>,
    staged_bytes: usize,
    sent: AtomicU64,
    /// Nanoseconds that the host spent in gathers.
    nanoseconds: AtomicU64,
}

impl<B: Backend> FlatGather<B> {
    /// Plans the gather of `params`, whose entries are in `book`, among the ranks of `comm`. Collective: ranks tell each other which
    /// elements they own. From then on the book agrees on the amaxes of blocks that are on cuts, and not on those that a rank has whole:
    /// their scales are gathered.
    ///
    /// # Errors
    /// Ranks with other parameters, slices that do not cover a matrix in rank order, or buffers that two
    /// parameters share, on every rank.
    pub fn new(
        backend: &B,
        comm: &Arc<dyn Communicator<B>>,
        book: &ScaleBook<B>,
        params: &[FlatParam<B>],
    ) -> Result<Self, ShardError> {
        let shards = or_abort(&**comm, all_shards(&**comm, params))?;
        or_abort(&**comm, Self::plan(backend, comm, book, params, &shards))
    }

    fn plan(
        backend: &B,
        comm: &Arc<dyn Communicator<B>>,
        book: &ScaleBook<B>,
        params: &[FlatParam<B>],
        shards: &[Vec<FlatShard>],
    ) -> Result<Self, ShardError> {
        // Of one device, or the ranks hear of it.
        ordered(backend, &**comm, || Ok(()))?;
        let mut moves = Moves::new(backend, comm.rank());
        let mut whole = Vec::new();
        for (param, shards) in params.iter().zip(shards) {
            for (code, data) in &param.data {
                let stored: Vec<FlatShard> = shards.iter().map(|s| s.stored_as(*code)).collect();
                moves.add(data, &stored)?;
            }
            for (spec, scales) in &param.scales {
                let block = spec.tile;
                let blocks = shards.iter().map(|shard| shard.whole_blocks(block));
                let blocks: Vec<Range<usize>> = blocks.collect();
                moves.add_blocks(scales, &blocks, spec.code.bytes(1))?;
            }
            if let CastRange::Flat { blocks, .. } = &param.item.range {
                for (slots, part) in blocks.iter().zip(book.block_amaxes(blocks)?) {
                    let own = shards.iter().map(|s| s.whole_blocks(slots.block()));
                    whole.extend(own.map(|r| part.start + r.start..part.start + r.end));
                }
            }
        }
        moves.plan()?;
        book.agree_without(whole)?;
        let jobs: [Vec<TransposeJob<B>>; 2] = [
            params.iter().flat_map(|p| p.turned.clone()).collect(),
            params.iter().flat_map(|p| p.derived.clone()).collect(),
        ];
        let [turned, derived] = jobs.map(|jobs| match jobs.is_empty() {
            true => Ok(None),
            false => backend.plan(Work::Transpose(jobs)).map(Some),
        });
        Ok(Self {
            backend: backend.clone(),
            comm: Arc::clone(comm),
            moves,
            turned: turned?,
            derived: derived?,
            staged_bytes: params.iter().map(FlatParam::staged_bytes).sum(),
            sent: AtomicU64::new(0),
            nanoseconds: AtomicU64::new(0),
        })
    }

    /// Brings the elements of all ranks together. Collective.
    ///
    /// # Errors
    /// The backend or a rank failed.
    pub fn gather(&self) -> Result<(), ShardError> {
        let begun = Instant::now();
        let gathered = self.try_gather();
        let nanoseconds = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        or_abort(&*self.comm, gathered)
    }

    /// How long the host was in gathers so far: where calls are only enqueued, not how long they took.
    pub fn host_time(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed))
    }

    fn try_gather(&self) -> Result<(), ShardError> {
        let none = StepScalars::default();
        if let Some(plan) = &self.moves.before {
            self.backend.run(plan, &none)?;
        }
        let items: Vec<GatherItem<'_, B>> = self.moves.items().collect();
        if !items.is_empty() {
            let before = self.comm.traffic();
            ordered(&self.backend, &*self.comm, || self.comm.all_gather(&items))?;
            let sent = self.comm.traffic().since(before).all_gather_bytes;
            self.sent.fetch_add(sent, Ordering::Relaxed);
        }
        if let Some(plan) = &self.moves.after {
            self.backend.run(plan, &none)?;
        }
        Ok(())
    }

    /// Makes the buffers that follow from others of the full weights, where those were written by other means than a gather. Not
    /// collective.
    ///
    /// # Errors
    /// The backend failed.
    pub fn derive(&self) -> Result<(), ShardError> {
        match &self.derived {
            Some(plan) => Ok(self.backend.run(plan, &StepScalars::default())?),
            None => Ok(()),
        }
    }

    /// Makes the derived buffers of what was gathered. Not collective.
    ///
    /// # Errors
    /// The backend failed.
    pub fn post_all_gather(&self) -> Result<(), ShardError> {
        if let Some(plan) = &self.turned {
            self.backend.run(plan, &StepScalars::default())?;
        }
        self.derive()
    }

    /// [`FlatGather::gather`] and [`FlatGather::post_all_gather`]. Collective.
    ///
    /// # Errors
    /// As they.
    pub fn run(&self) -> Result<(), ShardError> {
        self.gather()?;
        or_abort(&*self.comm, self.post_all_gather())
    }

    /// Bytes that this rank puts on the wire in one gather: its whole bytes, and a byte for every half.
    pub fn sent_bytes(&self) -> usize {
        self.moves.sent_bytes()
    }

    /// Bytes of buffers beside the weights' own ([`FlatParam::staged_bytes`]).
    pub fn staged_bytes(&self) -> usize {
        self.staged_bytes
    }

    /// Bytes that this rank sent so far, counted by the communicator.
    pub fn counted_sent_bytes(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

/// The slices that all ranks have of each parameter, which cover it in rank order.
fn all_shards<B: Backend>(
    comm: &dyn Communicator<B>,
    params: &[FlatParam<B>],
) -> Result<Vec<Vec<FlatShard>>, ShardError> {
    let texts: Vec<&str> = params.iter().map(|p| p.text.as_str()).collect();
    comm.control()
        .all_equal("the flat weights", &texts.join("; "))?;
    let (world, rank) = (comm.world_size(), comm.rank());
    // Both ends of every slice, by parameter and rank. Elements are counted exactly in binary64 (Shape::check).
    let mut ends = vec![0f64; 2 * world * params.len()];
    for (index, param) in params.iter().enumerate() {
        let elements = param.shard.elements();
        let at = 2 * (index * world + rank);
        ends[at] = elements.start as f64;
        ends[at + 1] = elements.end as f64;
    }
    comm.control().sum(&mut ends)?;
    let of_param = |(param, ends): (&FlatParam<B>, &[f64])| {
        let (shape, code) = (param.shard.shape(), param.shard.code());
        let mut at = 0;
        let shards = ends.chunks_exact(2).map(|ends| {
            let (start, end) = (ends[0] as usize, ends[1] as usize);
            // Where nothing begins does not matter.
            let own = if start == end { at..at } else { start..end };
            at = own.end;
            FlatShard::new(shape, code, own)
        });
        let shards = shards.collect::<Result<Vec<_>, ShardError>>()?;
        FlatShard::check_tiling(&shards)?;
        Ok(shards)
    };
    params
        .iter()
        .zip(ends.chunks_exact(2 * world))
        .map(of_param)
        .collect()
}
