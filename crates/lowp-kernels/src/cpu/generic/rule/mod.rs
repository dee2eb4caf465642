//! Rules over lanes: the updates of docs/numerics.md 12, a file for each.

pub(super) mod adam;
pub(super) mod lion;
pub(super) mod sgd;

use crate::GroupScalars;
use crate::lanes::Lanes;

/// An update of sixteen elements.
pub(super) trait LaneRule {
    /// The master and both states after the step. States that the rule does not have may have any value, before and after.
    fn update<L: Lanes>(step: &StepLanes<L>, values: [L::F; 3], grad: L::F) -> [L::F; 3];
}

/// The scalars of a step in every lane.
#[derive(Clone, Copy)]
pub(super) struct StepLanes<L: Lanes> {
    pub(super) lanes: L,
    pub(super) grad_scale: L::F,
    minus_lr: L::F,
    beta1: L::F,
    beta2: L::F,
    rest1: L::F,
    rest2: L::F,
    eps: L::F,
    weight_decay: L::F,
    correction1: L::F,
    correction2: L::F,
}

impl<L: Lanes> StepLanes<L> {
    #[inline(always)]
    pub(super) fn new(lanes: L, scalars: &GroupScalars, grad_scale: f32) -> Self {
        Self {
            lanes,
            grad_scale: lanes.splat(grad_scale),
            minus_lr: lanes.splat(-scalars.lr),
            beta1: lanes.splat(scalars.beta1),
            beta2: lanes.splat(scalars.beta2),
            rest1: lanes.splat(1.0 - scalars.beta1),
            rest2: lanes.splat(1.0 - scalars.beta2),
            eps: lanes.splat(scalars.eps),
            weight_decay: lanes.splat(scalars.weight_decay),
            correction1: lanes.splat(scalars.correction1),
            correction2: lanes.splat(scalars.correction2),
        }
    }
}
