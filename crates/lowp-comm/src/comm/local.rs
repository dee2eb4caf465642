//! [`LocalComm`]: ranks as threads of one process.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lowp_kernels::{Backend, Source};

use super::{Collective, Communicator, Counters, Direction, GatherItem, OwnedItem, Traffic};
use crate::control::call::Call;
use crate::control::local::LocalControl;
use crate::control::post::{Payload, Post};
use crate::{CommError, Control, or_abort};

mod reduce;

use reduce::Scratch;

/// One rank of a group of threads. Data move between the ranks' buffers by the backend, without
/// staging for gathers.
///
/// Every rank has a handle of its own to the backend. What a collective reads of another rank is
/// ordered after the work that this rank's handle was given before the call, and what the rank
/// gives its handle after the call is ordered after the reads. So a rank does all its work through
/// the handle that its communicator was made with (or clones of it), or orders other handles with
/// [`Backend::wait_for`].
///
/// A rank makes one call at a time: threads that share it call one after the other, also in different groups.
/// Ranks that wait for each other, each in another group, are an error at once.
///
/// Results do not depend on timing: every sum is taken in rank order. A rank whose last
/// communicator is dropped while others wait for it is an error on those.
#[derive(Debug)]
pub struct LocalComm<B: Backend> {
    control: LocalControl<Brought<B>>,
    backend: B,
    scratch: Arc<Mutex<Scratch>>,
    counters: Counters,
}

/// What a rank brings to a round.
#[derive(Clone, Debug)]
enum Brought<B: Backend> {
    Host(Vec<u8>),
    /// Buffers that other ranks read, written by work of this handle.
    Bytes(Vec<B::Buffer<u8>>, B),
    Floats(Vec<Source<B>>, B),
}

impl<B: Backend> Payload for Brought<B> {
    fn of_bytes(bytes: Vec<u8>) -> Self {
        Brought::Host(bytes)
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Brought::Host(bytes) => bytes,
            Brought::Bytes(..) | Brought::Floats(..) => &[],
        }
    }
}

impl<B: Backend> LocalComm<B> {
    /// A world of one rank: collectives return at once.
    pub fn solo(backend: &B) -> Self {
        let control = LocalControl::world(1, Duration::MAX).swap_remove(0);
        Self::new(control, backend.clone(), Arc::default())
    }

    /// A world of `n` ranks, in rank order, that share one handle. Every wait ends after `timeout`.
    pub fn world(backend: &B, n: usize, timeout: Duration) -> Vec<LocalComm<B>> {
        Self::world_on(&vec![backend.clone(); n], timeout)
    }

    /// A world of as many ranks as there are `backends`: handles of one device, each that of one
    /// rank, in rank order. Every wait ends after `timeout`.
    pub fn world_on(backends: &[B], timeout: Duration) -> Vec<LocalComm<B>> {
        let ranks = LocalControl::world(backends.len(), timeout).into_iter();
        let backends = backends.iter().cloned();
        ranks
            .zip(backends)
            .map(|(control, backend)| Self::new(control, backend, Arc::default()))
            .collect()
    }

    fn new(control: LocalControl<Brought<B>>, backend: B, scratch: Arc<Mutex<Scratch>>) -> Self {
        Self {
            control,
            backend,
            scratch,
            counters: Counters::default(),
        }
    }

