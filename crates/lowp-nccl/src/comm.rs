//! [`NcclComm`]: one rank of a group of GPUs.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lowp_comm::{
    Collective, CommError, Communicator, Control, Counters, Direction, GatherItem, GradWire,
    OwnedItem, ReduceItem, Traffic, even, is_large, or_abort, threads,
};
use lowp_kernels::{Backend, Cuda, CudaBuffer, CudaEvent, KernelError, Source};

use crate::batch::Method;
use crate::exit::Abandoned;
use crate::options::{NcclOptions, Sums};
use crate::peers::Peers;
use crate::rank_order::RankOrder;
use crate::raw::{self, ID, Op, RankOf, Raw};
use crate::watchdog::{self, Group as _};

type Watchdog = watchdog::Watchdog<Raw, CudaEvent>;

/// One rank of a group of GPUs, whose data NCCL moves. Every call only enqueues; the first reduction of a group first asks the other ranks where they are.
///
/// Pieces go straight to where they belong, without staging. A batch is one NCCL group, or two where it has large and small
/// pieces. Gradients are added as [`Sums`] says: by GPUs of one process where they lie in each other's memory, which needs no NCCL. Elsewhere those that travel in bfloat16
/// are added in f32 by the rank that receives the sum, in rank order, and where ranks own uneven parts of gradients, each
/// first gets the sums of an even part, and passes them on to their owners ([`lowp_comm::UnevenRun`]).
/// A group of one rank copies, and needs no NCCL. A split takes NCCL's own (2.18 and later); a group of the same ranks in the same order has
/// the same one.
///
/// # Failure
/// A thread watches the group. When a rank fails, is killed, or a batch is not done within the limit, it ends the
/// operations on the device, so that the host's waits return; every later call is an error with the cause. A world of one rank has no thread
/// and no limit.
///
/// # Memory
/// Reductions are planned for the buffers that they are of, and the last 4096 plans keep theirs: give gradients in buffers that are
/// used again, as gradient buckets does. A graph can capture a reduction once it was made before. All ranks launch such graphs, and give other reductions of the
/// same communicator, in one order, each after the one before.
#[derive(Debug)]
pub struct NcclComm {
    /// Dropped first: its thread holds the control, too, and is to be gone before the last handle of that.
    /// None of a world of one rank, which waits for nobody.
    watchdog: Option<Arc<Watchdog>>,
    control: Arc<dyn Control>,
    cuda: Cuda,
    /// The stream that NCCL works on, where that is another communicator's, beside which this one is.
    link: Option<Cuda>,
    /// None of a group of one, which has nobody to send to.
    raw: Option<Arc<Raw>>,
    options: NcclOptions,
    /// GPUs of one process that read each other's memory; asked for by the first reduction.
    peers: OnceLock<Option<Arc<Peers>>>,
    ordered: Mutex<RankOrder>,
    counters: Arc<Counters>,
}

impl NcclComm {
    /// The rank of `control`, with its collectives, and what gathers and reductions do beside them, on a stream of its own of the highest priority ([`Cuda::fork_with_priority`]):
    /// the few thread blocks of a collective should not wait for those of products. The GPU of `cuda` is that of no other rank. Collective.
    ///
    /// # Errors
    /// No NCCL for a group of several, or a rank that failed meanwhile.
    pub fn new(
        control: Arc<dyn Control>,
        cuda: &Cuda,
        options: NcclOptions,
    ) -> Result<Self, CommError> {
        let watchdog = match control.world_size() {
            1 => None,
            _ => Some(Watchdog::start(Arc::clone(&control), options.limit)?),
        };
        let join = || {
            let cuda = cuda.fork_with_priority()?;
            Self::join(Arc::clone(&control), &cuda, options, watchdog)
        };
        join().inspect_err(|error| control.abort(&error.to_string()))
    }

    /// The ranks of a world of threads, one on each of `devices`. A rank that waits longer
    /// than the limit of `options` for another fails.
    ///
    /// # Errors
    /// No NCCL for several, or a rank that failed.
    pub fn world_on(devices: &[Cuda], options: NcclOptions) -> Result<Vec<Self>, CommError> {
        let controls = threads(devices.len(), options.limit);
        thread::scope(|scope| {
            let join = |(cuda, control): (&Cuda, Arc<dyn Control>)| {
                let cuda = cuda.clone();
                scope.spawn(move || Self::new(control, &cuda, options))
            };
            let joining: Vec<_> = devices.iter().zip(controls).map(join).collect();
            let joined = joining.into_iter().map(|rank| rank.join());
            let lost = |_| CommError::Failed {
                rank: 0,
                message: "a thread that joins NCCL panicked".to_owned(),
            };
            joined.map(|rank| rank.map_err(lost)?).collect()
        })
    }

