//! [`GatherGroup`]: the gather engine. Parameters that are used together are gathered together,
//! in one batched collective per phase, into memory that groups of equal shapes share.

use std::sync::Arc;

use lowp_format::{AnyRecipe, GatherPlan, Part, Phase, QuantizedTensor, Recipe};
use lowp_kernels::{Backend, KernelError, StepScalars};

use crate::{Communicator, GatherItem, ShardError, ShardedTensor, Traffic, or_abort, ordered};

mod account;
mod plan;
mod pool;
mod scratch;
mod steps;
mod views;

pub use account::{GatherAccount, ParamAccount};
use plan::{describe, plan_params};
pub use pool::GatherPool;
pub(crate) use pool::check_transpose;
use pool::{Lease, Move, ParamPlans};
pub use scratch::Scratch;
pub use steps::{GatherTarget, run_steps};
use views::Views;

/// A full tensor as the pool's buffers hold it.
type Full<B, R> = QuantizedTensor<<B as Backend>::Buffer<u8>, R>;

/// Parameters that are gathered and freed together, for example those of one layer.
///
/// `unshard(phase)` before use, `reshard()` after. With `reshard_after_forward` each phase gathers
/// only what it needs and frees it; without it forward gathers what both phases need, keeps it,
/// and backward only derives. What is derivable (a byte or nibble transpose) never travels.
///
/// When the shards were cast again (an optimizer step), what the group holds is stale: the next
/// `unshard` gathers again, and [`GatherGroup::tensor`] rejects until then. Casts are collective,
/// so all ranks come to the same decision; if they do not, because one rank wrote or cast its rows
/// alone, every rank gets an error.
#[derive(Debug)]
pub struct GatherGroup<B: Backend, R: Recipe = AnyRecipe> {
    /// Dropped first: libraries wait for graphs of their collectives before a communicator ends.
    views: Vec<Views<B, R>>,
    backend: B,
    comm: Arc<dyn Communicator<B>>,
    pool: Arc<GatherPool<B>>,
    params: Vec<ShardedTensor<B, R>>,
    plans: Arc<[ParamPlans]>,
    geometry: usize,
    /// The same on every rank: groups are made in the same order.
    number: u64,
    reshard_after_forward: bool,
    lease: Option<Lease<B>>,
    held: Option<Phase>,
    /// A gather that the group's stream does not follow yet, and the point behind it.
    started: Option<(Phase, B::Event)>,
    /// The versions of the shards that the held tensors were gathered from.
    gathered: Vec<u64>,
    sent: u64,
    gathers: u64,
}

impl<B: Backend, R: Recipe> GatherGroup<B, R> {
    /// Plans the gathers of `params` and checks that all ranks planned the same. Collective. The shards
    /// are written and the full tensors read by work of `backend`; the gathers are work of the
    /// communicator's stream, between both.
    ///
    /// # Errors
    /// Shards for another world or rank than the communicator's, cuts off the recipe's quantum, or
    /// ranks that disagree ([`ShardError::Mismatch`] on every rank).
    pub fn new(
        backend: &B,
        comm: Arc<dyn Communicator<B>>,
        pool: &Arc<GatherPool<B>>,
        params: Vec<ShardedTensor<B, R>>,
        reshard_after_forward: bool,
    ) -> Result<Self, ShardError> {
        let planned = plan_params(&params, &*comm, reshard_after_forward);
        let plans = or_abort(&*comm, planned)?;
        // Of one device, or the ranks hear of it.
        or_abort(&*comm, ordered(backend, &*comm, || Ok(())))?;
        comm.control().agree(
            "the gather plan",
            &describe(&params, &plans, reshard_after_forward),
        )?;
        let plans: Arc<[ParamPlans]> = plans.into();
        let geometry = pool.geometry(&plans);
        let number = pool.next_group();
        let gathered = vec![0; params.len()];
        Ok(Self {
            views: Vec::new(),
            backend: backend.clone(),
            comm,
            pool: Arc::clone(pool),
            params,
            plans,
            geometry,
            number,
            reshard_after_forward,
            lease: None,
            held: None,
            started: None,
            gathered,
            sent: 0,
            gathers: 0,
        })
    }

