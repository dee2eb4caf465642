//! Recipes that `lowp-format` does not know, each different by direction, made of known kernel ingredients. That they run
//! through plan, quantize, shard, gather and optimizer shows that nothing outside the recipe folder depends on the list
//! of recipes, or on what both directions have in common.

use lowp_format::{
    Axis, Code, Extent, KernelKey, MxScale, PaddedForm, Quantizer, Quantizers, Recipe, Role,
    ScaleRule,
};

/// A recipe of the tests' own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Toy {
    /// Rowwise E2M1 with E8M0 scales over 1x32 blocks, rounded to the nearest power of two; columnwise E5M2 with f32
    /// scales over 64x1 blocks.
    Blocks,
    /// Rowwise E4M3 with one scale; columnwise E5M2 with a scale of each column.
    Lines,
    /// Rowwise NVFP4, columnwise E5M2 with one scale: what they make of one amax differs.
    OneAmax,
}

impl Toy {
    /// Each of them.
    pub const ALL: [Toy; 3] = [Toy::Blocks, Toy::Lines, Toy::OneAmax];

    fn blocks() -> Quantizers {
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
        Quantizers::independent(
            Quantizer::row_major(rowwise).padded(PaddedForm::TILES_128X4),
            // Data are transposed; scales lie with the block axis outside.
            Quantizer::column_major(columnwise)
                .scales([Axis::Rows, Axis::Cols])
                .padded(padded),
        )
    }
}

/// E4M3 or E5M2 with scales of their amaxes now.
fn current(element: Code, extent: Extent) -> KernelKey {
    let (pow2, epsilon) = (false, 0.0);
    let scale = ScaleRule::Current {
        extent,
        pow2,
        epsilon,
    };
    KernelKey::new(element, scale)
}

impl Recipe for Toy {
    fn name(&self) -> &'static str {
        match self {
            Toy::Blocks => "toy-blocks",
            Toy::Lines => "toy-lines",
            Toy::OneAmax => "toy-one-amax",
        }
    }

    fn quantizers(&self, _: Role) -> Quantizers {
        let columnwise = |extent| Quantizer::column_major(current(Code::E5M2, extent));
        match self {
            Toy::Blocks => Self::blocks(),
            Toy::Lines => {
                let rowwise = Quantizer::row_major(current(Code::E4M3, Extent::Tensor));
                Quantizers::independent(rowwise, columnwise(Extent::Line))
            }
            Toy::OneAmax => {
                let rowwise = KernelKey::new(Code::E2M1, ScaleRule::TWO_LEVEL).blocks([1, 16]);
                let rowwise = Quantizer::row_major(rowwise).padded(PaddedForm::TILES_128X4);
                Quantizers::independent(rowwise, columnwise(Extent::Tensor))
            }
        }
    }
}
