//! [`GatherPool`]: destination buffers and planned local work, shared by groups of equal geometry.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use lowp_format::BufferKey;
use lowp_kernels::{Backend, FloatDtype};

use super::calls::GatherCalls;
use super::kind::{ByKind, GatherKind, KINDS, KindExchange, ParamPlans, label};
use super::lending::Lending;
use super::messages::MessageMemory;
use super::meter::{Meter, Metered};
use super::scratch::Scratches;
use super::steps::{LocalWork, MemoryStep, PoolBuffer, piece_ranges, pool_buffers};
use crate::ShardError;
use lowp_comm::{CallLog, CallNames, Communicator, CompareAmong, LARGE_PIECE};

/// Where one buffer of one parameter goes.
#[derive(Debug)]
pub(super) struct Move<B: Backend> {
    pub(super) param: usize,
    pub(super) key: BufferKey,
    pub(super) dest: B::Buffer<u8>,
    pub(super) ranges: Vec<Range<usize>>,
    /// Where it begins in the message of each rank, if it travels in one.
    pub(super) packed: Option<Vec<usize>>,
}

/// Messages that are gathered with what goes straight to where it belongs.
#[derive(Debug)]
pub(super) struct Messages<B: Backend> {
    pub(super) buffer: B::Buffer<u8>,
    /// That of each rank.
    pub(super) ranges: Vec<Range<usize>>,
}

/// One gather of a group into one set of destination buffers.
#[derive(Debug)]
pub(super) struct GatherWork<B: Backend> {
    pub(super) moves: Vec<Move<B>>,
    pub(super) messages: Option<Messages<B>>,
    /// Local work after the gather, in order.
    pub(super) local: Vec<B::Plan>,
}

/// Destination buffers of a whole group, for gathers of every kind.
#[derive(Debug)]
pub(super) struct DestinationSet<B: Backend> {
    pub(super) id: u64,
    /// The buffers of each parameter.
    buffers: Vec<NamedBuffers<B>>,
    works: ByKind<GatherWork<B>>,
    /// The bytes of `buffers`.
    _metered: Metered,
}

impl<B: Backend> DestinationSet<B> {
    pub(super) fn work(&self, kind: GatherKind) -> &GatherWork<B> {
        &self.works[kind as usize]
    }

    pub(super) fn buffer(&self, param: usize, key: BufferKey) -> Option<&B::Buffer<u8>> {
        named::<B>(&self.buffers[param], key, false)
    }
}

/// Buffers of one parameter.
type NamedBuffers<B> = Vec<(PoolBuffer, <B as Backend>::Buffer<u8>)>;

/// The full buffer of a key, or where its pieces arrive.
fn named<B: Backend>(
    buffers: &NamedBuffers<B>,
    key: BufferKey,
    arrivals: bool,
) -> Option<&B::Buffer<u8>> {
    let mut buffers = buffers.iter();
    let found = buffers.find(|(known, _)| (known.key, known.arrivals) == (key, arrivals));
    found.map(|(_, buffer)| buffer)
}

/// What groups of equal shapes have in common. It goes with the last of them, and its sets with it.
#[derive(Debug)]
pub(super) struct Geometry<B: Backend> {
    plans: Arc<[ParamPlans]>,
    messages: ByKind<Option<Arc<MessageMemory<B>>>>,
    /// Sets that no group uses at the moment.
    free: Lending<B, DestinationSet<B>>,
}

#[derive(Debug)]
struct Inner<B: Backend> {
    /// Those that a group has, and scratch that somebody has.
    geometries: Vec<Weak<Geometry<B>>>,
    scratches: Vec<Weak<Scratches<B>>>,
    messages: Vec<Weak<MessageMemory<B>>>,
}

/// The memory that gathered weights of one rank live in.
///
/// A group borrows a set of destination buffers when it unshards and gives it back when it
/// reshards, so layers of equal shapes use the same memory one after the other and nothing is allocated
/// from the second step on. A set is lent again after the work of its last user. Local work (interleave, transpose) is planned once per set.
/// When the last group of its shapes is dropped it is freed.
#[derive(Debug)]
pub struct GatherPool<B: Backend> {
    pub(super) backend: B,
    /// Pieces of so many bytes go straight to where they belong.
    pub(super) large: usize,
    meter: Arc<Meter>,
    sets: AtomicU64,
    calls: Arc<GatherCalls>,
    inner: Mutex<Inner<B>>,
}

impl<B: Backend> GatherPool<B> {
    /// An empty pool.
    pub fn new(backend: &B) -> Arc<Self> {
        Self::with_large(backend, LARGE_PIECE)
    }