    fn join(
        control: Arc<dyn Control>,
        cuda: &Cuda,
        options: NcclOptions,
        watchdog: Option<Arc<Watchdog>>,
    ) -> Result<Self, CommError> {
        let raw = match control.world_size() {
            1 => None,
            _ => Some(Self::join_nccl(&control, cuda, options)?),
        };
        Ok(Self::of(control, cuda, options, watchdog, raw))
    }

    /// The rank of `control` with its handle of NCCL.
    fn of(
        control: Arc<dyn Control>,
        cuda: &Cuda,
        options: NcclOptions,
        watchdog: Option<Arc<Watchdog>>,
        raw: Option<Arc<Raw>>,
    ) -> Self {
        if let (Some(raw), Some(watchdog)) = (&raw, &watchdog) {
            watchdog.add(raw);
        }
        raw.iter().for_each(|raw| raw.enter());
        Self {
            control,
            cuda: cuda.clone(),
            link: None,
            raw,
            options,
            peers: OnceLock::new(),
            ordered: Mutex::default(),
            watchdog,
            counters: Arc::default(),
        }
    }

    /// Joins NCCL's group of the ranks of `control`.
    fn join_nccl(
        control: &Arc<dyn Control>,
        cuda: &Cuda,
        options: NcclOptions,
    ) -> Result<Arc<Raw>, CommError> {
        raw::found()?;
        let id = if control.rank() == 0 {
            raw::new_id()?.to_vec()
        } else {
            Vec::new()
        };
        let id = control.broadcast("NCCL's id", id)?;
        let id: [u8; ID] = id.try_into().map_err(|id: Vec<u8>| CommError::Failed {
            rank: control.members()[0],
            message: format!("it gave {} bytes as NCCL's id of {ID}", id.len()),
        })?;
        let cuda = cuda.clone();
        let of = RankOf {
            rank: control.rank(),
            world: control.world_size(),
        };
        let join = move || Raw::join(&cuda, id, of, options.min_ctas);
        Ok(Arc::new(watched(control, options.limit, join)?))
    }

    /// NCCL's group of the ranks of `control`, which a split made of this one's: the same where they are the same ranks.
    fn split_nccl(&self, control: &Arc<dyn Control>) -> Result<Option<Arc<Raw>>, CommError> {
        let Some(parent) = &self.raw else {
            return Ok(None);
        };
        if control.members() == self.control.members() {
            return Ok(Some(Arc::clone(parent)));
        }
        let several = control.world_size() > 1;
        if !Raw::splits() {
            let join = || Self::join_nccl(control, &self.cuda, self.options);
            return several.then(join).transpose();
        }
        // No other group has its first rank.
        let first = control.members()[0];
        let color = self
            .control
            .members()
            .iter()
            .position(|&rank| rank == first);
        let color = color.filter(|_| several);
        let (parent, rank, min_ctas) = (Arc::clone(parent), control.rank(), self.options.min_ctas);
        let split = move || parent.split(color, rank, min_ctas);
        Ok(watched(control, self.options.limit, split)?.map(Arc::new))
    }

