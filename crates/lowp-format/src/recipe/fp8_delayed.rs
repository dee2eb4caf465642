//! `fp8-delayed`: one f32 scale per tensor, taken from the amaxes of earlier steps
//! (docs/numerics.md 4).

use super::options::{declared, recipe};
use super::{Fp8Format, Recipe, Role};
use crate::{AmaxAlgorithm, KernelKey, Quantizer, Quantizers, ScaleRule, SourceRounding};

recipe! {
    /// Per-tensor FP8 with delayed scaling. The scale is known before the values are, so a cast is
    /// one pass.
    pub struct Fp8Delayed = "fp8-delayed" {
        /// FP8 codes
        pub format: Fp8Format = Fp8Format::Hybrid;
        /// Binary orders of headroom of a delayed scale
        pub margin: i32 = 0 => -64..=64, "-64 to 64 binary orders";
        /// Length of the amax history of delayed scaling
        pub history: usize = 1024 => 1..=65_536, "1 to 65536";
        /// Which entry of the amax history counts
        pub amax_algorithm: AmaxAlgorithm = AmaxAlgorithm::Max;
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Recipe for Fp8Delayed {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let scale = ScaleRule::Delayed {
            window: self.history,
            algorithm: self.amax_algorithm,
            margin: self.margin,
        };
        let kernel = KernelKey::new(self.format.element(role), scale);
        Quantizers::transposed(Quantizer::row_major(kernel))
    }
}
