//! States of an update: those of its rule, in dtypes that there is an update for, and in blocks that nothing cuts.

use lowp_format::STATE_BLOCK;

use crate::{Backend, KernelError, MasterDtype, State, StateDtype, UpdateJob};

impl<B: Backend> UpdateJob<B> {
    /// Whether a state is in fp8.
    pub(crate) fn in_fp8(&self) -> bool {
        let fp8 = |state: &State<B>| state.dtype() == StateDtype::Fp8;
        self.states.iter().any(fp8)
    }

    /// Whether the update rounds by random bits.
    pub(crate) fn is_stochastic(&self) -> bool {
        self.in_fp8() || self.master.dtype() == MasterDtype::Bf16
    }

    /// Checks that the states are those of the rule, in dtypes that there is an update for.
    pub(crate) fn check_states(&self) -> Result<(), KernelError> {
        let (needed, found) = (self.rule.states().len(), self.states.len());
        if needed != found {
            let rule = self.rule.name();
            return Err(KernelError::States {
                rule,
                needed,
                found,
            });
        }
        if let [first, second] = &self.states[..] {
            let [first, second] = [first.dtype(), second.dtype()];
            if second != StateDtype::F32 && second != first {
                let [exp_avg, exp_avg_sq] = [first.name(), second.name()];
                return Err(KernelError::MomentDtypes {
                    exp_avg,
                    exp_avg_sq,
                });
            }
        }
        if self.is_stochastic() && self.random.is_none() {
            return Err(KernelError::StateBits);
        }
        Ok(())
    }
}

/// Checks that no rank and no shard tile cuts a block of states.
pub(super) fn check_blocks<B: Backend>(job: &UpdateJob<B>) -> Result<(), KernelError> {
    let random = job.random.as_ref();
    let tiles = random.and_then(|random| random.tiles);
    let tiles = tiles.filter(|tiles| !tiles.are_in_order());
    let multiples = [
        (
            "the first element of a rank",
            random.map(|random| random.first),
        ),
        (
            "the width of a shard tile",
            tiles.map(|tiles| tiles.tile().cols),
        ),
    ];
    for (what, found) in multiples {
        let found = found.unwrap_or(0);
        if !found.is_multiple_of(STATE_BLOCK) {
            let block = STATE_BLOCK;
            return Err(KernelError::StateBlocks { block, what, found });
        }
    }
    Ok(())
}
