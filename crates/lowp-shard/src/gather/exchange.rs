//! The exchanges of a [`GatherGroup`]: calls the first time, a graph from the second time on.

use lowp_format::Recipe;
use lowp_kernels::{Backend, KernelError, StepScalars};

use super::pool::{Exchange, Lease, Move};
use super::{GatherGroup, GatherPoint};
use crate::ShardError;
use lowp_comm::{Collective, Communicator, GatherItem, Traffic};

impl<B: Backend, R: Recipe> GatherGroup<B, R> {
    /// The ranks that make an exchange.
    pub(super) fn comm_of(&self, exchange: Exchange) -> &dyn Communicator<B> {
        match (&self.parts, exchange) {
            (Some(parts), Exchange::Parts) => &*parts.group,
            _ => &*self.comm,
        }
    }

    /// Gives the communicator's stream an exchange, behind that for forward where it builds on it.
    pub(super) fn gather(
        &mut self,
        exchange: Exchange,
        forward_first: bool,
    ) -> Result<(), ShardError> {
        if forward_first {
            self.repeat(Exchange::Forward)?;
        }
        self.repeat(exchange)
    }

    /// An exchange and its local work: as a graph from the second time on, where the communicator allows it.
    fn repeat(&mut self, exchange: Exchange) -> Result<(), ShardError> {
        let Some(lease) = self.lease.take() else {
            return Ok(());
        };
        let done = self.repeat_into(&lease, exchange);
        self.lease = Some(lease);
        done
    }

    fn repeat_into(&mut self, lease: &Lease<B>, exchange: Exchange) -> Result<(), ShardError> {
        self.agree_first(exchange)?;
        self.pool.note(&*self.comm, self.number, exchange);
        let views = self.views_of(lease)?;
        let before = self.comm_of(exchange).traffic();
        let work = lease.set.exchange(exchange);
        let repeated = &self.views[views].gathers[exchange as usize];
        let sends = |m: &Move<B>| m.ranges.iter().any(|range| !range.is_empty());
        let any = || !work.local.is_empty() || work.moves.iter().any(sends);
        let launched = repeated.ran && self.comm_of(exchange).is_enqueued() && any() && {
            let launched = match &repeated.graph {
                Some(graph) => self.launch(exchange, graph, false).map(|()| None),
                None => self.capture(lease, exchange).and_then(|graph| {
                    self.launch(exchange, &graph, true)?;
                    Ok(Some(graph))
                }),
            };
            match launched {
                Ok(Some(graph)) => {
                    self.views[views].gathers[exchange as usize].graph = Some(graph);
                    true
                }
                Ok(None) => true,
                // A capture of the caller's takes the calls themselves.
                Err(ShardError::Kernel(KernelError::InCapture { .. })) => false,
                Err(error) => return Err(error),
            }
        };
        if !launched {
            self.watched(exchange, || self.run(lease, exchange))?;
        }
        self.views[views].gathers[exchange as usize].ran = true;
        let sent = self.comm_of(exchange).traffic().since(before);
        self.sent += sent.all_gather_bytes;
        self.gathers += u64::from(!work.moves.is_empty());
        Ok(())
    }

    fn capture(
        &self,
        lease: &Lease<B>,
        exchange: Exchange,
    ) -> Result<(B::Graph, Traffic), ShardError> {
        let comm = self.comm_of(exchange);
        let before = comm.traffic();
        let graph = comm.backend().capture(|| self.run(lease, exchange))?;
        Ok((graph, comm.traffic().since(before)))
    }

    /// Launches a graph that was captured before, or just now: the capture counted its own first launch.
    fn launch(
        &self,
        exchange: Exchange,
        (graph, sent): &(B::Graph, Traffic),
        first: bool,
    ) -> Result<(), ShardError> {
        let comm = self.comm_of(exchange);
        // Collectives of a world that has failed end without moving anything.
        comm.control().failure().map_or(Ok(()), Err)?;
        self.watched(exchange, || Ok(comm.backend().launch(graph)?))?;
        if !first {
            comm.count(*sent);
        }
        Ok(())
    }

    /// Runs `give`, which gives the communicator's stream an exchange, and tells the watch.
    fn watched(
        &self,
        exchange: Exchange,
        give: impl FnOnce() -> Result<(), ShardError>,
    ) -> Result<(), ShardError> {
        let stream = self.comm_of(exchange).backend();
        let tell = |point| match &self.watch {
            Some(watch) => watch.tell(stream, point),
            None => Ok(()),
        };
        tell(GatherPoint::Begin)?;
        give()?;
        Ok(tell(GatherPoint::End)?)
    }

    /// Gives the communicator's stream an exchange and its local work.
    fn run(&self, lease: &Lease<B>, exchange: Exchange) -> Result<(), ShardError> {
        let (work, comm) = (lease.set.exchange(exchange), self.comm_of(exchange));
        let items = match (&self.parts, exchange) {
            (Some(parts), Exchange::Parts) => parts.items(&lease.set),
            _ => self.shards(&work.moves)?,
        };
        if !items.is_empty() {
            comm.enqueue(&label(self.number, exchange), Collective::AllGather(&items))?;
        }
        let stream = comm.backend();
        for plan in &work.local {
            stream.run(plan, &StepScalars::default())?;
        }
        match (&self.parts, exchange) {
            (Some(parts), Exchange::Forward) => parts.fill(stream, &lease.set),
            _ => Ok(()),
        }
    }

    /// Compares over the ranks what is gathered, the first time: where calls are enqueued no rank waits for the others, and none
    /// sees that they gather something else of the same length. Later ones are compared by the optimizer's step
    /// ([`GatherPool::gathered`](super::GatherPool::gathered)).
    fn agree_first(&mut self, exchange: Exchange) -> Result<(), ShardError> {
        let comm = self.comm_of(exchange);
        if comm.is_enqueued() && comm.world_size() > 1 && !self.compared[exchange as usize] {
            let label = label(self.number, exchange);
            comm.control().all_equal("what is gathered next", &label)?;
            self.compared[exchange as usize] = true;
        }
        Ok(())
    }

    /// The gather of this rank's shards.
    fn shards<'a>(&'a self, moves: &'a [Move<B>]) -> Result<Vec<GatherItem<'a, B>>, ShardError> {
        let item = |m: &'a Move<B>| {
            Ok(GatherItem {
                source: &self.params[m.param].local().buffer(m.key)?.storage,
                dest: &m.dest,
                ranges: &m.ranges,
            })
        };
        moves.iter().map(item).collect()
    }
}

/// What ranks that gather the same have in common, beside lengths: group `number` of those of a pool.
pub(super) fn label(number: u64, exchange: Exchange) -> String {
    let what = match exchange {
        Exchange::Forward => "for forward",
        Exchange::Backward => "for backward",
        Exchange::Parts => "for backward, of kept parts",
    };
    format!("group {number} {what}")
}
