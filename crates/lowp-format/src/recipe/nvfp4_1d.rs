//! `nvfp4-1d`: E2M1 elements with one E4M3 scale per 16 under an f32 amax, quantized along K and along M
//! separately (docs/numerics.md 7 and 20).

use super::options::{declared, recipe};
use super::{Recipe, Role, Rounding};
use crate::{Code, Extent, FourOverSix, KernelKey, Quantizers, ScaleRule, SourceRounding};

recipe! {
    /// NVFP4 with 1x16 and 16x1 blocks. Neither orientation can be derived from the other.
    pub struct Nvfp4OneD = "nvfp4-1d" {
        /// Four over six of weights and activations, not of flat shards (ZeRO-1): the error that chooses a block's maximum
        pub four_over_six: FourOverSix = FourOverSix::Off;
        /// One amax per row instead of per tensor, of weights and of activations in the forward product
        pub row_scaled: bool = false;
        /// Rounding of gradients to codes
        pub gradient_rounding: Rounding = Rounding::Stochastic;
        /// Random Hadamard transform of the operands of the weight gradient
        pub hadamard: bool = true;
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Recipe for Nvfp4OneD {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let of = |block, extent, four_over_six, hadamard| KernelKey {
            hadamard,
            ..KernelKey::new(Code::E2M1, ScaleRule::TwoLevel { extent, four_over_six })
                .blocks(block)
        };
        let extent = if self.row_scaled { Extent::Line } else { Extent::Tensor };
        let (tensor, off) = (Extent::Tensor, FourOverSix::Off);
        let hadamard = self.hadamard;
        // The transform and a choice of four over six exclude each other.
        let transformed = if hadamard { off } else { self.four_over_six };
        let (rowwise, columnwise) = match role {
            Role::Weight => (
                of([1, 16], extent, self.four_over_six, false),
                of([16, 1], extent, self.four_over_six, false),
            ),
            Role::Activation => (
                of([1, 16], extent, self.four_over_six, false),
                of([16, 1], tensor, transformed, hadamard),
            ),
            Role::Gradient => (
                of([1, 16], tensor, off, false),
                of([16, 1], tensor, off, hadamard),
            ),
        };
        Quantizers::k_major(rowwise, columnwise)
    }

    fn rounding(&self, role: Role) -> Rounding {
        self.gradient_rounding.of_gradients(role)
    }
}
