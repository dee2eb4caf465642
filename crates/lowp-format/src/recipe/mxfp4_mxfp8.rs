//! `mxfp4-mxfp8`: MXFP4 for the forward product, MXFP8 for the backward ones (docs/numerics.md 21).

use super::mxfp4::Mxfp4;
use super::mxfp8::Mxfp8;
use super::options::{declared, recipe};
use super::{Fp8Format, Recipe, Role};
use crate::{MxScale, Quantizers, SourceRounding};

recipe! {
    /// Rowwise buffers of `mxfp4`, columnwise ones of `mxfp8`, both from the source. Products read operands of one format:
    /// gradients are MXFP8 in both orientations.
    pub struct Mxfp4Mxfp8 = "mxfp4-mxfp8" {
        /// FP8 codes
        pub format: Fp8Format = Fp8Format::E4M3;
        /// Rounding of E8M0 block scales
        pub scale_mode: MxScale = MxScale::Te => MxScale::Te | MxScale::OcpFloor, "te or ocp-floor";
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Recipe for Mxfp4Mxfp8 {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let Self { format, scale_mode, source_rounding } = *self;
        let mxfp4 = Mxfp4 { scale_mode, source_rounding, ..Mxfp4::default() }.quantizers(role);
        let mxfp8 = Mxfp8 { format, scale_mode, source_rounding }.quantizers(role);
        match role {
            Role::Weight | Role::Activation => Quantizers::independent(mxfp4.rowwise, mxfp8.columnwise),
            Role::Gradient => mxfp8,
        }
    }
}