    /// One collective: brings `payload`, runs `work` on what all ranks brought, and waits for all to be done.
    fn round(
        &self,
        call: Call,
        payload: Brought<B>,
        work: impl FnOnce(&[Post<Brought<B>>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        // A world of one has nobody to meet.
        if self.world_size() == 1 {
            self.control.failure().map_or(Ok(()), Err)?;
            return work(&[Post { call, payload }]);
        }
        let done = Call {
            done: true,
            ..call.clone()
        };
        let round = self.control.meet(call, payload)?;
        self.follow(&round.posts)?;
        or_abort(self, work(&round.posts))?;
        self.control.meet(done, Brought::Host(Vec::new()))?;
        // The others were given their reads of this rank's buffers; what comes next may change them.
        self.follow(&round.posts)
    }

    /// Orders this rank's handle after the work that the others were given so far.
    fn follow(&self, posts: &[Post<Brought<B>>]) -> Result<(), CommError> {
        for (rank, post) in posts.iter().enumerate() {
            match &post.payload {
                Brought::Bytes(_, theirs) | Brought::Floats(_, theirs) if rank != self.rank() => {
                    self.backend.wait_for(theirs)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether the source of `item` is already the bytes `range` of its destination.
    fn in_place(&self, item: &GatherItem<'_, B>, range: &Range<usize>) -> bool {
        let span = |buffer| self.backend.span::<u8>(buffer);
        let (source, dest) = (span(item.source), span(item.dest));
        !range.is_empty() && source.start == dest.start + range.start
    }

    fn all_gather_by_copies(
        &self,
        call: Call,
        items: &[GatherItem<'_, B>],
    ) -> Result<(), CommError> {
        let (rank, world) = (self.rank(), self.world_size());
        let sources = items.iter().map(|i| i.source.clone()).collect();
        let brought = Brought::Bytes(sources, self.backend.clone());
        self.round(call, brought, |posts| {
            for (i, item) in items.iter().enumerate() {
                // Starting at the own rank spreads the ranks over the sources.
                for from in (rank..world).chain(0..rank) {
                    let range = &item.ranges[from];
                    if from == rank && self.in_place(item, range) {
                        continue;
                    }
                    if let (Brought::Bytes(sources, _), false) =
                        (&posts[from].payload, range.is_empty())
                    {
                        self.backend
                            .copy(&sources[i], 0..range.len(), item.dest, range.start)?;
                    }
                }
            }
            Ok(())
        })
    }

    fn move_owned(
        &self,
        call: Call,
        items: &[OwnedItem<'_, B>],
        direction: Direction,
    ) -> Result<(), CommError> {
        let (rank, world) = (self.rank(), self.world_size());
        let source = |item: &OwnedItem<'_, B>| match direction {
            Direction::ToOwners => item.piece.clone(),
            Direction::FromOwners => item.whole.clone(),
        };
        let sources = items.iter().map(|item| Source::Bf16(source(item)));
        let brought = Brought::Floats(sources.collect(), self.backend.clone());
        self.round(call, brought, |posts| {
            let own = items.iter().filter(|item| item.owner == rank);
            own.clone()
                .try_for_each(|item| item.copy_own(&self.backend, direction))?;
            let others = (0..world).filter(|&from| from != rank);
            for piece in others.flat_map(|from| direction.sent(items, from)) {
                let [from, to] = direction.ends(items, piece);
                let Brought::Floats(sources, _) = &posts[from].payload else {
                    continue;
                };
                let (Source::Bf16(source), true) = (&sources[piece.item], to == rank) else {
                    continue;
                };
                let item = &items[piece.item];
                let elements = item.ranges[piece.of].clone();
                let read = match direction {
                    Direction::ToOwners => 0..elements.len(),
                    Direction::FromOwners => elements,
                };
                let place = item.place(&self.backend, rank, piece.of)?;
                self.backend.copy(source, read, &place, 0)?;
            }
            Ok(())
        })
    }
}

impl<B: Backend> From<LocalComm<B>> for Arc<dyn Communicator<B>> {
    fn from(comm: LocalComm<B>) -> Self {
        Arc::new(comm)
    }
}

impl<B: Backend> Communicator<B> for LocalComm<B> {
    fn control(&self) -> &dyn Control {
        &self.control
    }

    fn backend(&self) -> &B {
        &self.backend
    }

    /// Ranks wait for each other on the host; the only rank of a world waits for nobody.
    fn is_enqueued(&self) -> bool {
        self.control.is_solo()
    }

    fn enqueue(&self, label: &str, batch: Collective<'_, B>) -> Result<(), CommError> {
        let _turn = self.control.turn();
        let run = || {
            batch.check(&self.backend, self.rank(), self.world_size())?;
            let call = batch.call(label, &self.backend);
            let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
            match batch {
                Collective::AllGather(items) => self.all_gather_by_copies(call, items),
                Collective::ReduceScatter(items, wire) => {
                    self.sum_ranges(call, items, wire, &mut scratch)
                }
                Collective::Owned(items, direction) => self.move_owned(call, items, direction),
                Collective::Max(values) => self.fold(call, &[values], f32::max, &mut scratch),
                Collective::Sum(buffers) => self.fold(call, buffers, |a, b| a + b, &mut scratch),
            }
        };
        or_abort(self, run())?;
        self.counters.add(&self.backend, self.rank(), batch);
        Ok(())
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<B>>, CommError> {
        let control = self.control.split_local(color, key)?;
        let scratch = Arc::clone(&self.scratch);
        Ok(Arc::new(Self::new(control, self.backend.clone(), scratch)))
    }

    fn count(&self, sent: Traffic) {
        self.counters.repeat(sent);
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}