    /// Makes the full tensors of all parameters ready for `phase`. Collective; does nothing if
    /// they are ready. What the group's stream is given afterwards follows the gather; the host does not wait where the
    /// communicator only enqueues. In a capture they are ready where the graph is launched.
    ///
    /// # Errors
    /// Shards without the usage that the phase needs, a backend failure, or a failure of another
    /// rank.
    pub fn unshard(&mut self, phase: Phase) -> Result<(), ShardError> {
        if self.held == Some(phase) && !self.is_stale() {
            return Ok(());
        }
        let done = self.try_unshard(phase);
        or_abort(&*self.comm, done)
    }

    /// Starts what [`GatherGroup::unshard`] waits for: borrows memory, and has the communicator's stream gather behind
    /// what the group's stream was given so far. Collective; does nothing if the tensors are ready or on their way, or while the
    /// group holds those of the other phase.
    ///
    /// # Errors
    /// As [`GatherGroup::unshard`].
    pub fn prefetch(&mut self, phase: Phase) -> Result<(), ShardError> {
        let busy = match (self.held, &self.started) {
            (Some(_), _) => true,
            (None, Some((started, _))) => *started == phase,
            (None, None) => false,
        };
        if busy && !self.is_stale() {
            return Ok(());
        }
        let done = self.start(phase);
        or_abort(&*self.comm, done)
    }

