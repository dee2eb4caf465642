//! `fp8-block`: FP8 weights with one f32 scale per 128x128 block, and operands with one per 1x128
//! (docs/numerics.md 8).

use super::fp8_block_1d::Fp8BlockOneD;
use super::options::{declared, recipe};
use super::{Fp8Format, Recipe, Role};
use crate::{Code, KernelKey, PaddedForm, Quantizer, Quantizers, ScaleRule, SourceRounding};

recipe! {
    /// FP8 with 128x128 blocks for weights, whose columnwise copy is a transpose; activations and gradients use 1-D
    /// blocks.
    pub struct Fp8Block = "fp8-block" {
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

impl Fp8Block {
    /// Rows of scales are padded to four.
    const PADDED: PaddedForm = PaddedForm { outer: 1, block: 4, repeat: false };

    fn weights(&self, element: Code) -> Quantizers {
        let scale = ScaleRule::BlockF32 { pow2: self.pow2, epsilon: self.epsilon };
        let kernel = KernelKey::new(element, scale).blocks([128, 128]);
        Quantizers::transposed(Quantizer::row_major(kernel).padded(Self::PADDED))
    }
}

impl Recipe for Fp8Block {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let Self { format, pow2, epsilon, source_rounding } = *self;
        match role {
            Role::Weight => self.weights(format.element(role)),
            Role::Activation | Role::Gradient => {
                Fp8BlockOneD { format, pow2, epsilon, source_rounding }.quantizers(role)
            }
        }
    }
}
