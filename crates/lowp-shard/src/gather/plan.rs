//! [`GroupPlan`]: the plans of a group, which steps each parameter takes in each phase, and what ranks compare of them.

use std::sync::Arc;

use lowp_format::{
    BufferSpec, GatherPlan, GatherStep, Phase, PhasePlans, Recipe, ReshardAfterForward, Usage,
};
use lowp_kernels::{Backend, KernelError};

use super::account::Padding;
use super::kind::{ByKind, GatherKind, ParamPlans};
use super::pool::{GatherPool, Geometry};
use crate::{ShardError, ShardedTensor};
use lowp_comm::{CommError, Communicator};

/// What a group decides once.
#[derive(Debug)]
pub(super) struct GroupPlan<B: Backend> {
    /// The same on every rank: groups are made in the same order.
    pub(super) number: u64,
    pub(super) policy: ReshardAfterForward,
    /// The plans of each parameter.
    pub(super) params: Arc<[ParamPlans]>,
    pub(super) geometry: Arc<Geometry<B>>,
    pub(super) padding: ByKind<Padding>,
}

impl<B: Backend> GroupPlan<B> {
    /// The plan of a new group with memory of `pool`; `comms` make its gathers, by kind.
    pub(super) fn new(
        params: Arc<[ParamPlans]>,
        policy: ReshardAfterForward,
        pool: &GatherPool<B>,
        comms: ByKind<&Arc<dyn Communicator<B>>>,
    ) -> Self {
        let ranks = comms.map(|comm| comm.rank());
        let world = comms[GatherKind::Forward as usize].world_size();
        Self {
            number: pool.next_group(),
            policy,
            geometry: pool.geometry(&params, comms),
            padding: Padding::new(&params, ranks, world, pool.large),
            params,
        }
    }

    /// Whether what forward gathered is still there in backward.
    pub(super) fn keeps(&self) -> bool {
        self.policy == ReshardAfterForward::No
    }

    /// Whether backward can build on what forward gathered just before.
    pub(super) fn has_rest(&self) -> bool {
        let mut params = self.params.iter();
        self.policy == ReshardAfterForward::Yes
            && params.all(|plans| plans.plan(GatherKind::Rest).is_some())
    }

    /// The error of what a gather does once, with what to do before a capture.
    pub(super) fn first_in_capture(&self, error: ShardError, phase: Phase) -> ShardError {
        match error {
            ShardError::Kernel(KernelError::InCapture { what }) => ShardError::FirstInCapture {
                group: self.number,
                phase,
                what,
            },
            error => error,
        }
    }
}

/// The plans of all parameters.
pub(super) fn plan_params<B: Backend, R: Recipe>(
    params: &[ShardedTensor<B, R>],
    comm: &dyn Communicator<B>,
    policy: ReshardAfterForward,
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
            let found = spec.world();
            return Err(ShardError::from(CommError::World { what, found, world }));
        }
        let plans = if spec.usage() == Usage::BOTH {
            let p = PhasePlans::with_plans(world, policy, |fetch, need, held| {
                spec.plan(&recipe, fetch, need, held)
            })?;
            [Some(p.forward), Some(p.backward), p.parts, p.rest]
        } else {
            let usage = spec.usage();
            let make = |phase: Phase| {
                let serves = usage.contains(phase.usage());
                let make = || spec.plan(&recipe, usage, usage, &[]);
                serves.then(make).transpose()
            };
            [make(Phase::Forward)?, make(Phase::Backward)?, None, None]
        };
        for plan in plans.iter().flatten() {
            check_derived(&recipe, plan)?;
        }
        let group = match policy {
            ReshardAfterForward::Group(ranks) => ranks,
            ReshardAfterForward::Yes | ReshardAfterForward::No => 0,
        };
        Ok(ParamPlans { plans, group })
    };
    params.iter().enumerate().map(plan).collect()
}

/// Everything that ranks must have in common, as text. Pieces of `large` bytes travel by themselves, others in messages.
pub(super) fn describe<B: Backend, R: Recipe>(
    params: &[ShardedTensor<B, R>],
    plans: &[ParamPlans],
    policy: ReshardAfterForward,
    large: usize,
) -> String {
    use std::fmt::Write as _;
    let mut text = format!(
        "{} params, reshard {policy}, pieces are large from {large} bytes",
        params.len()
    );
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
        if !spec.tiles().are_rows() {
            let _ = write!(text, " in tiles of {}", spec.tiles().tile());
        }
        let _ = write!(text, " cut at {ends:?}, {recipe:?}, sends");
        for step in plans.plans.iter().flatten().flat_map(|plan| &plan.steps) {
            let _ = write!(text, " {}={}", step.spec().key, step.wire_bytes());
        }
    }
    text
}

/// Accepts plans whose derived buffers are exact transposes of their sources.
pub(crate) fn check_derived<R: Recipe>(recipe: &R, plan: &GatherPlan) -> Result<(), ShardError> {
    let all = recipe.buffers(Usage::BOTH);
    for step in &plan.steps {
        if let GatherStep::Derive { spec, from } = step {
            let from = all.iter().find(|s| s.key == *from).unwrap_or(spec);
            check_transpose(recipe.name(), spec, from, plan)?;
        }
    }
    Ok(())
}

fn check_transpose(
    recipe: &'static str,
    spec: &BufferSpec,
    from: &BufferSpec,
    plan: &GatherPlan,
) -> Result<(), ShardError> {
    let [outer, inner] = from.entries(plan.full);
    let why = if spec.code != from.code {
        "their entries are encoded differently"
    } else if spec.axes == from.axes {
        "both follow the same axes (give the buffer Usage::BOTH and let it serve both)"
    } else if spec.entries(plan.full) != [inner, outer] {
        "their entry counts are not exchanged"
    } else {
        return Ok(());
    };
    let (buffer, from) = (spec.key.to_string(), from.key.to_string());
    Err(ShardError::NotATranspose {
        recipe,
        buffer,
        from,
        why,
    })
}
