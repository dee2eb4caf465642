//! AdamW, and Adam with L2 (docs/numerics.md 12.2).

use super::{LaneRule, StepLanes};
use crate::lanes::Lanes;

/// Its states are `exp_avg` and `exp_avg_sq`.
pub(in super::super) struct Adam<const L2: bool>;

impl<const L2: bool> LaneRule for Adam<L2> {
    #[inline(always)]
    fn update<L: Lanes>(s: &StepLanes<L>, [p, m, v]: [L::F; 3], mut g: L::F) -> [L::F; 3] {
        let l = s.lanes;
        if L2 {
            g = l.mul_add(s.weight_decay, p, g);
        }
        let m = l.mul_add(s.beta1, m, l.mul(s.rest1, g));
        let square = l.mul(l.mul(s.rest2, g), g);
        let v = l.mul_add(s.beta2, v, square);
        let d = l.add(l.sqrt(l.div(v, s.correction2)), s.eps);
        let mut u = l.div(l.div(m, s.correction1), d);
        if !L2 {
            u = l.mul_add(s.weight_decay, p, u);
        }
        [l.mul_add(s.minus_lr, u, p), m, v]
    }
}
