//! `fp32`: no quantization. The baseline, and the parameters that stay in high precision.

use super::options::recipe;
use super::{Recipe, RecipeOptions, Role};
use crate::{Code, KernelKey, Quantizer, Quantizers, ScaleRule};

recipe! {
    /// IEEE-754 binary32 values; one copy serves both orientations.
    pub struct PlainF32 = "fp32" {}
}

impl Recipe for PlainF32 {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn quantizers(&self, _: Role) -> Quantizers {
        let kernel = KernelKey::new(Code::F32, ScaleRule::None);
        Quantizers::shared(Quantizer::row_major(kernel))
    }

    fn options(&self) -> RecipeOptions {
        self.set_options()
    }
}