    /// One NCCL group; nothing where the rank is alone.
    fn batch<M: Send + Sync + 'static>(
        &self,
        memory: impl FnOnce() -> M,
        calls: impl FnOnce(&raw::Calls) -> Result<(), KernelError>,
    ) -> Result<(), CommError> {
        let Some(raw) = &self.raw else {
            return Ok(());
        };
        // A graph keeps the group, too.
        let memory = || (memory(), Arc::clone(raw));
        let given = match &self.link {
            None => raw.batch(&self.cuda, memory, calls),
            Some(link) => {
                link.wait_for(&self.cuda)?;
                let given = raw.batch(link, memory, calls);
                // Also after calls of which some failed.
                self.cuda.wait_for(link)?;
                given
            }
        };
        match given? {
            Some(()) => Ok(()),
            None => Err(self.ended()),
        }
    }

    /// The cause, once the group was aborted.
    fn ended(&self) -> CommError {
        let rank = self.control.world_rank();
        self.control.failure().unwrap_or(CommError::Failed {
            rank,
            message: "its NCCL group was ended".to_owned(),
        })
    }

    fn gather(&self, items: &[GatherItem<'_, Cuda>]) -> Result<(), CommError> {
        if self.raw.is_none() {
            return items.iter().try_for_each(|item| self.copy(item));
        }
        let large = |item: &&GatherItem<'_, Cuda>| is_large(item.ranges);
        let (large, small): (Vec<_>, Vec<_>) = items.iter().partition(large);
        for items in [large, small] {
            if !items.is_empty() {
                self.gather_group(&items)?;
            }
        }
        Ok(())
    }

    /// The gather of the only rank: its piece is all.
    fn copy(&self, item: &GatherItem<'_, Cuda>) -> Result<(), CommError> {
        let Range { start, end } = item.ranges[0].clone();
        let place = self.cuda.view(item.dest, start..end)?;
        if self.cuda.span(item.source).start == self.cuda.span(&place).start {
            return Ok(());
        }
        let piece = 0..end - start;
        Ok(self.cuda.copy(item.source, piece, item.dest, start)?)
    }

    fn gather_group(&self, items: &[&GatherItem<'_, Cuda>]) -> Result<(), CommError> {
        let memory = || {
            let pairs = items
                .iter()
                .map(|item| (item.source.clone(), item.dest.clone()));
            pairs.collect::<Vec<_>>()
        };
        self.batch(memory, |calls| {
            for item in items {
                match even(item.ranges) {
                    Some(all) => calls.all_gather(item.source, &self.cuda.view(item.dest, all)?)?,
                    None => {
                        let sent = item.ranges.iter().enumerate();
                        for (rank, range) in sent.filter(|(_, range)| !range.is_empty()) {
                            let dest = self.cuda.view(item.dest, range.clone())?;
                            calls.broadcast(item.source, &dest, rank)?;
                        }
                    }
                }
            }
            Ok(())
        })
    }

    /// One NCCL group of what this rank sends and receives.
    fn move_owned(
        &self,
        items: &[OwnedItem<'_, Cuda>],
        direction: Direction,
    ) -> Result<(), CommError> {
        let rank = self.rank();
        let own = items.iter().filter(|item| item.owner == rank);
        own.clone()
            .try_for_each(|item| item.copy_own(&self.cuda, direction))?;
        let mut places = Vec::new();
        for from in 0..self.world_size() {
            for piece in direction.sent(items, from) {
                let [from, to] = direction.ends(items, piece);
                if [from, to].contains(&rank) {
                    let place = items[piece.item].place(&self.cuda, rank, piece.of)?;
                    places.push((place, [from, to]));
                }
            }
        }
        if places.is_empty() {
            return Ok(());
        }
        let memory = || {
            places
                .iter()
                .map(|(place, _)| place.clone())
                .collect::<Vec<_>>()
        };
        self.batch(memory, |calls| {
            let mut each = places.iter();
            each.try_for_each(|(place, [from, to])| match *from == rank {
                true => calls.send(place, *to),
                false => calls.recv(place, *from),
            })
        })
    }

    /// The other GPUs of this process, where all ranks are theirs and gradients are added so. Collective the first time.
    fn peers(&self) -> Result<Option<&Arc<Peers>>, CommError> {
        let Some(raw) = self
            .raw
            .as_ref()
            .filter(|_| self.options.sums == Sums::Peers)
        else {
            return Ok(None);
        };
        if let Some(known) = self.peers.get() {
            return Ok(known.as_ref());
        }
        let joined = Peers::join(&*self.control, &self.cuda)?.map(Arc::new);
        if let Some(peers) = &joined {
            raw.stops(peers.stop());
        }
        Ok(self.peers.get_or_init(|| joined).as_ref())
    }

    /// What was sent.
    fn reduce(&self, items: &[ReduceItem<'_, Cuda>], wire: GradWire) -> Result<Traffic, CommError> {
        let grads = by_nccl(items, wire);
        if let (None, Some(grads)) = (&self.raw, &grads)
            && items.iter().all(|item| !item.accumulate)
        {
            for (grad, item) in grads.iter().zip(items) {
                self.cuda.copy(grad, item.ranges[0].clone(), item.out, 0)?;
            }
            return Ok(Traffic::of(
                &self.cuda,
                0,
                Collective::ReduceScatter(items, wire),
            ));
        }
        let method = match (self.peers()?, self.options.sums, grads) {
            (Some(peers), ..) => Method::Peers(Arc::clone(peers)),
            (None, Sums::Nccl | Sums::Peers, Some(grads)) if self.raw.is_some() => {
                Method::Library(grads)
            }
            _ => Method::Receiver,
        };
        let mut ordered = self.ordered.lock().unwrap_or_else(PoisonError::into_inner);
        let of = RankOf {
            rank: self.rank(),
            world: self.world_size(),
        };
        let batch = ordered.batch(&self.cuda, items, wire, &method, of)?;
        batch.begin(&self.cuda)?;
        if let (Some((sums, peers)), Some(raw)) = (batch.of_peers(), &self.raw) {
            let given = raw.unless_ended(|| sums.add(&self.cuda, peers, raw))?;
            given.ok_or_else(|| self.ended())?;
            return Ok(batch.traffic);
        }
        self.batch(|| batch.memory(), |calls| batch.send(calls))?;
        batch.end(&self.cuda)?;
        if let Some(delivery) = &batch.delivery {
            self.batch(|| delivery.memory(), |calls| delivery.send(calls))?;
            delivery.end(&self.cuda)?;
        }
        Ok(batch.traffic)
    }

    fn sum(&self, buffers: &[&CudaBuffer<f32>]) -> Result<(), CommError> {
        // The vector of one rank is its own sum.
        if self.raw.is_none() {
            return Ok(());
        }
        if self.options.sums != Sums::RankOrder {
            return self.combine(buffers, &Op::Sum);
        }
        let mut ordered = self.ordered.lock().unwrap_or_else(PoisonError::into_inner);
        for values in buffers {
            let work = ordered.sum(&self.cuda, values, self.world_size())?;
            if let Source::F32(all) = work.all() {
                let memory = ((*values).clone(), all.clone());
                self.batch(|| memory, |calls| calls.all_gather(values, all))?;
            }
            work.add(&self.cuda)?;
        }
        Ok(())
    }

    fn combine(&self, buffers: &[&CudaBuffer<f32>], op: &Op) -> Result<(), CommError> {
        let memory = || -> Vec<CudaBuffer<f32>> { buffers.iter().map(|&b| b.clone()).collect() };
        self.batch(memory, |calls| {
            let mut each = buffers.iter();
            each.try_for_each(|values| calls.all_reduce(values, values, op))
        })
    }

    /// Buffers of another GPU would be read by their addresses on this one.
    fn own(&self, batch: Collective<'_, Cuda>) -> Result<(), KernelError> {
        match batch {
            Collective::AllGather(items) => items.iter().try_for_each(|item| {
                self.cuda.owns(item.source)?;
                self.cuda.owns(item.dest)
            }),
            Collective::ReduceScatter(items, _) => items.iter().try_for_each(|item| {
                item.grad.owned_by(&self.cuda)?;
                self.cuda.owns(item.out)
            }),
            Collective::Owned(items, _) => items.iter().try_for_each(|item| {
                self.cuda.owns(item.piece)?;
                self.cuda.owns(item.whole)
            }),
            Collective::Max(values) => self.cuda.owns(values),
            Collective::Sum(buffers) => {
                buffers.iter().try_for_each(|values| self.cuda.owns(values))
            }
        }
    }
}

/// The gradients, if NCCL can add them: in f32.
fn by_nccl<'a>(items: &[ReduceItem<'a, Cuda>], wire: GradWire) -> Option<Vec<&'a CudaBuffer<f32>>> {
    let of_item = |item: &ReduceItem<'a, Cuda>| match item.grad {
        Source::F32(grad) if wire == GradWire::F32 => Some(grad),
        _ => None,
    };
    items.iter().map(of_item).collect()
}

