//! What a model costs before anything is allocated: the memory of the rank that holds most ([`Memory`]), and the collectives of a step with
//! their bytes and times ([`Step`]). The numbers are those of a run: they follow from the same plans of gathers.
//!
//! ```
//! use lowp_format::{AnyRecipe, RecipeOptions};
//! use lowp_fsdp::cost::{CostConfig, CostError, Costs, ModelShapes};
//! use lowp_comm::Mesh;
//!
//! let mut model = ModelShapes::default();
//! model.linear(0, "proj".to_owned(), 64, 32);
//! let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
//! let config = CostConfig { mesh: Mesh::sharded(2), ..CostConfig::default() };
//! let costs = Costs::new(&model, &[recipe], "mxfp8", &config, None)?;
//! // Rank 1 sends rank 0 half of the codes and scales of either orientation.
//! assert_eq!(costs.step.moved().rank.within_node, (64 * 32 + 64 + 4 * 64 * 32 / 2) as u128);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bandwidth;
mod links;
mod memory;
mod shapes;
mod traffic;
mod weight;
mod weights;

pub use bandwidth::{Bandwidth, Rate};
pub use links::{Links, Moved};
pub use memory::Memory;
pub use shapes::{LayerShape, ModelShapes};
pub use traffic::{Operation, Step};

use lowp_comm::{GradWire, Mesh};
use lowp_format::{FormatError, Recipe, ReshardAfterForward, Shape};
use lowp_shard::ShardError;
use thiserror::Error;

use crate::plain_vars::VarRecipe;
use crate::{Sharding, VarPlace, VarShapeError};
use weight::WeightCost;
use weights::Weights;

/// Most ranks of a model that is planned.
pub const MAX_RANKS: usize = 1 << 17;

/// Most micro-batches of a step that is planned.
pub const MAX_MICRO_BATCHES: usize = 1 << 16;

/// Bytes of a parameter in its master, two moments and the reduced gradient.
pub const PARAMETER_STATE: u128 = 16;

/// How a model is trained.
#[derive(Clone, Copy, Debug)]
pub struct CostConfig {
    /// The ranks.
    pub mesh: Mesh,
    /// Ranks of a node.
    pub per_node: usize,
    /// What a rank has of the linear layers.
    pub sharding: Sharding,
    /// What becomes of gathered weights, among the ranks of a replica.
    pub reshard: ReshardAfterForward,
    /// How gradients travel.
    pub grad_wire: GradWire,
    /// Where layers run, and full variables with them: on the host, which decodes weights, or on a device, which reads them as they are
    /// gathered.
    pub vars: VarPlace,
    /// Whether a device gathers the weights of a block while the one before it runs.
    pub prefetch: bool,
    /// Micro-batches of a step.
    pub accumulate: usize,
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
            vars: VarPlace::Host,
            prefetch: false,
            accumulate: 1,
            recompute: false,
        }
    }
}

impl CostConfig {
    /// Checks that bytes can be counted, and that there are ranks and micro-batches.
    fn check(&self) -> Result<(), CostError> {
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
        /// Its number.
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
        /// Its shape.
        shape: Shape,
        /// What is wrong.
        source: FormatError,
    },
    /// A model whose bytes are not counted.
    #[error("{parameters} parameters; a plan is made for at most {most}")]
    Parameters {
        /// Its parameters.
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
        /// What it is.
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
        /// What it is called.
        file: String,
        /// What is wrong with it.
        what: String,
    },
}

/// What a model costs in one recipe.
#[derive(Debug)]
pub struct Costs {
    /// Of the rank that holds most.
    pub memory: Memory,
    /// Bytes of linear weights of all ranks of a replica.
    pub resident: u128,
    /// Bytes of their masters.
    pub masters: u128,
    /// Those bytes of linear weights of the rank that holds most that are scales, not codes.
    pub scales: u128,
    /// Ranks of a replica that have no elements of linear layers.
    pub idle: usize,
    /// Bytes of variables, beside what the memory has: shards, and what they are gathered in.
    pub outside: u128,
    /// On devices, where gradients arrive that are added there: those in bf16, and of micro-batches behind the first.
    pub staging: u128,
    /// The collectives of a step.
    pub step: Step,
}

impl Costs {
    /// What `model` costs with its linear layers in these `recipes`, which `name` names, with the times of gathers at the rates of
    /// `bandwidth`.
    ///
    /// # Errors
    /// A shape that its recipe cannot take, a model that is too large, recipes that are not one for each layer, or a number of `config` that
    /// no run has.
    pub fn new<R: Recipe + PartialEq>(
        model: &ModelShapes,
        recipes: &[R],
        name: &str,
        config: &CostConfig,
        bandwidth: Option<&Bandwidth>,
    ) -> Result<Self, CostError> {
        model.check()?;
        config.check()?;
        if recipes.len() != model.layers.len() {
            return Err(CostError::Recipes {
                recipes: recipes.len(),
                layers: model.layers.len(),
            });
        }
        let weights = recipes.iter().zip(&model.layers);
        let weights = weights.map(|(recipe, layer)| (*recipe, layer.block, layer.shape));
        let weights = Weights::new(weights, config);
        let weights = weights.map_err(|(number, source)| CostError::Layer { number, source })?;
        // Variables are rows of f32, whatever the weights are, and gathered once per step.
        let of_vars = CostConfig {
            sharding: Sharding::Fsdp,
            reshard: ReshardAfterForward::Yes,
            recompute: false,
            ..*config
        };
        let vars = model.vars.iter();
        let vars = vars.map(|&shape| (VarRecipe::default(), 0, shape));
        let vars = Weights::new(vars, &of_vars).map_err(|(_, error)| CostError::Vars(error))?;
        let memory = Memory::new(model, &weights, &vars, config);
        let step = Step::new((&weights, &vars), name, config, bandwidth);
        let all = |of: fn(&WeightCost) -> &[u64]| {
            weights.sum(|cost| of(cost).iter().map(|&n| u128::from(n)).sum())
        };
        let elements = weights.by_rank(config.mesh.shard, |cost| &cost.elements);
        Ok(Self {
            idle: elements.iter().filter(|&&elements| elements == 0).count(),
            resident: all(|cost| &cost.stored),
            masters: 4 * all(|cost| &cost.elements),
            scales: weights.sum(|cost| u128::from(cost.scales[memory.rank])),
            outside: vars.sum(|cost| u128::from(cost.stored[memory.rank] + cost.gathered)),
            staging: memory::staging(model, config),
            memory,
            step,
        })
    }

    /// What the rank that holds most has on a device, beside what runs the layers.
    pub fn on_device(&self) -> u128 {
        self.memory.total + self.outside + self.staging
    }
}
