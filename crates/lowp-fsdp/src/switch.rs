//! [`ShardedModel::in_recipes`]: training goes on with weights in other recipes.

use lowp_comm::or_abort;
use lowp_format::Recipe;
use lowp_gemm::Multiplies;
use lowp_optim::ParamState;

use crate::builder::{Builder, NewParam};
use crate::error::ModelError;
use crate::sharded_model::ShardedModel;
use crate::spec::{LinearSpec, VarSpec};

impl<B: Multiplies, R: Recipe> ShardedModel<B, R> {
    /// The model with each weight in the recipe that `recipe` says; `linears` and `vars` are those that it was made of.
    ///
    /// Masters, states and counts of steps stay to the bit, cut as the new recipes cut them; weights are cast from the masters, as
    /// those of a new model are. Delayed scales of operands that both recipes have keep their history. Layers and variables are new
    /// ones. Collective.
    ///
    /// # Errors
    /// A micro-batch that was not finished, or what [`ShardedModel::new`] reports.
    pub fn in_recipes<Q: Recipe>(
        self,
        recipe: impl Fn(&LinearSpec) -> Q,
        linears: &[LinearSpec],
        vars: &[VarSpec],
    ) -> Result<ShardedModel<B, Q>, ModelError> {
        let world = self.mesh.world.clone();
        or_abort(&*world, self.check_between_steps())?;
        or_abort(&*world, self.switch(recipe, linears, vars))
    }

    fn switch<Q: Recipe>(
        self,
        recipe: impl Fn(&LinearSpec) -> Q,
        linears: &[LinearSpec],
        vars: &[VarSpec],
    ) -> Result<ShardedModel<B, Q>, ModelError> {
        let (backend, mesh, options) = (self.backend.clone(), self.mesh.clone(), self.options);
        let builder = Builder {
            backend: &backend,
            mesh: &mesh,
            options,
        };
        let mut states = Vec::with_capacity(linears.len() + vars.len());
        let cuts = builder.cuts(&recipe, linears)?;
        for (((id, weight), spec), cuts) in self.weights.iter().zip(linears).zip(&cuts) {
            let own = self.optimizer.state(*id)?;
            let ranges = builder.element_ranges(&recipe(spec), cuts)?;
            // Cut as they are, on every rank.
            let [old, new] = [weight.tiles(), &cuts.tiles];
            let alike = old == new || (old.are_in_order() && new.are_in_order());
            if alike && ranges == weight.element_ranges() {
                states.push(own);
                continue;
            }
            let elements = ranges[mesh.shard.rank()].clone();
            let cut = |values: &[f32]| -> Result<Vec<f32>, ModelError> {
                let full = self.gather_values(weight, values)?;
                Ok(cuts.tiles.gather(&full, elements.clone()))
            };
            states.push(ParamState {
                master: cut(&own.master)?,
                states: own
                    .states
                    .iter()
                    .map(|s| cut(s))
                    .collect::<Result<_, _>>()?,
            });
        }
        for id in &self.var_ids {
            states.push(self.optimizer.state(*id)?);
        }
        let counts = self.optimizer.counts()?;
        let delayed = self
            .operands
            .iter()
            .map(|operands| operands.delayed_states());
        let delayed = delayed.collect::<Result<Vec<_>, _>>()?;
        // Both at once would take twice the memory.
        drop(self);
        let values = |param: &NewParam<'_>, _| Ok(states[param.number].master.clone());
        let mut model = builder.build(recipe, linears, vars, &values)?;
        let ids = model.weights.iter().map(|(id, _)| id).chain(&model.var_ids);
        for (id, state) in ids.zip(&states) {
            model.optimizer.set_states(*id, &state.states)?;
        }
        model.optimizer.set_counts(counts)?;
        for (operands, states) in model.operands.iter().zip(delayed) {
            operands.keep_delayed(&states)?;
        }
        Ok(model)
    }
}
