//! [`CollectiveCost`]: the collectives of one step, with their bytes and the time of gathers.

use super::bandwidth::Bandwidth;
use super::buckets::Buckets;
use super::config::CostConfig;
use super::links::{LinkBytes, MovedBytes, Route, all_reduce, neighbours, replicas};
use super::matrices::Matrices;
use super::uneven::Uneven;
use super::vars::Vars;
use super::weight::{Gather, Local, Use};
use super::weights::Weights;
use crate::VarPlace;
use lowp_comm::{GradWire, Mesh};
use lowp_format::Recipe;
use serde::Serialize;

/// All collectives of one kind in a step.
#[derive(Clone, Debug, Serialize)]
pub struct CollectiveCost {
    /// The name in JSON.
    #[serde(rename = "what")]
    pub key: &'static str,
    /// What the collective does, in words.
    #[serde(skip)]
    pub what: &'static str,
    /// The recipe or the dtype of what travels.
    pub code: String,
    /// How often in a step.
    pub passes: usize,
    /// Bytes that the ranks of a replica send, each counted once.
    #[serde(rename = "sent_bytes")]
    pub sent: u128,
    /// Bytes that the collective moves over links.
    #[serde(flatten)]
    pub moved: MovedBytes,
    /// Seconds of gathers, at given rates.
    pub seconds: Option<f64>,
}

/// The collectives of one step.
#[derive(Clone, Debug, Default)]
pub struct StepTraffic {
    /// In the order of a step.
    pub operations: Vec<CollectiveCost>,
    /// Bytes of the smallest and of the largest gather.
    pub sizes: Option<[u128; 2]>,
    /// Whether ranks copy or transpose beside gathers.
    pub copies: bool,
    /// Whether gathers of weights have several batches.
    pub several: bool,
    /// What gradients would move in f32 if all sums were made on the way.
    pub gradients_shared: MovedBytes,
}

/// What a collective is called.
#[derive(Clone, Copy, Debug)]
pub(super) struct CollectiveName {
    /// In JSON.
    pub(super) key: &'static str,
    /// In a table.
    pub(super) what: &'static str,
}

impl CollectiveName {
    const fn new(key: &'static str, what: &'static str) -> Self {
        Self { key, what }
    }
}

/// What gathers of weights are called, in the order of a step.
pub(super) const USES: [(Use, CollectiveName); 4] = [
    (
        Use::Forward,
        CollectiveName::new("forward", "gather weights for forward"),
    ),
    (
        Use::Recompute,
        CollectiveName::new("forward_again", "gather weights for forward again"),
    ),
    (
        Use::Backward,
        CollectiveName::new("backward", "gather weights for backward"),
    ),
    (
        Use::Whole,
        CollectiveName::new("full_weights", "gather full weights"),
    ),
];

impl StepTraffic {
    /// The step of a model whose weights live in `recipe`.
    pub(super) fn new<R: Recipe>(
        weights: &Weights<R>,
        vars: &Vars,
        buckets: &Buckets<'_>,
        matrices: &Matrices,
        recipe: &str,
        config: &CostConfig,
        bandwidth: Option<&Bandwidth>,
    ) -> Self {
        let mut step = Self::default();
        let name = CollectiveName::new("transient_variables", "gather embeddings and heads");
        let sum = CollectiveCost::of_gathers(name, "f32", config.accumulate, bandwidth);
        step.var_gathers(sum, vars.transient_gathers(), config, bandwidth);
        for (of, name) in USES {
            let passes = match of {
                Use::Whole => 1,
                Use::Forward | Use::Recompute | Use::Backward => config.accumulate,
            };
            let mut sum = CollectiveCost::of_gathers(name, recipe, passes, bandwidth);
            for block in &weights.costs {
                for gather in block.gathers.iter().filter(|gather| gather.of == of) {
                    let times = block.count * passes as u128;
                    step.gather(&mut sum, gather, times, config, bandwidth);
                    step.several |= gather.batches > 1 && sum.moved.world != LinkBytes::default();
                }
            }
            step.operations.push(sum);
        }
        let of_weights = weights.by_rank(config.mesh.shard, |cost| &cost.elements);
        let of_vars = vars.all().by_rank(config.mesh.shard, |cost| &cost.elements);
        let elements = of_weights.iter().zip(&of_vars).map(|(a, b)| a + b);
        step.gradients(elements.collect(), buckets, config);
        step.operations.push(CollectiveCost {
            key: "matrices",
            what: "send matrices to owners and back",
            code: "bf16".to_owned(),
            passes: 1,
            sent: matrices.sent,
            moved: matrices.moved,
            seconds: None,
        });
        let name = CollectiveName::new("variables", "gather variables");
        let sum = CollectiveCost::of_gathers(name, "f32", 1, bandwidth);
        step.var_gathers(sum, vars.staying_gathers(), config, bandwidth);
        let takes_time = |operation: &CollectiveCost| operation.seconds.is_some_and(|s| s > 0.0);
        step.operations
            .retain(|operation| operation.sent > 0 || takes_time(operation));
        step
    }

    /// Adds gathers of variables, each so many times, to `sum`, and that to the operations.
    fn var_gathers<'a>(
        &mut self,
        mut sum: CollectiveCost,
        gathers: impl Iterator<Item = (&'a Gather, u128)>,
        config: &CostConfig,
        bandwidth: Option<&Bandwidth>,
    ) {
        for (gather, times) in gathers {
            self.gather(&mut sum, gather, times, config, bandwidth);
        }
        self.operations.push(sum);
    }

