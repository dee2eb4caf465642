//! `nvfp4-2d`: NVFP4 weights with one E4M3 scale per 16x16 tile, so that the columnwise operand is a
//! transpose of the rowwise one (docs/numerics.md 7, 9 and 20.1).

use super::nvfp4_1d::Nvfp4OneD;
use super::options::{declared, recipe};
use super::{Recipe, Role, Rounding};
use crate::{
    Code, Extent, FourOverSix, KernelKey, PaddedForm, Quantizer, Quantizers, ScaleRule,
    SourceRounding,
};

recipe! {
    /// NVFP4 with 16x16 blocks for weights; activations and gradients use 1-D blocks.
    pub struct Nvfp4TwoD = "nvfp4-2d" {
        /// Four over six of weights and activations, not of flat shards (ZeRO-1): the error that chooses a block's maximum
        pub four_over_six: FourOverSix = FourOverSix::Off;
        /// Rounding of gradients to codes
        pub gradient_rounding: Rounding = Rounding::Stochastic;
        /// Random Hadamard transform of the operands of the weight gradient
        pub hadamard: bool = true;
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Nvfp4TwoD {
    /// What quantizes activations and gradients.
    fn operands(&self) -> Nvfp4OneD {
        let Self { four_over_six, gradient_rounding, hadamard, source_rounding } = *self;
        let row_scaled = false;
        Nvfp4OneD { four_over_six, row_scaled, gradient_rounding, hadamard, source_rounding }
    }
}

impl Recipe for Nvfp4TwoD {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let Self { four_over_six, .. } = *self;
        match role {
            Role::Weight => {
                let scale = ScaleRule::TwoLevel { extent: Extent::Tensor, four_over_six };
                let kernel = KernelKey::new(Code::E2M1, scale).blocks([16, 16]);
                let padded = PaddedForm::TILES_128X4;
                Quantizers::transposed(Quantizer::row_major(kernel).padded(padded))
            }
            Role::Activation | Role::Gradient => self.operands().quantizers(role),
        }
    }

    fn rounding(&self, role: Role) -> Rounding {
        self.operands().rounding(role)
    }
}