/// Has NCCL `join` a group on a thread, which waits for all ranks, and gives up when one of them fails.
fn watched<T: Send + 'static>(
    control: &Arc<dyn Control>,
    limit: Duration,
    join: impl FnOnce() -> Result<T, KernelError> + Send + 'static,
) -> Result<T, CommError> {
    const NAP: Duration = Duration::from_millis(2);
    let abandoned = Abandoned::new();
    let joining = thread::spawn(move || {
        let joined = join();
        drop(abandoned);
        joined
    });
    let begun = Instant::now();
    while !joining.is_finished() {
        if let Some(cause) = control.failure() {
            return Err(cause);
        }
        if begun.elapsed() >= limit {
            return Err(CommError::Failed {
                rank: control.world_rank(),
                message: format!(
                    "NCCL did not join the ranks {:?} in {:.1} s; NCCL_DEBUG=INFO says what it waits for",
                    control.members(),
                    limit.as_secs_f64()
                ),
            });
        }
        thread::sleep(NAP);
    }
    let joined = joining.join().map_err(|_| CommError::Failed {
        rank: control.world_rank(),
        message: "the thread that joins NCCL's group panicked".to_owned(),
    })?;
    Ok(joined?)
}

impl From<NcclComm> for Arc<dyn Communicator<Cuda>> {
    fn from(comm: NcclComm) -> Self {
        Arc::new(comm)
    }
}