    /// Adds a gather that happens `times`.
    fn gather(
        &mut self,
        sum: &mut CollectiveCost,
        gather: &Gather,
        times: u128,
        config: &CostConfig,
        bandwidth: Option<&Bandwidth>,
    ) {
        let pieces = &gather.pieces;
        let bytes: u128 = pieces.iter().map(|&piece| u128::from(piece)).sum();
        let groups = config.mesh.world() / pieces.len();
        let moved = neighbours(pieces, groups, config.per_node, Route::Shared);
        sum.sent += bytes * (config.mesh.shard / pieces.len()) as u128 * times;
        sum.moved += moved * times;
        if let (Some(seconds), Some(bandwidth)) = (&mut sum.seconds, bandwidth) {
            *seconds += times as f64 * bandwidth.seconds(moved.rank, bytes, gather);
        }
        self.copies |= gather.local != Local::default();
        if moved.world != LinkBytes::default() {
            let [smallest, largest] = self.sizes.unwrap_or([bytes; 2]);
            self.sizes = Some([smallest.min(bytes), largest.max(bytes)]);
        }
    }

    /// Adds what becomes of gradients; rank `i` owns `own[i]` elements.
    fn gradients(&mut self, own: Vec<u64>, buckets: &Buckets<'_>, config: &CostConfig) {
        let of_bytes =
            |bytes: u64, elements: &[u64]| elements.iter().map(|own| bytes * own).collect();
        let (bytes, code) = match config.grad_wire {
            GradWire::F32 => (4, "f32"),
            GradWire::Bf16 => (2, "bf16"),
        };
        let passes = config.reductions();
        let Mesh { replicate, shard } = config.mesh;
        let moves =
            |pieces: &Vec<u64>, route| neighbours(pieces, replicate, config.per_node, route);
        // NCCL makes sums in f32; whoever adds bf16 gets all parts.
        let route = match config.grad_wire {
            GradWire::F32 => Route::Shared,
            GradWire::Bf16 => Route::Direct,
        };
        let sums: Vec<u64> = of_bytes(4, &own);
        let uneven = match config.vars {
            VarPlace::Backend if shard > 1 => Uneven::new(own, buckets, config),
            _ => Uneven::none(own, config),
        };
        let pieces = of_bytes(bytes, &uneven.scattered);
        self.gradients_shared =
            moves(&of_bytes(4, &uneven.scattered), Route::Shared) * passes as u128;
        for (key, what, code, sent, moved) in [
            (
                "gradients",
                "reduce-scatter gradients",
                code,
                sum(&pieces),
                moves(&pieces, route),
            ),
            (
                "gradients_on_all",
                "all-reduce gradients",
                "f32",
                shard as u128 * u128::from(uneven.on_all),
                all_reduce(uneven.on_all, shard, replicate, config.per_node),
            ),
            (
                "gradients_passed_on",
                "pass sums on to their owners",
                "f32",
                uneven.passed_on_bytes,
                uneven.passed_on.moved(),
            ),
        ] {
            if key != "gradients" {
                self.gradients_shared += moved * passes as u128;
            }
            self.operations.push(CollectiveCost {
                key,
                what,
                code: code.to_owned(),
                passes,
                sent: sent * passes as u128,
                moved: moved * passes as u128,
                seconds: None,
            });
        }
        if replicate > 1 {
            self.operations.push(CollectiveCost {
                key: "replicas",
                what: "all-reduce between replicas",
                code: "f32".to_owned(),
                passes: 1,
                sent: sum(&sums),
                moved: replicas(&sums, config.mesh, config.per_node),
                seconds: None,
            });
        }
    }

    /// Bytes of linear weights that a replica sends, as a run reports them.
    pub fn wire_bytes(&self) -> u128 {
        let keys = USES.map(|(_, name)| name.key);
        let weights = self.operations.iter().filter(|op| keys.contains(&op.key));
        weights.map(|operation| operation.sent).sum()
    }

    /// What all operations of a step move together.
    pub fn moved(&self) -> MovedBytes {
        let mut sum = MovedBytes::default();
        for operation in &self.operations {
            sum += operation.moved;
        }
        sum
    }

    /// What brings gradients to their owners within replicas.
    pub fn gradients_moved(&self) -> MovedBytes {
        let mut sum = MovedBytes::default();
        for operation in &self.operations {
            if operation.key.starts_with("gradients") {
                sum += operation.moved;
            }
        }
        sum
    }

    /// The time of all gathers.
    pub fn seconds(&self) -> Option<f64> {
        let times = self.operations.iter().filter_map(|op| op.seconds);
        times.reduce(|a, b| a + b)
    }

    /// Whether gathers go from one node to another.
    pub fn gathers_between_nodes(&self) -> bool {
        let mut gathers = self.operations.iter().filter(|op| op.is_gather());
        gathers.any(|op| op.moved.world.between_nodes > 0)
    }
}

impl CollectiveCost {
    /// Gathers of `code` that none was added to yet.
    fn of_gathers(
        CollectiveName { key, what }: CollectiveName,
        code: &str,
        passes: usize,
        bandwidth: Option<&Bandwidth>,
    ) -> Self {
        Self {
            key,
            what,
            code: code.to_owned(),
            passes,
            sent: 0,
            moved: MovedBytes::default(),
            seconds: bandwidth.map(|_| 0.0),
        }
    }

    fn is_gather(&self) -> bool {
        let others = ["replicas", "matrices"];
        !self.key.starts_with("gradients") && !others.contains(&self.key)
    }
}

fn sum(pieces: &[u64]) -> u128 {
    pieces.iter().map(|&piece| u128::from(piece)).sum()
}