    /// The full tensors for `phase` as a value, for work of `compute`: what that stream is given afterwards follows the
    /// gather. When the value is dropped the phase is over ([`GatherGroup::reshard`]), and the memory is lent again
    /// behind the work that `compute` has by then.
    ///
    /// # Errors
    /// As [`GatherGroup::unshard`]; a stream of another device.
    pub fn unsharded(
        &mut self,
        phase: Phase,
        compute: &B,
    ) -> Result<Unsharded<'_, B, R>, ShardError> {
        self.unshard(phase)?;
        let ordered = compute.wait_for(&self.backend);
        or_abort(&*self.comm, ordered)?;
        Ok(Unsharded {
            group: self,
            compute: compute.clone(),
        })
    }

    /// Whether a parameter was written since it was gathered, or since its gather began.
    fn is_stale(&self) -> bool {
        let mut versions = self.params.iter().zip(&self.gathered);
        let any = self.held.is_some() || self.started.is_some();
        any && versions.any(|(tensor, &gathered)| tensor.version() != gathered)
    }

    /// Compares over the ranks what is stale. A rank that would gather alone, while the others use
    /// what they hold, fails here instead of gathering into another group's call.
    fn agree_on_stale(&self) -> Result<(), ShardError> {
        let versions = self.params.iter().zip(&self.gathered);
        let written = versions.map(|(tensor, &gathered)| tensor.version() - gathered);
        let text = format!(
            "group {}: casts since the gather, by parameter: {:?}",
            self.number,
            written.collect::<Vec<_>>()
        );
        let control = self.comm.control();
        control.agree("which gathered tensors are stale", &text)
    }

    fn try_unshard(&mut self, phase: Phase) -> Result<(), ShardError> {
        let on_its_way = self
            .started
            .as_ref()
            .is_some_and(|(started, _)| *started == phase);
        if !on_its_way || self.is_stale() {
            self.start(phase)?;
        }
        if let Some((_, arrived)) = self.started.take() {
            self.backend.wait(&arrived)?;
        }
        self.held = Some(phase);
        Ok(())
    }

    /// Starts the gather for `phase` on the communicator's stream.
    fn start(&mut self, phase: Phase) -> Result<(), ShardError> {
        for (param, (plans, tensor)) in self.plans.iter().zip(&self.params).enumerate() {
            if plans.phase(phase).is_none() {
                let (shape, usage) = (tensor.spec().full(), tensor.spec().usage());
                return Err(ShardError::MissingPhase {
                    param,
                    shape,
                    usage,
                    phase,
                });
            }
        }
        // The backward plan of a group that keeps its tensors builds on the forward one.
        let builds = phase == Phase::Backward && !self.reshard_after_forward;
        let held = self.held.or(self.started.as_ref().map(|(phase, _)| *phase));
        let mut forward_held = builds && held == Some(Phase::Forward);
        // Only where another rank might go on with what it holds.
        if (forward_held || held == Some(phase)) && self.is_stale() {
            self.agree_on_stale()?;
            forward_held = false;
        }
        self.held = None;
        for (gathered, tensor) in self.gathered.iter_mut().zip(&self.params) {
            *gathered = tensor.version();
        }
        if self.lease.is_none() {
            self.lease = Some(
                self.pool
                    .lease(self.geometry, [&self.backend, self.comm.backend()])?,
            );
        }
        let after = self.backend.record()?;
        let stream = self.comm.backend().clone();
        stream.wait(&after)?;
        let gathered = self.gather(phase, builds && !forward_held);
        // Also behind a part of it that failed: what it reads and writes is lent to others next.
        let arrived = stream.record();
        if gathered.is_err() {
            self.backend.wait_for(&stream)?;
        }
        gathered?;
        let arrived = arrived?;
        self.comm.expect(arrived.clone(), "a gather");
        self.started = Some((phase, arrived));
        Ok(())
    }

    /// Gives the communicator's stream the gather for `phase`, behind that for forward where it builds on it.
    fn gather(&mut self, phase: Phase, forward_first: bool) -> Result<(), ShardError> {
        if forward_first {
            self.repeat(Phase::Forward)?;
        }
        self.repeat(phase)
    }

    /// One phase's exchange and local work: as a graph from the second time on, where the communicator allows it.
    fn repeat(&mut self, phase: Phase) -> Result<(), ShardError> {
        let Some(lease) = self.lease.take() else {
            return Ok(());
        };
        let done = self.repeat_into(&lease, phase);
        self.lease = Some(lease);
        done
    }

    fn repeat_into(&mut self, lease: &Lease<B>, phase: Phase) -> Result<(), ShardError> {
        let views = self.views_of(lease)?;
        let before = self.comm.traffic();
        let work = lease.set.phase(phase);
        let repeated = &self.views[views].gathers[phase as usize];
        let sends = |m: &Move<B>| m.ranges.iter().any(|range| !range.is_empty());
        let any = || !work.local.is_empty() || work.moves.iter().any(sends);
        let launched = repeated.ran && self.comm.is_enqueued() && any() && {
            let launched = match &repeated.graph {
                Some(graph) => self.launch(graph, false).map(|()| None),
                None => self.capture(lease, phase).and_then(|graph| {
                    self.launch(&graph, true)?;
                    Ok(Some(graph))
                }),
            };
            match launched {
                Ok(Some(graph)) => {
                    self.views[views].gathers[phase as usize].graph = Some(graph);
                    true
                }
                Ok(None) => true,
                // A capture of the caller's takes the calls themselves.
                Err(ShardError::Kernel(KernelError::InCapture { .. })) => false,
                Err(error) => return Err(error),
            }
        };
        if !launched {
            self.run(lease, phase)?;
        }
        self.views[views].gathers[phase as usize].ran = true;
        self.sent += self.comm.traffic().since(before).all_gather_bytes;
        self.gathers += u64::from(!work.moves.is_empty());
        Ok(())
    }

    fn capture(&self, lease: &Lease<B>, phase: Phase) -> Result<(B::Graph, Traffic), ShardError> {
        let stream = self.comm.backend();
        let before = self.comm.traffic();
        let graph = stream.capture(|| self.run(lease, phase))?;
        Ok((graph, self.comm.traffic().since(before)))
    }

    /// Launches a graph that was captured before, or just now: the capture counted its own first launch.
    fn launch(&self, (graph, sent): &(B::Graph, Traffic), first: bool) -> Result<(), ShardError> {
        // Collectives of a world that has failed end without moving anything.
        self.comm.control().failure().map_or(Ok(()), Err)?;
        let stream = self.comm.backend();
        stream.launch(graph)?;
        if !first {
            self.comm.count(*sent);
        }
        Ok(())
    }

    /// Gives the communicator's stream one phase's exchange and local work.
    fn run(&self, lease: &Lease<B>, phase: Phase) -> Result<(), ShardError> {
        let work = lease.set.phase(phase);
        if !work.moves.is_empty() {
            let items = work
                .moves
                .iter()
                .map(|m| {
                    let source = &self.params[m.param].local().buffer(m.key)?.storage;
                    Ok(GatherItem {
                        source,
                        dest: &m.dest,
                        ranges: &m.ranges,
                    })
                })
                .collect::<Result<Vec<_>, ShardError>>()?;
            self.comm.all_gather(&items)?;
        }
        for plan in &work.local {
            self.comm.backend().run(plan, &StepScalars::default())?;
        }
        Ok(())
    }

    /// The full tensor of parameter `param`, with the buffers of the phase that was unsharded.
    ///
    /// # Errors
    /// It is not gathered, it was cast again since, or there is no such parameter.
    pub fn tensor(&self, param: usize) -> Result<&Full<B, R>, ShardError> {
        let len = self.params.len();
        if param >= len {
            return Err(ShardError::NoSuchParam { param, len });
        }
        let (Some(phase), Some(lease)) = (self.held, &self.lease) else {
            return Err(ShardError::NotGathered { param });
        };
        if self.params[param].version() != self.gathered[param] {
            return Err(ShardError::Stale { param });
        }
        self.views
            .iter()
            .find(|views| views.set == lease.set.id)
            .and_then(|views| views.phases[phase as usize][param].as_ref())
            .ok_or(ShardError::NotGathered { param })
    }

    /// Says that the phase is over: frees the full tensors, unless forward ends and the policy is
    /// to keep them. Not collective.
    pub fn reshard(&mut self) {
        if self.reshard_after_forward || self.held != Some(Phase::Forward) {
            self.release();
        }
    }

    /// Frees the full tensors whatever the policy, for example after an evaluation without
    /// backward. Not collective, but every rank must do it at the same place.
    pub fn release(&mut self) {
        self.held = None;
        // What a gather that nobody used writes is lent to others next.
        let written = self.started.take();
        let ordered = written.map_or(Ok(()), |(_, arrived)| self.backend.wait(&arrived));
        match (self.lease.take(), ordered) {
            // A device that cannot wait does not get the memory again.
            (Some(lease), Err(_)) => std::mem::forget(lease),
            (lease, _) => drop(lease),
        }
    }

    /// The number of the pool's buffers that hold the full tensors: plans over them can be kept by
    /// it and the phase.
    pub fn set(&self) -> Option<u64> {
        self.lease.as_ref().map(|lease| lease.set.id)
    }

    /// The phase whose tensors are ready.
    pub fn held(&self) -> Option<Phase> {
        self.held
    }

    /// This rank's shards.
    pub fn params(&self) -> &[ShardedTensor<B, R>] {
        &self.params
    }

    /// The group's communicator.
    pub fn comm(&self) -> &Arc<dyn Communicator<B>> {
        &self.comm
    }

    /// The plan of one parameter and phase, if the shards can serve the phase.
    pub fn plan(&self, param: usize, phase: Phase) -> Option<&GatherPlan> {
        self.plans.get(param)?.phase(phase)
    }

    /// What the group sends and holds.
    pub fn account(&self) -> GatherAccount {
        let params = self.params.iter().zip(self.plans.iter());
        GatherAccount {
            params: params
                .map(|(tensor, plans)| {
                    let plans = plans.phases.iter().flatten();
                    ParamAccount::new(tensor, plans, self.comm.rank())
                })
                .collect(),
            counted_sent_bytes: self.sent,
            gathers: self.gathers,
        }
    }
}

/// Whether a buffer lies in the pool rather than in the shard.
fn pooled(part: Part) -> bool {
    !part.is_per_tensor()
}

/// The full tensors of a group while they are used ([`GatherGroup::unsharded`]).
#[derive(Debug)]
pub struct Unsharded<'a, B: Backend, R: Recipe = AnyRecipe> {
    group: &'a mut GatherGroup<B, R>,
    compute: B,
}

impl<B: Backend, R: Recipe> Unsharded<'_, B, R> {
    /// The full tensor of parameter `param`.
    ///
    /// # Errors
    /// There is no such parameter, or it was cast since it was gathered.
    pub fn tensor(&self, param: usize) -> Result<&Full<B, R>, ShardError> {
        self.group.tensor(param)
    }
}

impl<B: Backend, R: Recipe> Drop for Unsharded<'_, B, R> {
    fn drop(&mut self) {
        // The memory is lent again behind the group's stream.
        if self.group.backend.wait_for(&self.compute).is_err() {
            // A device that cannot wait does not get the memory again.
            std::mem::forget(self.group.lease.take());
        }
        self.group.reshard();
    }
}
