//! [`GatherKind`]: what a group gathers. [`ParamPlans`]: how.

use lowp_format::{BufferSpec, GatherPlan, Origin, Phase};

use super::exchange::Exchange;
use super::steps::MemoryStep;

/// What a group gathers, and from where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GatherKind {
    /// What forward needs, from the shards; and what backward needs, unless that gathers again.
    Forward,
    /// What backward needs, from the shards.
    Backward,
    /// What backward needs, from the parts that a smaller group kept.
    Parts,
    /// What backward needs beside what forward has gathered, from the shards.
    Rest,
}

impl GatherKind {
    pub(super) const ALL: [GatherKind; 4] = [
        GatherKind::Forward,
        GatherKind::Backward,
        GatherKind::Parts,
        GatherKind::Rest,
    ];
}

/// One of each kind.
pub(super) type ByKind<T> = [T; GatherKind::ALL.len()];

/// As many kinds of gathers has a group.
pub(super) const KINDS: u64 = GatherKind::ALL.len() as u64;

impl From<Phase> for GatherKind {
    fn from(phase: Phase) -> Self {
        match phase {
            Phase::Forward => GatherKind::Forward,
            Phase::Backward => GatherKind::Backward,
        }
    }
}

/// The gathers of one parameter. What the shards cannot serve, and what the policy does not need, has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ParamPlans {
    pub(super) plans: ByKind<Option<GatherPlan>>,
    /// Ranks that keep parts together.
    pub(super) group: usize,
}

impl ParamPlans {
    pub(super) fn plan(&self, kind: impl Into<GatherKind>) -> Option<&GatherPlan> {
        self.plans[kind.into() as usize].as_ref()
    }
}

/// The exchange of one kind of gather, by the parameters that have such a gather.
#[derive(Debug)]
pub(super) struct KindExchange<'p> {
    /// Numbers of the parameters, in the order of the exchange.
    params: Vec<usize>,
    pub(super) exchange: Exchange<'p>,
}

impl<'p> KindExchange<'p> {
    /// That of `kind`; pieces of `large` bytes go straight to where they belong.
    pub(super) fn new(plans: &'p [ParamPlans], kind: GatherKind, large: usize) -> Self {
        let numbered = plans.iter().enumerate();
        let of_kind = numbered.filter_map(|(param, plans)| Some((param, plans.plan(kind)?)));
        let (params, of_kind): (Vec<_>, Vec<_>) = of_kind.unzip();
        let ranks = match kind {
            GatherKind::Parts => plans.first().map_or(0, |plans| plans.group),
            GatherKind::Forward | GatherKind::Backward | GatherKind::Rest => {
                of_kind.first().map_or(0, |plan| plan.cuts.world())
            }
        };
        Self {
            params,
            exchange: Exchange::with_large(&of_kind, ranks, large),
        }
    }

    /// The number and the steps of each parameter.
    pub(super) fn steps(&self) -> impl Iterator<Item = (usize, &[MemoryStep<'p>])> {
        let steps = self.exchange.steps.iter().map(Vec::as_slice);
        self.params.iter().copied().zip(steps)
    }

    /// Bytes of the memory that messages arrive in.
    pub(super) fn message_bytes(&self) -> usize {
        self.exchange.message_bytes()
    }
}

/// What ranks that gather the same have in common, beside lengths: group `number`.
pub(super) fn label(number: u64, kind: GatherKind) -> String {
    let what = match kind {
        GatherKind::Forward => "for forward",
        GatherKind::Backward => "for backward",
        GatherKind::Parts => "for backward, of kept parts",
        GatherKind::Rest => "for backward, of what forward has not gathered",
    };
    format!("group {number} {what}")
}

/// Whether a buffer lies in the pool rather than in the shard.
pub(super) fn pooled(spec: &BufferSpec) -> bool {
    spec.origin != Origin::Replicated
}
