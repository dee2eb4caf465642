//! [`ShardedModel::audit`]: weights as they are gathered, compared with their masters.

use std::collections::{BTreeMap, BTreeSet};

use lowp_comm::or_abort;
use lowp_format::{Phase, Recipe, magnitude};
use lowp_kernels::Backend;
use lowp_shard::{Divergence, ScaleSlot};

use super::ShardedModel;
use crate::error::ModelError;

/// A difference that [`ShardedModel::audit`] finds.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelDivergence {
    /// The number of the linear layer; the numbers of variables follow those of all layers.
    pub layer: usize,
    /// What the weight was gathered for.
    pub phase: Phase,
    /// The first byte that differs from a full cast of the masters.
    pub divergence: Divergence,
}

impl<B: Backend, R: Recipe> ShardedModel<B, R> {
    /// Compares every linear weight, as each phase gathers it, and every variable that is gathered for each use with a full cast of its
    /// masters. Returns the differences, those of layers first; none where all are equal. Collective.
    ///
    /// # Errors
    /// A rank failed.
    pub fn audit(&self) -> Result<Vec<ModelDivergence>, ModelError> {
        or_abort(&*self.mesh.world, self.try_audit())
    }

    fn try_audit(&self) -> Result<Vec<ModelDivergence>, ModelError> {
        let mut found = Vec::new();
        let amaxes = self.shared_amaxes()?;
        let mut first = 0;
        while first < self.weights.len() {
            // A block stays gathered for a phase, whose masters are gathered one after the other.
            let mut block = first..first + 1;
            while let Some((_, next)) = self.weights.get(block.end)
                && self.weights[first].1.is_with(next)?
            {
                block.end += 1;
            }
            first = block.end;
            for phase in Phase::ALL {
                for layer in block.clone() {
                    let (id, weight) = &self.weights[layer];
                    let full = self.gather_values(weight, &self.optimizer.cast_values(*id)?)?;
                    let mut slots = self.optimizer.slots(*id)?.into_iter().flatten();
                    let amax = slots.find_map(|slot| amaxes.get(&slot).copied());
                    let full = self.backend.upload(&full)?;
                    let divergence = weight.audit_phase(phase, &full, amax)?;
                    found.extend(divergence.map(|divergence| ModelDivergence {
                        layer,
                        phase,
                        divergence,
                    }));
                }
            }
            self.weights[block.start].1.release()?;
        }
        found.sort_by_key(|found| (found.layer, found.phase as usize));
        for (index, id) in self.var_ids.iter().enumerate() {
            let Some(var) = self.vars.transient(index) else {
                continue;
            };
            let full = self.gather_f32(var.element_ranges(), &self.optimizer.master(*id)?)?;
            let full = self.backend.upload(&full)?;
            let divergence = var.audit_phase(Phase::Forward, &full, None)?;
            found.extend(divergence.map(|divergence| ModelDivergence {
                layer: self.weights.len() + index,
                phase: Phase::Forward,
                divergence,
            }));
            var.release()?;
        }
        Ok(found)
    }

    /// The amaxes of masters by the entries of the scale book that several weights have in common.
    fn shared_amaxes(&self) -> Result<BTreeMap<ScaleSlot, f32>, ModelError> {
        let mut weights: BTreeMap<ScaleSlot, BTreeSet<usize>> = BTreeMap::new();
        for (layer, (id, _)) in self.weights.iter().enumerate() {
            for slot in self.optimizer.slots(*id)?.into_iter().flatten() {
                weights.entry(slot).or_default().insert(layer);
            }
        }
        weights.retain(|_, layers| layers.len() > 1);
        let mut amaxes = BTreeMap::new();
        for (slot, layers) in weights {
            let mut amax = 0;
            for (id, weight) in layers.into_iter().map(|layer| &self.weights[layer]) {
                let full = self.gather_values(weight, &self.optimizer.master(*id)?)?;
                let rounding = weight.source_rounding();
                let magnitudes = full
                    .into_iter()
                    .map(|value| magnitude(rounding.apply(value)));
                amax = magnitudes.fold(amax, u32::max);
            }
            amaxes.insert(slot, f32::from_bits(amax));
        }
        Ok(amaxes)
    }
}
