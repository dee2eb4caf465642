//! `mxfp4`: E2M1 elements with one E8M0 scale per 32, quantized along K and along M separately
//! (docs/numerics.md 19).

use super::options::{declared, recipe};
use super::{Recipe, Role, Rounding};
use crate::{Code, KernelKey, MxScale, Quantizers, ScaleRule, SourceRounding};

recipe! {
    /// MXFP4 with 1x32 and 32x1 blocks. Neither orientation can be derived from the other.
    pub struct Mxfp4 = "mxfp4" {
        /// Rounding of E8M0 block scales
        pub scale_mode: MxScale = MxScale::Te;
        /// Rounding of gradients to codes
        pub gradient_rounding: Rounding = Rounding::Nearest;
        /// Random Hadamard transform of the operands of the weight gradient
        pub hadamard: bool = false;
        /// Rounding of the source before amax and cast
        pub source_rounding: SourceRounding = SourceRounding::F32;
    }
}

impl Recipe for Mxfp4 {
    declared!(source_rounding);

    fn quantizers(&self, role: Role) -> Quantizers {
        let kernel = KernelKey::new(Code::E2M1, ScaleRule::E8M0(self.scale_mode));
        let hadamard = self.hadamard && role != Role::Weight;
        let transformed = KernelKey { hadamard, ..kernel };
        Quantizers::k_major(kernel.blocks([1, 32]), transformed.blocks([32, 1]))
    }

    fn rounding(&self, role: Role) -> Rounding {
        self.gradient_rounding.of_gradients(role)
    }
}
