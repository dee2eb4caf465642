//! The gathers of a [`GatherGroup`]: calls the first time, a graph from the second time on.

use lowp_format::Recipe;
use lowp_kernels::{Backend, KernelError, StepScalars};

use super::kind::{GatherKind, label};
use super::pool::{Lease, Move};
use super::views::CapturedGather;
use super::{GatherGroup, GatherPoint};
use crate::ShardError;
use lowp_comm::{Collective, Communicator, GatherItem};

impl<B: Backend, R: Recipe> GatherGroup<B, R> {
    /// The ranks that make a gather.
    pub(super) fn comm_of(&self, kind: GatherKind) -> &dyn Communicator<B> {
        match (&self.parts, kind) {
            (Some(parts), GatherKind::Parts) => &*parts.group,
            _ => &*self.comm,
        }
    }

    /// Gives the communicator's stream a gather, after that for forward where it builds on it.
    pub(super) fn gather(
        &mut self,
        kind: GatherKind,
        forward_first: bool,
    ) -> Result<(), ShardError> {
        if forward_first {
            self.repeat(GatherKind::Forward)?;
        }
        self.repeat(kind)
    }

    /// A gather and its local work: as a graph from the second time on, where the communicator allows it.
    fn repeat(&mut self, kind: GatherKind) -> Result<(), ShardError> {
        let Some(lease) = self.state.lease.take() else {
            return Ok(());
        };
        let done = self.repeat_into(&lease, kind);
        self.state.lease = Some(lease);
        done
    }

    fn repeat_into(&mut self, lease: &Lease<B>, kind: GatherKind) -> Result<(), ShardError> {
        self.agree_first(kind)?;
        self.pool.note(&*self.comm, self.plan.number, kind);
        let views = self.views_of(lease)?;
        let mut before = self.comm_of(kind).traffic();
        let work = lease.set.work(kind);
        let repeated = &self.reused.views[views].gathers[kind as usize];
        let sends = |m: &Move<B>| m.ranges.iter().any(|range| !range.is_empty());
        let any = || !work.local.is_empty() || work.moves.iter().any(sends);
        let launched = repeated.ran && self.comm_of(kind).is_enqueued() && any() && {
            let launched = match &repeated.captured {
                Some(captured) => self.launch(kind, captured, false).map(|()| None),
                None => self.capture(lease, kind).and_then(|captured| {
                    self.launch(kind, &captured, true)?;
                    Ok(Some(captured))
                }),
            };
            match launched {
                Ok(Some(captured)) => {
                    self.reused.views[views].gathers[kind as usize].captured = Some(captured);
                    true
                }
                Ok(None) => true,
                // A capture of the caller's takes the calls themselves.
                Err(ShardError::Kernel(KernelError::InCapture { .. })) => false,
                // Nothing of a lost capture has run. The next gather captures again.
                Err(ShardError::Kernel(KernelError::CaptureLost)) => {
                    before = self.comm_of(kind).traffic();
                    false
                }
                Err(error) => return Err(error),
            }
        };
        if !launched {
            self.watched(kind, || self.run(lease, kind))?;
        }
        self.reused.views[views].gathers[kind as usize].ran = true;
        let sent = self.comm_of(kind).traffic().since(before);
        self.counts.sent_bytes += sent.all_gather_bytes;
        self.counts.gathers += u64::from(!work.moves.is_empty());
        Ok(())
    }

    fn capture(&self, lease: &Lease<B>, kind: GatherKind) -> Result<CapturedGather<B>, ShardError> {
        let comm = self.comm_of(kind);
        let before = comm.traffic();
        let graph = comm.backend().capture(|| self.run(lease, kind))?;
        Ok(CapturedGather {
            graph,
            sent: comm.traffic().since(before),
        })
    }

