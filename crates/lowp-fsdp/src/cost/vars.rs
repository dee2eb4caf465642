//! [`Vars`]: what the parameters that stay in f32 cost.

use super::config::{CostConfig, CostError};
use super::shapes::VarShape;
use super::weight::{Gather, Use};
use super::weights::{NewWeight, Weights};
use crate::cuts::cut_by_rows;
use crate::plain_vars::VarRecipe;
use crate::{Sharding, VarPlace, VarUse};
use lowp_format::ReshardAfterForward;

/// Rows of f32, whatever the weights are.
pub(super) struct Vars {
    config: CostConfig,
    /// In the order of the model.
    all: Weights<VarRecipe>,
    /// Those that are gathered once per step, together.
    staying: Weights<VarRecipe>,
    /// Those that are gathered for each use, one by one.
    transient: Weights<VarRecipe>,
    /// How often a step gathers each of them.
    times: Vec<u128>,
    /// Bytes of the full values of `staying`.
    pub(super) full: u128,
}

impl Vars {
    pub(super) fn new(vars: &[VarShape], config: &CostConfig) -> Result<Self, CostError> {
        let config = CostConfig {
            sharding: Sharding::Fsdp,
            reshard: ReshardAfterForward::Yes,
            recompute: false,
            // An embedding has given its memory back before the gather of a head begins.
            prefetch: false,
            ..*config
        };
        let of = |which: &dyn Fn(VarUse) -> bool, together: bool| {
            let vars = vars.iter().filter(|var| which(var.used)).enumerate();
            let vars = vars.map(|(number, var)| {
                let block = if together { 0 } else { number };
                NewWeight {
                    recipe: VarRecipe::default(),
                    block,
                    shape: var.shape,
                }
            });
            let unit = config.state.unit(config.var_rule());
            let made = Weights::new(vars, &config, unit, cut_by_rows);
            made.map_err(|(_, error)| CostError::Vars(error))
        };
        let stays = |used: VarUse| !used.is_transient();
        let elements = vars.iter().filter(|var| stays(var.used));
        let elements = elements.map(|var| var.shape.elements() as u128);
        let passes = config.accumulate as u128;
        // A head on a GPU is rounded to bf16 once for each step.
        let of_head = match config.vars {
            VarPlace::Host => passes,
            VarPlace::Backend => 1,
        };
        let times = vars.iter().filter_map(|var| match var.used {
            VarUse::Throughout => None,
            VarUse::First => Some(passes),
            VarUse::Last => Some(of_head),
            VarUse::FirstAndLast => Some(passes + of_head),
        });
        Ok(Self {
            config,
            full: size_of::<f32>() as u128 * elements.sum::<u128>(),
            all: of(&|_| true, false)?,
            staying: of(&stays, true)?,
            transient: of(&|used| used.is_transient(), false)?,
            times: times.collect(),
        })
    }

    /// What ranks have of them, in the order of the model.
    pub(super) fn all(&self) -> &Weights<VarRecipe> {
        &self.all
    }

    /// Memory in which those that stay are gathered.
    pub(super) fn staying_gathered(&self) -> u128 {
        self.staying.gathered(&self.config)
    }

    /// Memory in which transient variables are gathered, those of equal shape one after the other.
    pub(super) fn transient_gathered(&self) -> u128 {
        self.transient.gathered(&self.config)
    }

    /// The gathers of those that stay, and how often each happens in a step.
    pub(super) fn staying_gathers(&self) -> impl Iterator<Item = (&Gather, u128)> {
        forward(&self.staying, &[1])
    }

    /// The gathers of transient variables, and how often each happens in a step.
    pub(super) fn transient_gathers(&self) -> impl Iterator<Item = (&Gather, u128)> {
        forward(&self.transient, &self.times)
    }
}

/// The gathers of the blocks of `vars` for forward, with the number of `times` that each happens.
fn forward<'a>(
    vars: &'a Weights<VarRecipe>,
    times: &'a [u128],
) -> impl Iterator<Item = (&'a Gather, u128)> {
    let blocks = vars.blocks.iter().zip(times);
    blocks.flat_map(|(&block, &times)| {
        let gathers = vars.costs[block].gathers.iter();
        let forward = gathers.filter(|gather| gather.of == Use::Forward);
        forward.map(move |gather| (gather, times))
    })
}
