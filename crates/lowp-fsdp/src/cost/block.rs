//! [`BlockCost`]: what the gathers of the weights of a block cost, which are done together.

use super::config::CostConfig;
use super::weight::{Gather, Local, Use, WeightCost};
use lowp_format::{GatherPlan, PhasePlans, ReshardAfterForward};
use lowp_shard::{Exchange, MemoryStep, pool_buffers};

/// Blocks that cost the same.
#[derive(Clone, Debug)]
pub(super) struct BlockCost {
    pub(super) count: u128,
    /// In a step, of each micro-batch unless they are of whole weights.
    pub(super) gathers: Vec<Gather>,
    /// Bytes of the memory that the block is gathered in.
    pub(super) gathered: u64,
    /// Bytes of the memories in which messages arrive: one of each communicator that gathers with any.
    pub(super) messages: Vec<u64>,
}

impl BlockCost {
    /// A block of weights that cost this.
    pub(super) fn new(weights: &[&WeightCost], config: &CostConfig) -> Self {
        let plans: Option<Vec<&PhasePlans>> =
            weights.iter().map(|cost| cost.plans.as_ref()).collect();
        match plans {
            Some(plans) => Self::in_rows(&plans, config),
            None => Self {
                count: 0,
                gathers: weights.iter().flat_map(|cost| cost.whole.clone()).collect(),
                gathered: 0,
                messages: Vec::new(),
            },
        }
    }

    fn in_rows(plans: &[&PhasePlans], config: &CostConfig) -> Self {
        let ranks = config.mesh.shard;
        let of = |plan: fn(&PhasePlans) -> &GatherPlan| -> Vec<&GatherPlan> {
            plans.iter().map(|plans| plan(plans)).collect()
        };
        let forward = Exchange::new(&of(|plans| &plans.forward), ranks);
        let backward = Exchange::new(&of(|plans| &plans.backward), ranks);
        let parts: Vec<_> = plans.iter().filter_map(|p| p.parts.as_ref()).collect();
        let parts = match config.reshard {
            ReshardAfterForward::Group(group) if !parts.is_empty() => {
                Some(Exchange::new(&parts, group))
            }
            _ => None,
        };
        let rest: Vec<_> = plans.iter().filter_map(|p| p.rest.as_ref()).collect();
        let rest = (rest.len() == plans.len()).then(|| Exchange::new(&rest, ranks));
        let kept = parts.as_ref().map(pieces).unwrap_or_default();
        let keeping = Local::of(kept.iter().max().copied().unwrap_or(0));
        let gather = |of, exchange: &Exchange<'_>, beside| Gather {
            of,
            pieces: pieces(exchange),
            batches: exchange.batches(),
            local: [local(exchange), beside].into_iter().sum(),
        };
        let mut gathers = vec![gather(Use::Forward, &forward, keeping)];
        if config.recompute && config.reshard != ReshardAfterForward::No {
            gathers.push(gather(Use::Recompute, &forward, keeping));
        }
        let last = parts
            .as_ref()
            .or(rest.as_ref().filter(|_| config.recompute));
        let last = last.unwrap_or(&backward);
        gathers.push(gather(Use::Backward, last, Local::default()));
        let all = [
            Some(&forward),
            Some(&backward),
            parts.as_ref(),
            rest.as_ref(),
        ];
        let all = || all.into_iter().flatten();
        let most = all().map(Exchange::message_bytes).max().unwrap_or(0) as u64;
        let has = |exchange: &Exchange<'_>| exchange.message_bytes() > 0;
        let shards = has(&forward) || has(&backward);
        let of_parts = parts.as_ref().is_some_and(has);
        let memories = usize::from(shards) + usize::from(of_parts);
        let buffers = |weight: usize| {
            let steps = all().flat_map(|exchange| &exchange.steps[weight]);
            pool_buffers(steps).into_iter()
        };
        let buffers = (0..plans.len()).flat_map(buffers);
        Self {
            count: 0,
            gathers,
            gathered: buffers.map(|buffer| buffer.bytes as u64).sum(),
            messages: vec![most; memories],
        }
    }
}

/// Bytes that each rank sends.
fn pieces(exchange: &Exchange<'_>) -> Vec<u64> {
    let mut all: Vec<u64> = exchange.padding.iter().map(|&bytes| bytes as u64).collect();
    for step in exchange.steps.iter().flatten() {
        if let MemoryStep::Fetch { pieces, .. } | MemoryStep::Unpack { pieces, .. } = step {
            let each = all.iter_mut().zip(*pieces);
            each.for_each(|(sum, &bytes)| *sum += bytes as u64);
        }
    }
    all
}

/// Bytes that a rank reads and writes to make messages, and the buffers of what arrived.
fn local(exchange: &Exchange<'_>) -> Local {
    let alone = exchange.padding.len() == 1;
    let mut unpacked = 0;
    let mut sum = Local::default();
    for step in exchange.steps.iter().flatten() {
        let bytes = match step {
            MemoryStep::Fetch { pieces, .. } if alone => pieces[0],
            MemoryStep::Unpack { pieces, .. } => {
                unpacked += pieces.iter().sum::<usize>();
                continue;
            }
            MemoryStep::Interleave { from, .. } => from.bytes,
            MemoryStep::Rearrange { to, .. } | MemoryStep::Transpose { to, .. } => to.bytes,
            MemoryStep::Fetch { .. } | MemoryStep::Replicated(_) => 0,
        };
        sum += Local::of(bytes as u64);
    }
    // The message of a rank, and what is taken out of those of all.
    let own = exchange.messages.iter().map(ExactSizeIterator::len).max();
    [
        Local::of(own.unwrap_or(0) as u64),
        Local::of(unpacked as u64),
    ]
    .into_iter()
    .fold(sum, |mut sum, one| {
        sum += one;
        sum
    })
}
