//! `fp8-current`: one f32 scale per tensor, taken from its amax now (docs/numerics.md 5).

use super::options::{declared, recipe};
use super::{Fp8Format, Recipe, Role};
use crate::{Extent, KernelKey, Quantizer, Quantizers, ScaleRule, SourceRounding};

recipe! {
    /// Per-tensor FP8 with current scaling. The amax must be agreed by all ranks before the cast.
    pub struct Fp8Current = "fp8-current" {
        /// FP8 codes
        pub format: Fp8Format = Fp8Format::Hybrid;
        /// Round f32 scales down to a power of two
        pub pow2: bool = false;
        /// Lower bound of the amax of an f32 scale
        pub epsilon: f32 = 0.0 => 0.0..=f32::MAX, "0 or a positive finite number";
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Recipe for Fp8Current {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let scale = ScaleRule::Current {
            extent: Extent::Tensor,
            pow2: self.pow2,
            epsilon: self.epsilon,
        };
        let kernel = KernelKey::new(self.format.element(role), scale);
        Quantizers::transposed(Quantizer::row_major(kernel))
    }
}