    /// Launches a gather that was captured before, or just now: the capture counted its own first launch.
    fn launch(
        &self,
        kind: GatherKind,
        captured: &CapturedGather<B>,
        first: bool,
    ) -> Result<(), ShardError> {
        let comm = self.comm_of(kind);
        // Collectives of a world that has failed end without moving anything.
        comm.control().failure().map_or(Ok(()), Err)?;
        self.watched(kind, || Ok(comm.backend().launch(&captured.graph)?))?;
        if !first {
            comm.count(captured.sent);
        }
        Ok(())
    }

    /// Runs `give`, which gives the communicator's stream a gather, and tells the watch.
    fn watched(
        &self,
        kind: GatherKind,
        give: impl FnOnce() -> Result<(), ShardError>,
    ) -> Result<(), ShardError> {
        let stream = self.comm_of(kind).backend();
        let tell = |point| match &self.watch {
            Some(watch) => watch.tell(stream, point),
            None => Ok(()),
        };
        tell(GatherPoint::Begin)?;
        give()?;
        Ok(tell(GatherPoint::End)?)
    }

    /// Gives the communicator's stream a gather and its local work.
    fn run(&self, lease: &Lease<B>, kind: GatherKind) -> Result<(), ShardError> {
        let (work, comm) = (lease.set.work(kind), self.comm_of(kind));
        let mut items = self.items(kind, &work.moves)?;
        let packed = self
            .reused
            .packed
            .as_ref()
            .map(|packed| &packed[kind as usize]);
        if let (Some(Some(packed)), Some(messages)) = (packed, &work.messages) {
            if let Some(plan) = &packed.plan {
                comm.backend().run(plan, &StepScalars::default())?;
            }
            items.push(GatherItem {
                source: &packed.message,
                dest: &messages.buffer,
                ranges: &messages.ranges,
            });
        }
        if !items.is_empty() {
            comm.enqueue(
                &label(self.plan.number, kind),
                Collective::AllGather(&items),
            )?;
        }
        let stream = comm.backend();
        for plan in &work.local {
            stream.run(plan, &StepScalars::default())?;
        }
        match (&self.parts, kind) {
            (Some(parts), GatherKind::Forward) => parts.fill(stream, &lease.set),
            _ => Ok(()),
        }
    }

    /// Compares over the ranks what is gathered, the first time: where calls are enqueued no rank waits for the others, and none
    /// sees that they gather something else of the same length. Later ones are compared by the optimizer's step
    /// ([`GatherPool::gathered`](super::GatherPool::gathered)).
    fn agree_first(&mut self, kind: GatherKind) -> Result<(), ShardError> {
        let comm = self.comm_of(kind);
        if comm.is_enqueued() && comm.world_size() > 1 && !self.reused.compared[kind as usize] {
            let label = label(self.plan.number, kind);
            comm.control().all_equal("what is gathered next", &label)?;
            self.reused.compared[kind as usize] = true;
        }
        Ok(())
    }

    /// What this rank sends of a buffer: that of its shard, or the part that it kept.
    pub(super) fn source<'a>(
        &'a self,
        kind: GatherKind,
        index: usize,
        m: &Move<B>,
    ) -> Result<&'a B::Buffer<u8>, ShardError> {
        match (&self.parts, kind) {
            (Some(parts), GatherKind::Parts) => Ok(&parts.buffers[index]),
            _ => Ok(&self.params[m.param].local().buffer(m.key)?.storage),
        }
    }

    /// The gather of what goes straight to where it belongs.
    fn items<'a>(
        &'a self,
        kind: GatherKind,
        moves: &'a [Move<B>],
    ) -> Result<Vec<GatherItem<'a, B>>, ShardError> {
        let straight = moves.iter().enumerate().filter(|(_, m)| m.packed.is_none());
        let item = |(index, m): (usize, &'a Move<B>)| {
            Ok(GatherItem {
                source: self.source(kind, index, m)?,
                dest: &m.dest,
                ranges: &m.ranges,
            })
        };
        straight.map(item).collect()
    }
}
