//! Stochastic gradient descent (docs/numerics.md 12.10).

use super::{LaneRule, StepLanes};
use crate::lanes::Lanes;

/// Without momentum.
pub(in super::super) struct Sgd;

impl LaneRule for Sgd {
    #[inline(always)]
    fn update<L: Lanes>(s: &StepLanes<L>, [p, first, second]: [L::F; 3], g: L::F) -> [L::F; 3] {
        let l = s.lanes;
        let g = l.mul_add(s.weight_decay, p, g);
        [l.mul_add(s.minus_lr, g, p), first, second]
    }
}

/// With momentum; its state is `momentum_buffer`.
pub(in super::super) struct Momentum<const NESTEROV: bool>;

impl<const NESTEROV: bool> LaneRule for Momentum<NESTEROV> {
    #[inline(always)]
    fn update<L: Lanes>(s: &StepLanes<L>, [p, m, none]: [L::F; 3], g: L::F) -> [L::F; 3] {
        let l = s.lanes;
        let g = l.mul_add(s.weight_decay, p, g);
        let m = l.mul_add(s.beta1, m, g);
        let u = if NESTEROV {
            l.mul_add(s.beta1, m, g)
        } else {
            m
        };
        [l.mul_add(s.minus_lr, u, p), m, none]
    }
}
