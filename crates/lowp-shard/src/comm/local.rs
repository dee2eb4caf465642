//! [`LocalComm`]: ranks as threads of one process.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lowp_kernels::Backend;

use super::hub::Hub;
use super::post::{Op, Payload, Post};
use super::{Communicator, GatherItem, GradWire, ReduceItem, Traffic};
use crate::ShardError;

mod reduce;

use reduce::Scratch;

/// One rank of a group of threads. Data move between the ranks' buffers by the backend, without
/// staging for gathers.
///
/// Every rank has a handle of its own to the backend. What a collective reads of another rank is
/// ordered behind the work that this rank's handle was given before the call, and what the rank
/// gives its handle after the call is ordered behind the reads. So a rank does all its work through
/// the handle that its communicator was made with (or clones of it), or orders other handles with
/// [`Backend::wait_for`].
///
/// A rank makes one call at a time: threads that share it take turns, also in different groups.
/// Ranks that wait for each other, each in another group, are an error at once.
///
/// Results do not depend on timing: every sum is taken in rank order. A rank whose last
/// communicator is dropped while others wait for it is an error on those.
#[derive(Debug)]
pub struct LocalComm<B: Backend> {
    world: Arc<WorldRank<B>>,
    group: usize,
    rank: usize,
    size: usize,
    counters: Counters,
}

/// A rank's place in the world, shared by its communicators of all groups.
#[derive(Debug)]
struct WorldRank<B: Backend> {
    hub: Arc<Hub<B>>,
    world_rank: usize,
    backend: B,
    /// Locked for the length of a call in any group: the hub takes it that a rank which waits makes
    /// no other call.
    scratch: Mutex<Scratch>,
}

impl<B: Backend> Drop for WorldRank<B> {
    fn drop(&mut self) {
        self.hub.depart(self.world_rank, std::thread::panicking());
    }
}

#[derive(Debug, Default)]
struct Counters {
    all_gather: AtomicU64,
    reduce_scatter: AtomicU64,
    all_reduce: AtomicU64,
    calls: AtomicU64,
}

fn count(counter: &AtomicU64, bytes: usize) {
    counter.fetch_add(bytes as u64, Ordering::Relaxed);
}

impl<B: Backend> LocalComm<B> {
    /// A world of one rank: collectives return at once.
    pub fn solo(backend: &B) -> Self {
        let hub = Arc::new(Hub::new(1, Duration::MAX));
        let world = WorldRank {
            hub,
            world_rank: 0,
            backend: backend.clone(),
            scratch: Mutex::default(),
        };
        Self::new(Arc::new(world), 0, 0, 1)
    }

    /// A world of `n` ranks, in rank order, that share one handle. Every wait ends after `timeout`.
    pub fn world(backend: &B, n: usize, timeout: Duration) -> Vec<LocalComm<B>> {
        Self::world_on(&vec![backend.clone(); n], timeout)
    }

    /// A world of as many ranks as there are `backends`: handles of one device, each that of one
    /// rank, in rank order. Every wait ends after `timeout`.
    pub fn world_on(backends: &[B], timeout: Duration) -> Vec<LocalComm<B>> {
        let n = backends.len();
        let hub = Arc::new(Hub::new(n, timeout));
        let ranks = backends.iter().cloned().enumerate();
        ranks
            .map(|(rank, backend)| {
                let world = Arc::new(WorldRank {
                    hub: Arc::clone(&hub),
                    world_rank: rank,
                    backend,
                    scratch: Mutex::default(),
                });
                Self::new(world, 0, rank, n)
            })
            .collect()
    }

    fn new(world: Arc<WorldRank<B>>, group: usize, rank: usize, size: usize) -> Self {
        Self {
            world,
            group,
            rank,
            size,
            counters: Counters::default(),
        }
    }

    /// Where ranks find each other, which outlives its ranks.
    pub(super) fn hub(&self) -> Arc<Hub<B>> {
        Arc::clone(&self.world.hub)
    }

    fn begin(&self) -> MutexGuard<'_, Scratch> {
        // Scratch holds no state between calls, so a thread that panicked leaves nothing behind.
        let scratch = self.world.scratch.lock();
        scratch.unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells all ranks that this one cannot go on, and returns its error.
    fn reject(&self, error: ShardError) -> ShardError {
        self.abort(&error.to_string());
        error
    }

