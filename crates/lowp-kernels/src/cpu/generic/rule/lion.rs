//! Lion (docs/numerics.md 12.9).

use super::{LaneRule, StepLanes};
use crate::lanes::Lanes;

/// Its state is `exp_avg`.
pub(in super::super) struct Lion;

impl LaneRule for Lion {
    #[inline(always)]
    fn update<L: Lanes>(s: &StepLanes<L>, [p, m, none]: [L::F; 3], g: L::F) -> [L::F; 3] {
        let l = s.lanes;
        let u = sign(l, l.mul_add(s.beta1, m, l.mul(s.rest1, g)));
        let m = l.mul_add(s.beta2, m, l.mul(s.rest2, g));
        let u = l.mul_add(s.weight_decay, p, u);
        [l.mul_add(s.minus_lr, u, p), m, none]
    }
}

/// 1 with the sign of `x`, or `x` where it is zero or NaN.
#[inline(always)]
fn sign<L: Lanes>(l: L, x: L::F) -> L::F {
    let bits = l.bits(x);
    let magnitude = l.and(bits, l.usplat(0x7FFF_FFFF));
    let one = l.or(l.and(bits, l.usplat(0x8000_0000)), l.usplat(0x3F80_0000));
    let one = l.if_above(magnitude, l.usplat(0), one, bits);
    l.value(l.if_above(magnitude, l.usplat(0x7F80_0000), bits, one))
}