    /// An empty pool where pieces of `large` bytes go straight to where they belong, and only smaller ones in messages
    /// ([`crate::Exchange::with_large`]).
    pub fn with_large(backend: &B, large: usize) -> Arc<Self> {
        Self::of(backend, large, Arc::default())
    }

    /// An empty pool with memory of its own. Its groups are numbered, and their gathers compared, with those of `self`.
    pub fn beside(&self) -> Arc<Self> {
        Self::of(&self.backend, self.large, Arc::clone(&self.calls))
    }

    fn of(backend: &B, large: usize, calls: Arc<GatherCalls>) -> Arc<Self> {
        let inner = Inner {
            geometries: Vec::new(),
            scratches: Vec::new(),
            messages: Vec::new(),
        };
        Arc::new(Self {
            backend: backend.clone(),
            large,
            meter: Arc::default(),
            sets: AtomicU64::new(0),
            calls,
            inner: Mutex::new(inner),
        })
    }

    /// Number of buffers allocated so far. Constant from the second step on.
    pub fn allocations(&self) -> u64 {
        self.meter.allocations()
    }

    /// Bytes of all buffers of the pool, scratch included. Those of groups that are there no more do not count.
    pub fn resident_bytes(&self) -> usize {
        self.meter.bytes()
    }

    /// The most that [`GatherPool::resident_bytes`] was so far.
    pub fn peak_bytes(&self) -> usize {
        self.meter.most()
    }

    /// Number of destination sets made so far.
    pub fn sets(&self) -> u64 {
        self.sets.load(Ordering::Relaxed)
    }

    /// The number of a new group that uses the pool.
    pub(super) fn next_group(&self) -> u64 {
        self.calls.next_group()
    }

    /// The gathers that the ranks of `comm` made since the last time, those of pools [beside](GatherPool::beside) it too, for
    /// `Optimizer::compare` of lowp-optim: where collectives are only enqueued, ranks that gather groups of equal shapes in another order get
    /// each other's rows, and no step is applied then.
    pub fn gathered(&self, comm: &dyn Communicator<B>) -> CallLog {
        CallLog {
            what: "the gathers of a step",
            among: CompareAmong::Shards,
            order: self.calls.take(comm.control().members()),
            names: CallNames::Gathers(|item| {
                let kind = GatherKind::ALL[(item % KINDS) as usize];
                label(item / KINDS, kind)
            }),
        }
    }

    /// Notes a gather of group `number`.
    pub(super) fn note(&self, comm: &dyn Communicator<B>, number: u64, kind: GatherKind) {
        let item = KINDS * number + kind as u64;
        self.calls.note(comm.control().members(), item);
    }

    /// Scratch of `len` values for who asks, shared with all who ask for as many of the dtype.
    pub fn scratches(&self, dtype: FloatDtype, len: usize) -> Arc<Scratches<B>> {
        let scratches = &mut self.lock().scratches;
        scratches.retain(|known| known.strong_count() > 0);
        let mut known = scratches.iter().filter_map(Weak::upgrade);
        if let Some(found) = known.find(|known| (known.dtype, known.len) == (dtype, len)) {
            return found;
        }
        let new = Arc::new(Scratches::new(&self.backend, &self.meter, dtype, len));
        scratches.push(Arc::downgrade(&new));
        new
    }

    /// A count of bytes of this pool.
    pub(super) fn metered(&self) -> Metered {
        Metered::new(&self.meter)
    }

    /// Changes under this lock are whole even if a backend panicked in between.
    fn lock(&self) -> MutexGuard<'_, Inner<B>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The geometry `plans`, for gathers of these communicators by kind.
    pub(super) fn geometry(
        &self,
        plans: &Arc<[ParamPlans]>,
        comms: ByKind<&Arc<dyn Communicator<B>>>,
    ) -> Arc<Geometry<B>> {
        let bytes =
            GatherKind::ALL.map(|kind| KindExchange::new(plans, kind, self.large).message_bytes());
        let Inner {
            geometries,
            messages,
            ..
        } = &mut *self.lock();
        messages.retain(|known| known.strong_count() > 0);
        let most = bytes.iter().max().copied().unwrap_or(0);
        let messages = GatherKind::ALL.map(|kind| {
            let comm = comms[kind as usize];
            if bytes[kind as usize] == 0 {
                return None;
            }
            let mut known = messages.iter().filter_map(Weak::upgrade);
            let found = known.find(|known| known.serves(comm, most));
            drop(known);
            found.or_else(|| {
                let new = Arc::new(MessageMemory::new(comm, most));
                messages.push(Arc::downgrade(&new));
                Some(new)
            })
        });
        geometries.retain(|known| known.strong_count() > 0);
        let mut known = geometries.iter().filter_map(Weak::upgrade);
        let one_memory = |known: &Geometry<B>| {
            let mut pairs = known.messages.iter().zip(&messages);
            pairs.all(|(a, b)| a.as_ref().map(Arc::as_ptr) == b.as_ref().map(Arc::as_ptr))
        };
        if let Some(found) = known.find(|known| known.plans == *plans && one_memory(known)) {
            return found;
        }
        let new = Arc::new(Geometry {
            plans: Arc::clone(plans),
            messages,
            free: Lending::new(),
        });
        geometries.push(Arc::downgrade(&new));
        new
    }

