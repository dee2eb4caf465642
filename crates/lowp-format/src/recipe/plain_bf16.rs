//! `bf16`: no scales. The usual precision of weights on the wire.

use super::options::{declared, recipe};
use super::{Recipe, Role};
use crate::{Code, KernelKey, Quantizer, Quantizers, ScaleRule};

recipe! {
    /// bfloat16 values, rounded to nearest with ties to even; one copy serves both orientations.
    pub struct PlainBf16 = "bf16" {}
}

impl Recipe for PlainBf16 {
    declared!();

    fn quantizers(&self, _: Role) -> Quantizers {
        let kernel = KernelKey::new(Code::Bf16, ScaleRule::None);
        Quantizers::shared(Quantizer::row_major(kernel))
    }
}