    /// This rank's part in a call of `items` items.
    fn post(&self, op: Op, items: usize, lengths: Vec<usize>, payload: Payload<B>) -> Post<B> {
        Post {
            op,
            lengths,
            items,
            payload,
            backend: self.backend().clone(),
        }
    }

    /// One collective: posts, runs `work` on all ranks' posts, and waits for all to be done.
    fn exchange<T>(
        &self,
        post: Post<B>,
        work: impl FnOnce(&[Arc<Post<B>>]) -> Result<T, ShardError>,
    ) -> Result<T, ShardError> {
        let hub = &self.world.hub;
        // A world of one has nobody to meet.
        if self.size == 1 && post.op != Op::Split {
            hub.failure().map_or(Ok(()), Err)?;
            return work(&[Arc::new(post)]).map_err(|e| self.reject(e));
        }
        let op = post.op;
        let posts = hub.arrive(self.group, self.rank, post)?;
        let result = self.follow(&posts).and_then(|()| work(&posts));
        let result = result.map_err(|e| self.reject(e))?;
        hub.finish(self.group, self.rank, op)?;
        // The others were given their reads of this rank's buffers; what comes next may change them.
        self.follow(&posts).map_err(|e| self.reject(e))?;
        Ok(result)
    }

    /// Orders this rank's handle behind the work that the others were given so far.
    fn follow(&self, posts: &[Arc<Post<B>>]) -> Result<(), ShardError> {
        for (rank, post) in posts.iter().enumerate() {
            if rank != self.rank && post.payload.has_buffers() {
                self.backend().wait_for(&post.backend)?;
            }
        }
        Ok(())
    }

    /// Whether the source of `item` is already the bytes `range` of its destination.
    fn in_place(&self, item: &GatherItem<'_, B>, range: &Range<usize>) -> bool {
        let span = |buffer| self.backend().span::<u8>(buffer);
        let (source, dest) = (span(item.source), span(item.dest));
        !range.is_empty() && source.start == dest.start + range.start
    }

    /// Rejects ranges for another number of ranks, and buffers of another length than they say.
    fn check_item(
        &self,
        op: Op,
        item: usize,
        ranges: &[Range<usize>],
        (what, found): (&'static str, usize),
    ) -> Result<(), ShardError> {
        if ranges.len() != self.size {
            let what = format!("{}, item {item}", op.name());
            let error = ShardError::World {
                what,
                found: ranges.len(),
                world: self.size,
            };
            return Err(self.reject(error));
        }
        let needed = ranges[self.rank].len();
        if found != needed {
            let op = op.name();
            return Err(self.reject(ShardError::ItemLength {
                op,
                item,
                what,
                needed,
                found,
            }));
        }
        Ok(())
    }
}

impl<B: Backend> From<LocalComm<B>> for Arc<dyn Communicator<B>> {
    fn from(comm: LocalComm<B>) -> Self {
        Arc::new(comm)
    }
}

/// The lengths of `ranges`, for comparing calls.
fn lengths<'a>(ranges: impl Iterator<Item = &'a [Range<usize>]>) -> Vec<usize> {
    ranges.flatten().map(ExactSizeIterator::len).collect()
}

