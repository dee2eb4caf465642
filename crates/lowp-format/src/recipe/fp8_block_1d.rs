//! `fp8-block-1d`: FP8 with one f32 scale per 1x128, quantized along K and along M separately
//! (docs/numerics.md 8).

use super::options::{declared, recipe};
use super::{Fp8Format, Recipe, Role};
use crate::{Axis, KernelKey, PaddedForm, Quantizer, Quantizers, ScaleRule, SourceRounding};

recipe! {
    /// FP8 with 1x128 and 128x1 blocks. Neither orientation can be derived from the other.
    pub struct Fp8BlockOneD = "fp8-block-1d" {
        /// FP8 codes
        pub format: Fp8Format = Fp8Format::E4M3;
        /// Round f32 scales down to a power of two
        pub pow2: bool = true;
        /// Lower bound of the amax of an f32 scale
        pub epsilon: f32 = 0.0 => 0.0..=f32::MAX, "0 or a positive finite number";
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Fp8BlockOneD {
    /// Scales lie with the axis that blocks run along outside; the other one is padded to four.
    const PADDED: PaddedForm = PaddedForm { outer: 4, block: 1, repeat: false };
}

impl Recipe for Fp8BlockOneD {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let scale = ScaleRule::BlockF32 { pow2: self.pow2, epsilon: self.epsilon };
        let kernel = KernelKey::new(self.format.element(role), scale);
        let rowwise = Quantizer::row_major(kernel.blocks([1, 128]));
        let columnwise = Quantizer::column_major(kernel.blocks([128, 1]));
        Quantizers::independent(
            rowwise.scales([Axis::Cols, Axis::Rows]).padded(Self::PADDED),
            columnwise.scales([Axis::Rows, Axis::Cols]).padded(Self::PADDED),
        )
    }
}
