//! [`GatherGroup`]: the gather engine. Parameters that are used together are gathered together,
//! in one batched collective per phase, into memory that groups of equal shapes share.

use std::sync::Arc;

use lowp_format::{
    AnyRecipe, GatherPlan, GatherStep, Origin, Part, Phase, PhasePlans, QuantizedTensor, Recipe,
    Usage,
};
use lowp_kernels::{Backend, StepScalars};

use crate::{Communicator, GatherItem, ShardError, ShardedTensor, or_abort, ordered};

mod account;
mod pool;
mod scratch;
mod steps;

pub use account::{GatherAccount, ParamAccount};
pub use pool::GatherPool;
pub(crate) use pool::check_transpose;
use pool::{Lease, ParamPlans};
pub use scratch::Scratch;
pub use steps::{GatherTarget, run_steps};

/// A full tensor as the pool's buffers hold it.
type Full<B, R> = QuantizedTensor<<B as Backend>::Buffer<u8>, R>;

/// The full tensors of one destination set, per phase and parameter.
#[derive(Debug)]
struct Views<B: Backend, R: Recipe> {
    set: u64,
    phases: [Vec<Option<Full<B, R>>>; 2],
}

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
    /// The versions of the shards that the held tensors were gathered from.
    gathered: Vec<u64>,
    views: Vec<Views<B, R>>,
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
        comm.agree(
            "the gather plan",
            &describe(&params, &plans, reshard_after_forward),
        )?;
        let plans: Arc<[ParamPlans]> = plans.into();
        let geometry = pool.geometry(&plans);
        let number = pool.next_group();
        let gathered = vec![0; params.len()];
        Ok(Self {
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
            gathered,
            views: Vec::new(),
            sent: 0,
            gathers: 0,
        })
    }

    /// Makes the full tensors of all parameters ready for `phase`. Collective; does nothing if
    /// they are ready. In a capture they are ready where the graph is launched.
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

    /// Whether a parameter was written since it was gathered.
    fn is_stale(&self) -> bool {
        let mut versions = self.params.iter().zip(&self.gathered);
        self.held.is_some() && versions.any(|(tensor, &gathered)| tensor.version() != gathered)
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
        self.comm.agree("which gathered tensors are stale", &text)
    }

    fn try_unshard(&mut self, phase: Phase) -> Result<(), ShardError> {
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
        let mut forward_held = builds && self.held == Some(Phase::Forward);
        // Only where another rank might go on with what it holds.
        if (forward_held || self.held == Some(phase)) && self.is_stale() {
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
        if builds && !forward_held {
            self.run(Phase::Forward)?;
        }
        self.run(phase)?;
        self.held = Some(phase);
        Ok(())
    }

    /// One phase's exchange and local work.
    fn run(&mut self, phase: Phase) -> Result<(), ShardError> {
        let Some(lease) = &self.lease else {
            return Ok(());
        };
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
            let before = self.comm.traffic();
            ordered(&self.backend, &*self.comm, || self.comm.all_gather(&items))?;
            self.sent += self.comm.traffic().since(before).all_gather_bytes;
            self.gathers += 1;
        }
        for plan in &work.local {
            self.backend.run(plan, &StepScalars::default())?;
        }
        let id = lease.set.id;
        if self.views.iter().all(|views| views.set != id) {
            let views = self.make_views(lease)?;
            self.views.push(views);
        }
        Ok(())
    }

    fn make_views(&self, lease: &Lease<B>) -> Result<Views<B, R>, ShardError> {
        let mut phases = [Vec::new(), Vec::new()];
        for phase in Phase::ALL {
            for (param, plans) in self.plans.iter().enumerate() {
                let view = match plans.phase(phase) {
                    Some(plan) => Some(self.make_view(lease, param, plan, phase)?),
                    None => None,
                };
                phases[phase as usize].push(view);
            }
        }
        Ok(Views {
            set: lease.set.id,
            phases,
        })
    }

    fn make_view(
        &self,
        lease: &Lease<B>,
        param: usize,
        plan: &GatherPlan,
        phase: Phase,
    ) -> Result<Full<B, R>, ShardError> {
        let tensor = &self.params[param];
        let mut specs: Vec<_> = Vec::new();
        if phase == Phase::Backward && !self.reshard_after_forward {
            let forward = self.plans[param].phase(Phase::Forward);
            specs.extend(forward.into_iter().flat_map(GatherPlan::kept).copied());
        }
        for spec in plan.kept() {
            if specs.iter().all(|s| s.key != spec.key) {
                specs.push(*spec);
            }
        }
        QuantizedTensor::with_buffers(tensor.recipe(), plan.full, specs, |spec, _| {
            Ok(match (spec.origin, lease.set.buffer(param, spec.key)) {
                // Equal on all ranks: the shard's own handle serves, so it can never be stale.
                (Origin::Replicated, _) | (_, None) => {
                    tensor.local().buffer(spec.key)?.storage.clone()
                }
                (_, Some(buffer)) => buffer.clone(),
            })
        })
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
        self.lease = None;
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

/// The plans of all parameters.
fn plan_params<B: Backend, R: Recipe>(
    params: &[ShardedTensor<B, R>],
    comm: &dyn Communicator<B>,
    reshard_after_forward: bool,
) -> Result<Vec<ParamPlans>, ShardError> {
    let plan = |(param, tensor): (usize, &ShardedTensor<B, R>)| {
        let (spec, recipe) = (tensor.spec(), tensor.recipe());
        let (world, rank) = (comm.world_size(), comm.rank());
        if (spec.world(), spec.rank()) != (world, rank) {
            let what = format!(
                "parameter {param} ({}), shard of rank {},",
                spec.full(),
                spec.rank()
            );
            return Err(ShardError::World {
                what,
                found: spec.world(),
                world,
            });
        }
        let phases = if spec.usage() == Usage::BOTH {
            let p = PhasePlans::new(&recipe, spec.full(), spec.cuts(), reshard_after_forward)?;
            [Some(p.forward), Some(p.backward)]
        } else {
            let usage = spec.usage();
            let make = |phase: Phase| {
                let serves = usage.contains(phase.usage());
                let make =
                    || GatherPlan::with_cuts(&recipe, spec.full(), spec.cuts(), usage, usage, &[]);
                serves.then(make).transpose()
            };
            [make(Phase::Forward)?, make(Phase::Backward)?]
        };
        for plan in phases.iter().flatten() {
            for step in &plan.steps {
                if let GatherStep::Derive { spec, from } = step {
                    let all = recipe.buffers(Usage::BOTH);
                    let from = all.iter().find(|s| s.key == *from).copied();
                    let from = from.unwrap_or(*spec);
                    check_transpose(recipe.name(), spec, &from, plan)?;
                }
            }
        }
        Ok(ParamPlans { phases })
    };
    params.iter().enumerate().map(plan).collect()
}

/// Everything that ranks must have in common, as text.
fn describe<B: Backend, R: Recipe>(
    params: &[ShardedTensor<B, R>],
    plans: &[ParamPlans],
    reshard_after_forward: bool,
) -> String {
    use std::fmt::Write as _;
    let mut text = format!("{} params, reshard {reshard_after_forward}", params.len());
    for (param, (tensor, plans)) in params.iter().zip(plans).enumerate() {
        let (spec, recipe) = (tensor.spec(), tensor.recipe());
        let ends: Vec<usize> = spec.cuts().ranges().map(|r| r.end).collect();
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "; {param}: {} {} {}",
            recipe.name(),
            spec.full(),
            spec.usage()
        );
        let _ = write!(text, " cut at {ends:?}, {recipe:?}, sends");
        for step in plans.phases.iter().flatten().flat_map(|plan| &plan.steps) {
            let _ = write!(text, " {}={}", step.spec().key, step.wire_bytes());
        }
    }
    text
}

/// Whether a buffer lies in the pool rather than in the shard.
fn pooled(part: Part) -> bool {
    !part.is_per_tensor()
}