impl<B: Backend> Communicator<B> for LocalComm<B> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.size
    }

    fn backend(&self) -> &B {
        &self.world.backend
    }

    /// Ranks wait for each other on the host; the only rank of a world waits for nobody.
    fn is_enqueued(&self) -> bool {
        self.world.hub.is_solo()
    }

    fn all_gather(&self, items: &[GatherItem<'_, B>]) -> Result<(), ShardError> {
        let _call = self.begin();
        let backend = self.backend();
        for (i, item) in items.iter().enumerate() {
            let source = ("the source", backend.len(item.source));
            self.check_item(Op::AllGather, i, item.ranges, source)?;
        }
        let sources = items.iter().map(|i| i.source.clone()).collect();
        let lengths = lengths(items.iter().map(|i| i.ranges));
        let post = self.post(Op::AllGather, items.len(), lengths, Payload::Bytes(sources));
        self.exchange(post, |posts| {
            for (i, item) in items.iter().enumerate() {
                // Starting at the own rank spreads the ranks over the sources.
                for rank in (self.rank..self.size).chain(0..self.rank) {
                    let range = &item.ranges[rank];
                    if rank == self.rank && self.in_place(item, range) {
                        count(&self.counters.all_gather, range.len());
                        continue;
                    }
                    if let (Payload::Bytes(sources), false) =
                        (&posts[rank].payload, range.is_empty())
                    {
                        backend.copy(&sources[i], 0..range.len(), item.dest, range.start)?;
                    }
                    if rank == self.rank {
                        count(&self.counters.all_gather, range.len());
                    }
                }
            }
            Ok(())
        })?;
        count(&self.counters.calls, 1);
        Ok(())
    }

    fn reduce_scatter(
        &self,
        items: &[ReduceItem<'_, B>],
        wire: GradWire,
    ) -> Result<(), ShardError> {
        let scratch = &mut *self.begin();
        let op = Op::ReduceScatter(wire);
        for (i, item) in items.iter().enumerate() {
            self.check_item(
                op,
                i,
                item.ranges,
                ("the output", self.backend().len(item.out)),
            )?;
            let needed = item.ranges.iter().map(|r| r.end).max().unwrap_or(0);
            let found = self.backend().len(item.grad);
            if found < needed {
                let (op, what) = (op.name(), "the gradient");
                let error = ShardError::ItemLength {
                    op,
                    item: i,
                    what,
                    needed,
                    found,
                };
                return Err(self.reject(error));
            }
        }
        let grads = items.iter().map(|i| i.grad.clone()).collect();
        let lengths = lengths(items.iter().map(|i| i.ranges));
        let post = self.post(op, items.len(), lengths, Payload::Floats(grads));
        self.exchange(post, |posts| {
            for (i, item) in items.iter().enumerate() {
                self.reduce_item(posts, i, item, wire, scratch)?;
            }
            Ok(())
        })?;
        count(&self.counters.calls, 1);
        Ok(())
    }

    fn all_reduce_max(&self, values: &B::Buffer<f32>) -> Result<(), ShardError> {
        self.all_reduce(Op::AllReduceMax, values, f32::max)
    }

    fn all_reduce_sum(&self, values: &B::Buffer<f32>) -> Result<(), ShardError> {
        self.all_reduce(Op::AllReduceSum, values, |a, b| a + b)
    }

    fn all_reduce_sum_f64(&self, values: &mut [f64]) -> Result<(), ShardError> {
        let _call = self.begin();
        let payload = Payload::Doubles(values.to_vec());
        let post = self.post(Op::AllReduceSumF64, 1, vec![values.len()], payload);
        self.exchange(post, |posts| {
            for (rank, post) in posts.iter().enumerate() {
                if let Payload::Doubles(theirs) = &post.payload {
                    for (sum, &x) in values.iter_mut().zip(theirs) {
                        *sum = if rank == 0 { x } else { *sum + x };
                    }
                }
            }
            Ok(())
        })?;
        count(&self.counters.all_reduce, 8 * values.len());
        count(&self.counters.calls, 1);
        Ok(())
    }

    fn agree(&self, what: &str, description: &str) -> Result<(), ShardError> {
        let _call = self.begin();
        let (what, description) = (what.to_owned(), description.to_owned());
        let payload = Payload::Text { what, description };
        self.exchange(self.post(Op::Agree, 0, Vec::new(), payload), |_| Ok(()))
    }

    fn barrier(&self) -> Result<(), ShardError> {
        let _call = self.begin();
        let post = self.post(Op::Barrier, 0, Vec::new(), Payload::Nothing);
        self.exchange(post, |_| Ok(()))
    }

    fn abort(&self, message: &str) {
        if self.world.hub.is_solo() {
            return;
        }
        let (rank, message) = (self.world.world_rank, message.to_owned());
        self.world.hub.fail(ShardError::Failed { rank, message });
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<B>>, ShardError> {
        let _call = self.begin();
        let post = self.post(Op::Split, 0, Vec::new(), Payload::Split { color, key });
        let comm = self.exchange(post, |_| {
            let state = self.world.hub.lock();
            let (group, rank) = state.groups[self.group].assigned[self.rank];
            let size = state.groups[group].members.len();
            Ok(Self::new(Arc::clone(&self.world), group, rank, size))
        })?;
        Ok(Arc::new(comm))
    }

    fn traffic(&self) -> Traffic {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            all_gather_bytes: read(&self.counters.all_gather),
            reduce_scatter_bytes: read(&self.counters.reduce_scatter),
            all_reduce_bytes: read(&self.counters.all_reduce),
            calls: read(&self.counters.calls),
        }
    }
}
