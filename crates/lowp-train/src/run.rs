//! [`Run`]: one recipe of a configuration.

use lowp_format::spelling::Variant;
use lowp_format::{KernelKey, Recipe, Role, ScaleRule, Usage};
use lowp_fsdp::Sharding;
use lowp_shard::check_flat;

use crate::error::TrainError;

/// One run: its name as the user wrote it, and its recipe.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The name, for results and messages.
    pub name: String,
    /// The recipe of the linear layers.
    pub recipe: Variant,
}

impl Run {
    /// The run of the recipe that `name` spells, `NAME` or `NAME+MODIFIER`.
    ///
    /// # Errors
    /// No such recipe, or weights that cannot train so.
    pub fn parse(name: &str) -> Result<Self, TrainError> {
        Self::new(name.to_owned(), name.parse()?)
    }

    /// The run of `recipe`, called `name`.
    ///
    /// # Errors
    /// Weights that cannot train so.
    pub fn new(name: String, recipe: Variant) -> Result<Self, TrainError> {
        if recipe.weights_lack_precision() {
            return Err(TrainError::WeightsInE5m2 { name });
        }
        if recipe.casts_weights_late() {
            return Err(TrainError::LateCast { name });
        }
        let kernels = recipe.quantizers(Role::Weight).kernels();
        let wide = |key: &&KernelKey| key.element.bits() >= 16 && key.scale != ScaleRule::None;
        match kernels.iter().find(wide) {
            Some(key) => Err(TrainError::ScaledWide {
                name,
                code: key.element,
            }),
            None => Ok(Self { name, recipe }),
        }
    }

    /// Checks that the weights can be sharded so.
    ///
    /// # Errors
    /// Weights that are cut inside of blocks, and compare the errors of whole ones.
    pub fn check_sharding(&self, sharding: Sharding) -> Result<(), TrainError> {
        if sharding == Sharding::Zero1 && check_flat(&self.recipe, Usage::BOTH).is_err() {
            let name = self.name.clone();
            return Err(TrainError::CutBlocks { name });
        }
        Ok(())
    }
}
