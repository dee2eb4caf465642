//! Which product multiplies which operands: the table of a layer's three products.

use lowp_format::{
    Axis, Code, Extent, Form, KernelKey, Orientation, Quantizer, Recipe, Role, ScaleRule, Shape,
};

use crate::GemmError;

/// How two operands are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmKind {
    /// FP8 codes, one scale per tensor.
    Fp8Tensor,
    /// FP8 codes, one scale per row of each operand.
    Fp8Rows,
    /// FP8 codes, f32 scales per 128 along the contracted axis: of each row, or of 128 rows of one operand.
    Fp8Groups128,
    /// FP8 codes, an E8M0 scale per 32 along the contracted axis. Written for Blackwell and not run on one yet.
    Fp8Groups32,
    /// E2M1 codes, an E4M3 scale per 16 along the contracted axis and an amax per tensor. Written for Blackwell and not run on one yet.
    Fp4Groups16,
    /// bf16 values: those of operands that hold codes are decoded first.
    Bf16,
}

/// The codes that a product reads of an operand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Codes {
    /// What they are made of.
    pub kernel: KernelKey,
    /// Whether the contracted axis is the inner one of their memory, as products of codes take them.
    pub k_inner: bool,
}

impl Codes {
    /// What products read in `orientation` of an operand in `role` beside a weight that lives in `recipe`; none where they read the values
    /// themselves.
    pub fn of(recipe: &impl Recipe, role: Role, orientation: Orientation) -> Option<Self> {
        let operand = recipe.operand(role);
        let Quantizer { kernel, data, .. } = *operand.quantizers.of(orientation);
        let inner = match orientation {
            Orientation::Rowwise => Axis::Cols,
            Orientation::Columnwise => Axis::Rows,
        };
        let read = operand.quantized.contains(orientation.usage()) && is_codes(&kernel);
        read.then_some(Self {
            kernel,
            k_inner: data[1] == inner,
        })
    }
}

/// The three products of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// `y = x W^T`.
    Forward,
    /// `dx = dy W`.
    InputGrad,
    /// `dW = dy^T x`.
    WeightGrad,
}

impl Pass {
    /// Every product.
    pub const ALL: [Self; 3] = [Self::Forward, Self::InputGrad, Self::WeightGrad];

    /// The roles of the right and of the left operand, with the orientation in which the product reads them.
    pub const fn operands(self) -> [(Role, Orientation); 2] {
        use Orientation::{Columnwise, Rowwise};
        match self {
            Self::Forward => [(Role::Weight, Rowwise), (Role::Activation, Rowwise)],
            Self::InputGrad => [(Role::Weight, Columnwise), (Role::Gradient, Rowwise)],
            Self::WeightGrad => [(Role::Activation, Columnwise), (Role::Gradient, Columnwise)],
        }
    }

    /// Rows and columns of the result, and the length of the contracted axis, over `tokens` tokens of a layer whose weight has `weight`
    /// as its shape.
    pub const fn sizes(self, weight: Shape, tokens: usize) -> [usize; 3] {
        let Shape { rows, cols } = weight;
        match self {
            Self::Forward => [tokens, rows, cols],
            Self::InputGrad => [tokens, cols, rows],
            Self::WeightGrad => [rows, cols, tokens],
        }
    }

    /// The formula.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "y = x W^T",
            Self::InputGrad => "dx = dy W",
            Self::WeightGrad => "dW = dy^T x",
        }
    }
}

impl GemmKind {
    /// What runs for operands `a` and `b` on a device of this compute capability.
    pub fn of(a: Option<Codes>, b: Option<Codes>, (major, minor): (i32, i32)) -> Self {
        let (Some(a), Some(b)) = (a, b) else {
            return Self::Bf16;
        };
        let fp8 = major >= 9 || (major, minor) == (8, 9);
        let hopper = (major, minor) == (9, 0);
        let blackwell = major >= 10;
        // Products of codes contract along the inner axis of memory. Blackwells for data centres read FP8 blocks in either order.
        let k_inner = a.k_inner && b.k_inner;
        let any_order = major == 10;
        let [a, b] = [a.kernel, b.kernel];
        let scales = (scales(&a), scales(&b));
        match (a.element, b.element) {
            // cuBLASLt takes E5M2 for one operand only.
            (Code::E4M3, Code::E4M3 | Code::E5M2) | (Code::E5M2, Code::E4M3) => match scales {
                (Scales::Tensor, Scales::Tensor) if fp8 && k_inner => Self::Fp8Tensor,
                (Scales::Line, Scales::Line) if hopper && k_inner => Self::Fp8Rows,
                (Scales::Blocks { square: false }, Scales::Blocks { .. })
                | (Scales::Blocks { .. }, Scales::Blocks { square: false })
                    if hopper && k_inner =>
                {
                    Self::Fp8Groups128
                }
                (Scales::E8M0, Scales::E8M0) if blackwell && (k_inner || any_order) => {
                    Self::Fp8Groups32
                }
                _ => Self::Bf16,
            },
            (Code::E2M1, Code::E2M1) => match scales {
                (Scales::TwoLevel, Scales::TwoLevel) if blackwell && k_inner => Self::Fp4Groups16,
                _ => Self::Bf16,
            },
            _ => Self::Bf16,
        }
    }

    /// This product, or that of values where it takes no contraction over `depth` entries: groups are whole, and rows of FP4 aligned.
    #[must_use]
    pub const fn over(self, depth: usize) -> Self {
        match self {
            Self::Fp8Groups32 | Self::Fp4Groups16 if !depth.is_multiple_of(32) => Self::Bf16,
            other => other,
        }
    }

