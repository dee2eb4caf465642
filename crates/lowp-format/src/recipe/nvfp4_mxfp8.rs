//! `nvfp4-mxfp8`: NVFP4 with 1-D blocks for the forward product, MXFP8 for the backward ones
//! (docs/numerics.md 21).

use super::mxfp8::Mxfp8;
use super::nvfp4_1d::Nvfp4OneD;
use super::options::{declared, recipe};
use super::{Fp8Format, Recipe, Role};
use crate::{FourOverSix, MxScale, Quantizers, SourceRounding};

recipe! {
    /// Rowwise buffers of `nvfp4-1d`, columnwise ones of `mxfp8`, both from the source. Products read operands of one
    /// format: gradients are MXFP8 in both orientations.
    pub struct Nvfp4Mxfp8 = "nvfp4-mxfp8" {
        /// FP8 codes
        pub format: Fp8Format = Fp8Format::E4M3;
        /// Rounding of E8M0 block scales
        pub scale_mode: MxScale = MxScale::Te => MxScale::Te | MxScale::OcpFloor, "te or ocp-floor";
        /// Four over six of weights and activations, not of flat shards (ZeRO-1): the error that chooses a block's maximum
        pub four_over_six: FourOverSix = FourOverSix::Off;
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Recipe for Nvfp4Mxfp8 {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let Self { format, scale_mode, four_over_six, source_rounding } = *self;
        let nvfp4 = Nvfp4OneD { four_over_six, ..Nvfp4OneD::default() }.quantizers(role);
        let mxfp8 = Mxfp8 { format, scale_mode, source_rounding }.quantizers(role);
        match role {
            Role::Weight | Role::Activation => Quantizers::independent(nvfp4.rowwise, mxfp8.columnwise),
            Role::Gradient => mxfp8,
        }
    }
}
