//! `fp8-rowwise`: one f32 scale per row, and per column for the columnwise copy (docs/numerics.md 18).

use super::options::{declared, recipe};
use super::{Fp8Format, Recipe, Role};
use crate::{Extent, KernelKey, Quantizer, Quantizers, ScaleRule, SourceRounding};

recipe! {
    /// FP8 with current scaling of each row. Amaxes of columns must be agreed by all ranks before the cast; those of rows
    /// are a shard's own.
    pub struct Fp8Rowwise = "fp8-rowwise" {
        /// FP8 codes
        pub format: Fp8Format = Fp8Format::E4M3;
        /// Round f32 scales down to a power of two
        pub pow2: bool = false;
        /// Lower bound of the amax of an f32 scale
        pub epsilon: f32 = 0.0 => 0.0..=f32::MAX, "0 or a positive finite number";
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Recipe for Fp8Rowwise {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let scale = ScaleRule::Current {
            extent: Extent::Line,
            pow2: self.pow2,
            epsilon: self.epsilon,
        };
        let kernel = KernelKey::new(self.format.element(role), scale);
        Quantizers::independent(Quantizer::row_major(kernel), Quantizer::column_major(kernel))
    }
}
