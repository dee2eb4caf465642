//! Values of the fields of a [`Config`](crate::Config) that its JSON leaves out.

use lowp_optim::Group;

use crate::optimizer::Optimizer;

/// The decay of the second moment of AdamW.
pub(crate) fn beta2() -> f32 {
    Group::default().betas.1
}

/// The learning rate of AdamW from random weights.
pub(crate) fn var_lr() -> f32 {
    Optimizer::AdamW.defaults().lr
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
pub(crate) fn is_zero(value: &f32) -> bool {
    *value == 0.0
}
