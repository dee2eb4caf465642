//! A recipe that `lowp-format` does not know: MXFP4 along rows, FP8 with one f32 scale per 64 along columns, made of
//! known kernel ingredients. That it runs through plan, quantize, shard, gather and optimizer shows that nothing
//! outside the recipe folder depends on the list of recipes, or on what both directions have in common.

use lowp_format::{
    Axis, Code, KernelKey, MxScale, PaddedForm, Quantizer, Quantizers, Recipe, Role, ScaleRule,
};

/// Rowwise E2M1 with E8M0 scales over 1x32 blocks, rounded to the nearest power of two; columnwise E5M2 with f32 scales
/// over 64x1 blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Toy;

impl Recipe for Toy {
    fn name(&self) -> &'static str {
        "toy"
    }

    fn quantizers(&self, _: Role) -> Quantizers {
        let rowwise = KernelKey::new(Code::E2M1, ScaleRule::E8M0(MxScale::Even)).blocks([1, 32]);
        let scale = ScaleRule::BlockF32 {
            pow2: false,
            epsilon: 0.0,
        };
        let columnwise = KernelKey::new(Code::E5M2, scale).blocks([64, 1]);
        let padded = PaddedForm {
            outer: 4,
            block: 1,
            repeat: false,
        };
        Quantizers::apart(
            Quantizer::row_major(rowwise).padded(PaddedForm::TILES_128X4),
            // Data are transposed; scales lie with the block axis outside.
            Quantizer::column_major(columnwise)
                .scales([Axis::Rows, Axis::Cols])
                .padded(padded),
        )
    }
}
