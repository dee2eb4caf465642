//! [`CostConfig`]: how a model that is planned trains. [`CostError`]: why there is no plan.

use lowp_comm::{GradWire, Mesh};
use lowp_format::{FormatError, ReshardAfterForward, STATE_BLOCK, Shape};
use lowp_optim::{Rule, StateDtype, StateDtypes};
use lowp_shard::ShardError;
use thiserror::Error;

use crate::plain_vars::VarRecipe;
use crate::{Sharding, VarPlace, VarShapeError};

/// Most ranks of a model that is planned.
pub const MAX_RANKS: usize = 1 << 17;

/// Most micro-batches of a step that is planned.
pub const MAX_MICRO_BATCHES: usize = 1 << 16;

/// Bytes of `len` elements of a parameter in masters, states by `rule` and reduced gradients.
pub fn parameter_state(rule: Rule, state: StateDtypes, len: u128) -> u128 {
    let each = state.master.bytes() + size_of::<f32>();
    each as u128 * len + states_of(rule, state, len)
}

/// Bytes of `len` elements of a variable, as [`parameter_state`] counts them: its master stays in f32.
pub fn variable_state(rule: Rule, state: StateDtypes, len: u128) -> u128 {
    parameter_state(rule, state.of_recipe(&VarRecipe::default()), len)
}

/// Bytes of the states of `len` elements.
pub(super) fn states_of(rule: Rule, state: StateDtypes, len: u128) -> u128 {
    let states = state.of_rule(rule);
    // No shard has more elements than there are addresses; a plan may.
    let bytes = |dtype: StateDtype| match dtype {
        StateDtype::Fp8 => len + len.div_ceil(STATE_BLOCK as u128),
        _ => dtype.bytes(1) as u128 * len,
    };
    states.map(|(_, dtype)| bytes(dtype)).sum()
}

/// How a model is trained.
#[derive(Clone, Copy, Debug)]
pub struct CostConfig {
    /// Replicas and shards of the world.
    pub mesh: Mesh,
    /// Ranks of a node.
    pub per_node: usize,
    /// What a rank has of the linear layers.
    pub sharding: Sharding,
    /// What becomes of gathered weights, among the ranks of a replica.
    pub reshard: ReshardAfterForward,
    /// The dtype that gradients have between ranks; sums are f32.
    pub grad_wire: GradWire,
    /// How the optimizer updates parameters; where it is a rule of matrices, AdamW updates variables.
    pub rule: Rule,
    /// The dtypes of masters, and of the states that the rule has.
    pub state: StateDtypes,
    /// Whether masters and states are page-locked memory of the host.
    pub offload: bool,
    /// Where layers run, and full variables with them: on the host, which decodes weights, or on a device, which reads them as they are
    /// gathered.
    pub vars: VarPlace,
    /// Whether a device gathers the weights of a block while the one before it runs.
    pub prefetch: bool,
    /// Whether the ranks that share gradients are GPUs that read each other's, so that no memory takes what arrives.
    pub peer_reads: bool,
    /// Micro-batches of a step.
    pub accumulate: usize,
    /// Whether gradients are reduced in every micro-batch, not added on the rank until the last one.
    pub reduce_every_micro_batch: bool,
    /// Whether backward runs the layers forward again.
    pub recompute: bool,
}

impl Default for CostConfig {
    /// One rank, on a node of eight.
    fn default() -> Self {
        Self {
            mesh: Mesh::sharded(1),
            per_node: 8,
            sharding: Sharding::Fsdp,
            reshard: ReshardAfterForward::Yes,
            grad_wire: GradWire::F32,
            rule: Rule::default(),
            state: StateDtypes::default(),
            offload: false,
            vars: VarPlace::Host,
            prefetch: false,
            peer_reads: false,
            accumulate: 1,
            reduce_every_micro_batch: false,
            recompute: false,
        }
    }
}

