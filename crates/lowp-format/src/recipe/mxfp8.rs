//! `mxfp8`: FP8 elements with one E8M0 scale per 32, quantized along K and along M separately
//! (docs/numerics.md 6).

use super::options::{declared, recipe};
use super::{Fp8Format, Recipe, Role};
use crate::{KernelKey, MxScale, PaddedForm, Quantizer, Quantizers, ScaleRule, SourceRounding};

recipe! {
    /// MXFP8 with 1x32 and 32x1 blocks. Neither orientation can be derived from the other.
    pub struct Mxfp8 = "mxfp8" {
        /// FP8 codes
        pub format: Fp8Format = Fp8Format::E4M3;
        /// Rounding of E8M0 block scales
        pub scale_mode: MxScale = MxScale::Te => MxScale::Te | MxScale::OcpFloor, "te or ocp-floor";
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Recipe for Mxfp8 {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let kernel = KernelKey::new(self.format.element(role), ScaleRule::E8M0(self.scale_mode));
        let blocks = |block| {
            Quantizer::row_major(kernel.blocks(block)).padded(PaddedForm::TILES_128X4)
        };
        Quantizers::independent(blocks([1, 32]), blocks([32, 1]))
    }
}
