//! What a model costs before anything is allocated: the memory of the rank that holds most ([`RankMemory`]), and the collectives of a step with
//! their bytes and times ([`StepTraffic`]). The numbers are those of a run: they follow from the same plans of gathers.
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
mod block;
mod buckets;
mod config;
mod links;
mod matrices;
mod memory;
mod offload;
mod shapes;
mod spread;
mod traffic;
mod uneven;
mod vars;
mod weight;
mod weights;

pub use bandwidth::{Bandwidth, Rate};
pub use config::{
    CostConfig, CostError, MAX_MICRO_BATCHES, MAX_RANKS, parameter_state, variable_state,
};
pub use links::{LinkBytes, MovedBytes};
pub use memory::RankMemory;
pub use offload::OffloadCost;
pub use shapes::{LayerShape, ModelShapes, VarShape};
pub use spread::{RankSpread, SentSpread, Spread};
pub use traffic::{CollectiveCost, StepTraffic};

use lowp_format::{Recipe, block_cuts};

use lowp_optim::{Rule, StateDtypes};

use buckets::Buckets;
use matrices::Matrices;
use vars::Vars;
use weight::WeightCost;
#[cfg(feature = "cuda")]
pub(crate) use weight::master_passes;
use weights::{NewWeight, Weights};

/// What a model costs in one recipe.
#[derive(Debug)]
pub struct Costs {
    /// Bytes of the rank that holds most.
    pub memory: RankMemory,
    /// What of `memory` is page-locked memory of the host.
    pub offloaded: OffloadCost,
    /// Bytes of linear weights of all ranks of a replica.
    pub resident: u128,
    /// Bytes of the masters of linear weights of all ranks of a replica, beside the weights.
    pub masters: u128,
    /// Elements of linear weights.
    parameters: u128,
    /// Those bytes of linear weights of the rank that holds most that are scales, not codes.
    pub scales: u128,
    /// How evenly the ranks of a replica have and send the linear layers.
    pub spread: RankSpread,
    /// Ranks of a replica that have no elements of linear layers.
    pub idle_ranks: usize,
    /// Bytes of variables, beside what the memory has: shards, and what those that stay are gathered in.
    pub var_gather_bytes: u128,
    /// On devices, where gradients arrive that are added there, those in bf16 and of micro-batches after the first, and sums that go on to other ranks.
    pub staging: u128,
    /// How the optimizer updates parameters.
    pub rule: Rule,
    /// The dtypes of masters and of its states.
    pub state: StateDtypes,
    /// The collectives of a step.
    pub step: StepTraffic,
}

impl Costs {
    /// What `model` costs with its linear layers in these `recipes`, which `name` names, with the times of gathers at the rates of
    /// `bandwidth`.
    ///
    /// # Errors
    /// A shape that its recipe cannot take, a model that is too large, recipes that are not one for each layer, or a number of `config` that
    /// no run has.
    pub fn new<R: Recipe>(
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
        let weights = weights.map(|(recipe, layer)| NewWeight {
            recipe: *recipe,
            block: layer.block,
            shape: layer.shape,
        });
        let unit = config.state.unit(config.rule);
        let weights = Weights::new(weights, config, unit, block_cuts);
        let weights = weights.map_err(|(number, source)| CostError::Layer { number, source })?;
        let vars = Vars::new(&model.vars, config)?;
        let buckets = Buckets::new(model, &weights, &vars, config);
        let matrices = Matrices::new(&weights, config);
        let memory = RankMemory::new(&weights, &vars, &buckets, &matrices, config);
        let step = StepTraffic::new(
            &weights, &vars, &buckets, &matrices, name, config, bandwidth,
        );
        let all = |of: fn(&WeightCost) -> &[u64]| {
            weights.sum(|cost| of(cost).iter().map(|&n| u128::from(n)).sum())
        };
        let elements = weights.by_rank(config.mesh.shard, |cost| &cost.elements);
        Ok(Self {
            idle_ranks: elements.iter().filter(|&&elements| elements == 0).count(),
            resident: all(|cost| &cost.stored),
            masters: all(|cost| &cost.masters),
            parameters: all(|cost| &cost.elements),
            scales: weights.sum(|cost| u128::from(cost.scales[memory.rank])),
            spread: RankSpread::new(&weights, config),
            var_gather_bytes: vars.all().sum(|cost| u128::from(cost.stored[memory.rank]))
                + vars.staying_gathered(),
            staging: memory::staging(&buckets, config),
            offloaded: OffloadCost::new(&weights, &vars, config),
            rule: config.rule,
            state: config.state,
            memory,
            step,
        })
    }

    /// Bytes of masters, states, codes and scales that a replica has of a parameter of the linear layers.
    pub fn state_per_parameter(&self) -> f64 {
        let parameters = self.parameters.max(1);
        let states = config::states_of(self.rule, self.state, parameters);
        (self.masters + states + self.resident) as f64 / parameters as f64
    }

    /// What the rank that holds most has on a device, beside what runs the layers.
    pub fn on_device(&self) -> u128 {
        self.memory.total - self.offloaded.bytes_per_rank + self.var_gather_bytes + self.staging
    }
}