    /// What runs in `pass` of a layer whose weight lives in `recipe`.
    pub fn of_recipe(recipe: &impl Recipe, pass: Pass, capability: (i32, i32)) -> Self {
        let codes = pass
            .operands()
            .map(|(role, orientation)| Codes::of(recipe, role, orientation));
        Self::of(codes[0], codes[1], capability)
    }

    /// How the scales of blocks lie that it reads; none where there are no blocks.
    pub const fn scale_form(self) -> Option<Form> {
        match self {
            Self::Fp8Groups128 => Some(Form::Padded),
            Self::Fp8Groups32 | Self::Fp4Groups16 => Some(Form::Swizzled),
            Self::Fp8Tensor | Self::Fp8Rows | Self::Bf16 => None,
        }
    }

    /// In words.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Fp8Tensor => "FP8 codes, a scale per tensor",
            Self::Fp8Rows => "FP8 codes, a scale per row",
            Self::Fp8Groups128 => "FP8 codes, scales per 128",
            Self::Fp8Groups32 => "FP8 codes, scales per 32",
            Self::Fp4Groups16 => "E2M1 codes, scales per 16",
            Self::Bf16 => "bf16",
        }
    }
}

/// Checks that layers on a GPU run a weight that lives in `recipe`.
///
/// # Errors
/// Says what they do not run.
pub fn check(recipe: &impl Recipe) -> Result<(), GemmError> {
    for role in [Role::Activation, Role::Gradient] {
        for orientation in Orientation::ALL {
            let kernel = recipe.operand(role).quantizers.of(orientation).kernel;
            if kernel.hadamard && Codes::of(recipe, role, orientation).is_none() {
                return Err(GemmError::Unsupported(
                    "a recipe whose other operand passes a Hadamard transform while this one stays exact runs on the CPU only",
                ));
            }
        }
    }
    let (read, stored) = (
        recipe.operand(Role::Weight),
        recipe.quantizers(Role::Weight),
    );
    if read.quantizers.kernels() != stored.kernels() && !read.quantized.is_empty() {
        return Err(GemmError::Unsupported(
            "a recipe whose weights live in another code than products read runs on the CPU only",
        ));
    }
    Ok(())
}

/// Whether products can read it as codes: not plain f32 or bf16.
pub fn is_codes(kernel: &KernelKey) -> bool {
    kernel.scale != ScaleRule::None
}

enum Scales {
    Tensor,
    Line,
    Blocks { square: bool },
    E8M0,
    TwoLevel,
    Other,
}

fn scales(kernel: &KernelKey) -> Scales {
    match (kernel.scale, kernel.block) {
        (ScaleRule::Delayed { .. }, None) => Scales::Tensor,
        (
            ScaleRule::Current {
                extent: Extent::Tensor,
                ..
            },
            None,
        ) => Scales::Tensor,
        (
            ScaleRule::Current {
                extent: Extent::Line,
                ..
            },
            None,
        ) => Scales::Line,
        (ScaleRule::E8M0(_), Some([1, 32] | [32, 1] | [32, 32])) => Scales::E8M0,
        (
            ScaleRule::TwoLevel {
                extent: Extent::Tensor,
                ..
            },
            Some([1, 16] | [16, 1] | [16, 16]),
        ) => Scales::TwoLevel,
        (ScaleRule::BlockF32 { .. }, Some([128, 128])) => Scales::Blocks { square: true },
        (ScaleRule::BlockF32 { .. }, Some([1, 128] | [128, 1])) => Scales::Blocks { square: false },
        _ => Scales::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_format::{AnyRecipe, RecipeOptions};

    /// The products of a layer, one after another.
    fn products(name: &str, options: &[(&str, &str)], capability: (i32, i32)) -> [GemmKind; 3] {
        let mut given = RecipeOptions::default();
        for (name, value) in options {
            given.set(name, value);
        }
        let recipe = AnyRecipe::from_name(name, &given).expect("a recipe");
        Pass::ALL.map(|pass| GemmKind::of_recipe(&recipe, pass, capability))
    }

    #[test]
    fn blackwell_multiplies_blocks_of_32_and_16() {
        use GemmKind::{Bf16, Fp4Groups16, Fp8Groups32};
        let (b200, rtx, hopper) = ((10, 0), (12, 0), (9, 0));
        // Columnwise codes of MXFP8 are row-major: inner to the contraction forward alone.
        for name in ["mxfp8", "mxfp8-2d"] {
            assert_eq!(products(name, &[], b200), [Fp8Groups32; 3], "{name}");
            assert_eq!(
                products(name, &[], rtx),
                [Fp8Groups32, Bf16, Bf16],
                "{name}"
            );
        }
        for name in ["nvfp4-1d", "nvfp4-2d"] {
            for capability in [b200, rtx] {
                assert_eq!(products(name, &[], capability), [Fp4Groups16; 3], "{name}");
            }
        }
        for name in ["mxfp8", "mxfp8-2d", "nvfp4-1d", "nvfp4-2d", "mxfp4"] {
            assert_eq!(products(name, &[], hopper), [Bf16; 3], "{name}");
        }
        // An amax for each row is no factor of the whole product.
        assert_eq!(
            products("nvfp4-1d", &[("row_scaled", "true")], b200)[0],
            Bf16
        );
        assert_eq!(products("mxfp4", &[], b200), [Bf16; 3]);
        // A last group that is not whole.
        assert_eq!(Fp4Groups16.over(2736), Bf16);
        assert_eq!(Fp8Groups32.over(2752), Fp8Groups32);
        // cuBLASLt has no product of E5M2 by E5M2, nor of weights in FP4 by inputs in FP8.
        assert_eq!(products("mxfp8", &[("format", "e5m2")], b200), [Bf16; 3]);
        assert_eq!(products("nvfp4-mxfp8", &[], b200)[0], Fp4Groups16);
    }
}