impl Communicator<Cuda> for NcclComm {
    fn control(&self) -> &dyn Control {
        &*self.control
    }

    fn backend(&self) -> &Cuda {
        &self.cuda
    }

    fn is_enqueued(&self) -> bool {
        true
    }

    fn enqueue(&self, _label: &str, batch: Collective<'_, Cuda>) -> Result<(), CommError> {
        let run = || -> Result<Traffic, CommError> {
            batch.check(&self.cuda, self.rank(), self.world_size())?;
            self.own(batch)?;
            // After a failure the watchdog ends NCCL's group. Ranks without one look for the failure here.
            if self.raw.is_none() {
                self.control.failure().map_or(Ok(()), Err)?;
            }
            let mut sent = Traffic::of(&self.cuda, self.rank(), batch);
            match batch {
                Collective::AllGather(items) => self.gather(items)?,
                Collective::ReduceScatter(items, wire) => sent = self.reduce(items, wire)?,
                Collective::Owned(items, direction) => self.move_owned(items, direction)?,
                Collective::Max(values) => self.combine(&[values], &Op::Max)?,
                Collective::Sum(buffers) => self.sum(buffers)?,
            }
            if let Some(watchdog) = &self.watchdog {
                watchdog.expect(self.cuda.record()?, batch.name());
            }
            Ok(sent)
        };
        let sent = match run() {
            // Nothing has run: what an error means is known to whoever captures.
            Err(error) if self.cuda.is_capturing() => return Err(error),
            done => or_abort(self, done)?,
        };
        self.counters.repeat(sent);
        Ok(())
    }

    fn expect(&self, event: CudaEvent, what: &'static str) {
        if let Some(watchdog) = &self.watchdog {
            watchdog.expect(event, what);
        }
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<Cuda>>, CommError> {
        let control = self.control.split(color, key)?;
        let raw = or_abort(self, self.split_nccl(&control))?;
        let watchdog = self.watchdog.clone();
        let mut comm = Self::of(control, &self.cuda, self.options, watchdog, raw);
        comm.link.clone_from(&self.link);
        Ok(Arc::new(comm))
    }

    fn beside(&self) -> Result<Option<Arc<dyn Communicator<Cuda>>>, CommError> {
        let Some(raw) = &self.raw else {
            return Ok(None);
        };
        // The group has one stream, where its operations follow each other; sums run on those of the communicators.
        let link = self.link.as_ref().unwrap_or(&self.cuda);
        let cuda = link.fork()?;
        raw.enter();
        Ok(Some(Arc::new(Self {
            watchdog: self.watchdog.clone(),
            control: Arc::clone(&self.control),
            cuda,
            link: Some(link.clone()),
            raw: self.raw.clone(),
            options: self.options,
            peers: OnceLock::new(),
            ordered: Mutex::default(),
            counters: Arc::clone(&self.counters),
        })))
    }

    fn forget_reductions(&self) {
        let ordered = self.ordered.lock();
        ordered.unwrap_or_else(PoisonError::into_inner).forget();
    }

    fn count(&self, sent: Traffic) {
        self.counters.repeat(sent);
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        let Some(raw) = &self.raw else {
            return;
        };
        let is_last = raw.leave();
        // Once the watchdog is gone, nobody ends operations that wait for a rank which left.
        if let Some(watchdog) = &self.watchdog
            && is_last
            && !thread::panicking()
        {
            watchdog.settle();
        }
        // A group in peace ends with its last user, which may be a graph.
        if self.control.failure().is_some() {
            raw.abort();
        }
    }
}