impl CostConfig {
    /// What the rule keeps beside the masters, in words.
    pub(super) fn states(&self) -> &'static str {
        use StateDtype::{Bf16, F32, Fp8};
        let dtypes: Vec<StateDtype> = self.state.of_rule(self.rule).map(|(_, d)| d).collect();
        match dtypes[..] {
            [] => "states, none",
            [F32] => "momentum, f32",
            [Bf16] => "momentum, bf16",
            [Fp8] => "momentum, fp8",
            [F32, F32] => "moments, 2 x f32",
            [Bf16, Bf16] => "moments, 2 x bf16",
            [Fp8, Fp8] => "moments, 2 x fp8",
            [Fp8, _] => "moments, fp8 and f32",
            _ => "moments, bf16 and f32",
        }
    }

    /// Bytes of the states of `len` elements.
    pub(super) fn state_bytes(&self, len: u128) -> u128 {
        states_of(self.rule, self.state, len)
    }

    /// How variables are updated: by AdamW where the rule is one of matrices.
    pub(super) fn var_rule(&self) -> Rule {
        match self.rule.is_of_matrices() {
            true => Rule::AdamW,
            false => self.rule,
        }
    }

    /// How often gradients are reduced in a step.
    pub fn reductions(&self) -> usize {
        if self.reduce_every_micro_batch {
            self.accumulate
        } else {
            1
        }
    }

    /// Whether gradients stay on the rank until the last micro-batch.
    pub fn keeps_gradients(&self) -> bool {
        self.accumulate > 1 && !self.reduce_every_micro_batch
    }

    /// Checks that bytes can be counted, and that there are ranks and micro-batches.
    pub(super) fn check(&self) -> Result<(), CostError> {
        let Mesh { replicate, shard } = self.mesh;
        for (field, found, most) in [
            ("the mesh's number of replicas", replicate, MAX_RANKS),
            ("the mesh's number of shards", shard, MAX_RANKS),
            ("per_node", self.per_node, MAX_RANKS),
            ("accumulate", self.accumulate, MAX_MICRO_BATCHES),
        ] {
            if !(1..=most).contains(&found) {
                return Err(CostError::Config { field, found, most });
            }
        }
        match self.mesh.world() <= MAX_RANKS {
            true => Ok(()),
            false => Err(CostError::Ranks { mesh: self.mesh }),
        }
    }
}

/// Why there is no account of a model.
#[derive(Debug, Error)]
pub enum CostError {
    /// A weight that its recipe cannot take.
    #[error("{source}")]
    Layer {
        /// The layer's number.
        number: usize,
        /// What is wrong.
        source: ShardError,
    },
    /// Variables that cannot be sharded.
    #[error("the variables: {0}")]
    Vars(ShardError),
    /// A shape that no matrix has.
    #[error("{name} is {shape}: {source}")]
    Shape {
        /// The layer.
        name: String,
        /// The layer's shape.
        shape: Shape,
        /// What is wrong.
        source: FormatError,
    },
    /// A model whose bytes are not counted.
    #[error("{parameters} parameters; a plan is made for at most {most}")]
    Parameters {
        /// Parameters of the model.
        parameters: u128,
        /// The most.
        most: u128,
    },
    /// A variable that no model has.
    #[error(transparent)]
    Var(#[from] VarShapeError),
    /// Recipes that are not one for each linear layer.
    #[error("{recipes} recipes for {layers} linear layers; give one for each")]
    Recipes {
        /// Recipes.
        recipes: usize,
        /// Linear layers.
        layers: usize,
    },
    /// A number of a [`CostConfig`] that no run has.
    #[error("{field} is {found}; give a number from 1 to {most}")]
    Config {
        /// The field.
        field: &'static str,
        /// The number given.
        found: usize,
        /// The most.
        most: usize,
    },
    /// A mesh of more ranks than are counted.
    #[error("{mesh} ranks; a plan is made for at most {MAX_RANKS}")]
    Ranks {
        /// The mesh.
        mesh: Mesh,
    },
    /// A rate of no link.
    #[error("{rate:?} GB/s; a rate is a number from {least} to {most}")]
    Rate {
        /// 10^9 bytes in a second.
        rate: f64,
        /// The least.
        least: f64,
        /// The most.
        most: f64,
    },
    /// A report whose rates cannot be taken.
    #[error("{file} {what}")]
    Report {
        /// The name of the file.
        file: String,
        /// What is wrong with the report.
        what: String,
    },
}
