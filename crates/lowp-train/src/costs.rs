//! What the linear weights of a configuration cost, before anything is allocated.

use lowp_format::Recipe;
use lowp_fsdp::cost::{CostConfig, CostError, Costs, ModelShapes};

use crate::config::Config;
use crate::network::Model;

impl<M: Model> Config<M> {
    /// What they cost with all of them in `recipe`, whatever runs have; its variables are left out.
    ///
    /// # Errors
    /// A layer that the recipe cannot take, or a mesh that is too large.
    pub fn costs_in<R: Recipe + PartialEq>(&self, recipe: R) -> Result<Costs, Box<CostError>> {
        let linears = self.model.linears();
        let shapes = ModelShapes::of_specs(&linears, &[])?;
        let config = CostConfig {
            mesh: self.mesh,
            sharding: self.sharding,
            reshard: self.reshard_after_forward,
            accumulate: self.accumulate,
            rule: self.optimizer.rule(),
            state: self.optimizer_state,
            offload: self.offload_optimizer,
            reduce_every_micro_batch: self.reduce_every_micro_batch,
            recompute: self.recompute,
            ..CostConfig::default()
        };
        let recipes = vec![recipe; linears.len()];
        Ok(Costs::new(&shapes, &recipes, recipe.name(), &config, None)?)
    }
}
