//! `fp32`: no quantization. The baseline, and the parameters that stay in high precision.

use super::options::{declared, recipe};
use super::{Recipe, Role};
use crate::{Code, KernelKey, Quantizer, Quantizers, ScaleRule};

recipe! {
    /// IEEE-754 binary32 values; one copy serves both orientations.
    pub struct PlainF32 = "fp32" {}
}

impl Recipe for PlainF32 {
    declared!();

    fn quantizers(&self, _: Role) -> Quantizers {
        let kernel = KernelKey::new(Code::F32, ScaleRule::None);
        Quantizers::shared(Quantizer::row_major(kernel))
    }
}