    /// Borrows a set, made now if none is free, for work of `streams`, the first of which does the
    /// last of it. They follow whoever used the memory before.
    pub(super) fn lease(
        &self,
        geometry: &Arc<Geometry<B>>,
        streams: [&B; 2],
    ) -> Result<Lease<B>, ShardError> {
        let set = match geometry.free.take(&streams)? {
            Some(set) => set,
            None => {
                let set = Arc::new(self.make(geometry)?);
                for stream in streams {
                    stream.wait_for(&self.backend)?;
                }
                set
            }
        };
        Ok(Lease {
            geometry: Arc::clone(geometry),
            set,
            stream: streams[0].clone(),
        })
    }

    fn make(&self, geometry: &Geometry<B>) -> Result<DestinationSet<B>, ShardError> {
        let plans = &*geometry.plans;
        let exchanges = GatherKind::ALL.map(|kind| KindExchange::new(plans, kind, self.large));
        let mut metered = self.metered();
        let mut alloc = |name: PoolBuffer| -> Result<_, ShardError> {
            Ok((name, metered.alloc(&self.backend, name.bytes)?))
        };
        let mut of_param = |param: usize| -> Result<NamedBuffers<B>, ShardError> {
            let of_param = exchanges.iter().flat_map(KindExchange::steps);
            let of_param = of_param.filter(|(number, _)| *number == param);
            let steps = of_param.flat_map(|(_, steps)| steps);
            pool_buffers(steps).into_iter().map(&mut alloc).collect()
        };
        let buffers = (0..plans.len())
            .map(&mut of_param)
            .collect::<Result<Vec<_>, _>>()?;
        let [forward, backward, parts, rest] = GatherKind::ALL.map(|kind| {
            let memory = geometry.messages[kind as usize].as_deref();
            self.work(&exchanges[kind as usize], &buffers, memory)
        });
        Ok(DestinationSet {
            id: 1 + self.sets.fetch_add(1, Ordering::Relaxed),
            buffers,
            works: [forward?, backward?, parts?, rest?],
            _metered: metered,
        })
    }

    fn work(
        &self,
        of_kind: &KindExchange<'_>,
        buffers: &[NamedBuffers<B>],
        memory: Option<&MessageMemory<B>>,
    ) -> Result<GatherWork<B>, ShardError> {
        let memory = memory.map(|memory| memory.buffer(self)).transpose()?;
        let (mut moves, mut local) = (Vec::new(), LocalWork::new());
        let mut starts = of_kind.exchange.starts();
        for (param, steps) in of_kind.steps() {
            let at = |PoolBuffer { key, arrivals, .. }| {
                let found = named::<B>(&buffers[param], key, arrivals).cloned();
                found.ok_or(ShardError::NotGathered { param })
            };
            for step in steps {
                let (spec, to, pieces, packed) = match step {
                    MemoryStep::Fetch { spec, to, pieces } => (spec, to, pieces, None),
                    MemoryStep::Unpack {
                        spec, to, pieces, ..
                    } => (spec, to, pieces, starts.next()),
                    // Of what is equal on all ranks the shard's own buffer serves.
                    step => {
                        local.add(step.clone(), at)?;
                        continue;
                    }
                };
                if let (MemoryStep::Unpack { outer, .. }, Some(messages), Some(starts)) =
                    (step, &memory, &packed)
                {
                    local.unpack(messages, starts, *outer, pieces, at(*to)?);
                }
                moves.push(Move {
                    param,
                    key: spec.key,
                    dest: at(*to)?,
                    ranges: piece_ranges(pieces).collect(),
                    packed,
                });
            }
        }
        let local = local.plan(&self.backend)?;
        let ranges = of_kind.exchange.messages.clone();
        let messages = memory.map(|buffer| Messages { buffer, ranges });
        Ok(GatherWork {
            moves,
            messages,
            local,
        })
    }
}

/// A borrowed set; goes back to the pool when dropped, to be lent after the work that its stream has by
/// then.
#[derive(Debug)]
pub(super) struct Lease<B: Backend> {
    geometry: Arc<Geometry<B>>,
    pub(super) set: Arc<DestinationSet<B>>,
    stream: B,
}

impl<B: Backend> Drop for Lease<B> {
    fn drop(&mut self) {
        self.geometry.free.give_back(&self.set, &self.stream);
    }
}
