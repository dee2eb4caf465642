//! `mxfp8-2d`: FP8 weights with one E8M0 scale per 32x32 tile; one copy of codes and scales serves
//! both orientations (docs/numerics.md 6.2).

use super::mxfp8::Mxfp8;
use super::options::{declared, recipe};
use super::{Fp8Format, Recipe, Role};
use crate::{KernelKey, MxScale, PaddedForm, Quantizer, Quantizers, ScaleRule, SourceRounding};

recipe! {
    /// MXFP8 with 32x32 blocks for weights; activations and gradients use 1-D blocks.
    pub struct Mxfp8TwoD = "mxfp8-2d" {
        /// FP8 codes
        pub format: Fp8Format = Fp8Format::E4M3;
        /// Rounding of E8M0 block scales
        pub scale_mode: MxScale = MxScale::Te => MxScale::Te | MxScale::OcpFloor, "te or ocp-floor";
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Recipe for Mxfp8TwoD {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let Self { format, scale_mode, source_rounding } = *self;
        match role {
            Role::Weight => {
                let kernel = KernelKey::new(format.element(role), ScaleRule::E8M0(scale_mode));
                let blocks = Quantizer::row_major(kernel.blocks([32, 32]));
                Quantizers::shared(blocks.padded(PaddedForm::TILES_128X4))
            }
            Role::Activation | Role::Gradient => {
                Mxfp8 { format, scale_mode, source_rounding }.quantizers(role)
            }
        }
    }
}
