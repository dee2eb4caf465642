//! Which product multiplies which operands: the table of a layer's three products.

use lowp_format::{Axis, Code, Extent, KernelKey, Orientation, Quantizer, Recipe, Role, ScaleRule};

/// How two operands are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Product {
    /// FP8 codes, one scale per tensor.
    Fp8Tensor,
    /// FP8 codes, one scale per row of each operand.
    Fp8Rows,
    /// FP8 codes, f32 scales per 128 along the contracted axis: of each row, or of 128 rows of one operand.
    Fp8Groups128,
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

    /// The roles of both operands, with the orientation in which the product reads them.
    pub const fn operands(self) -> [(Role, Orientation); 2] {
        use Orientation::{Columnwise, Rowwise};
        match self {
            Self::Forward => [(Role::Weight, Rowwise), (Role::Activation, Rowwise)],
            Self::InputGrad => [(Role::Weight, Columnwise), (Role::Gradient, Rowwise)],
            Self::WeightGrad => [(Role::Activation, Columnwise), (Role::Gradient, Columnwise)],
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

impl Product {
    /// What runs for operands `a` and `b` on a device of this compute capability.
    pub fn of(a: Option<Codes>, b: Option<Codes>, (major, minor): (i32, i32)) -> Self {
        let (Some(a), Some(b)) = (a, b) else {
            return Self::Bf16;
        };
        if !a.k_inner || !b.k_inner {
            return Self::Bf16;
        }
        let [a, b] = [a.kernel, b.kernel];
        let fp8 = |k: &KernelKey| matches!(k.element, Code::E4M3 | Code::E5M2);
        // cuBLASLt takes E5M2 for one operand only.
        if !fp8(&a) || !fp8(&b) || (a.element == Code::E5M2 && b.element == Code::E5M2) {
            return Self::Bf16;
        }
        let hopper = (major, minor) == (9, 0);
        let fp8_units = major >= 9 || (major, minor) == (8, 9);
        match (scales(&a), scales(&b)) {
            (Scales::Tensor, Scales::Tensor) if fp8_units => Self::Fp8Tensor,
            (Scales::Line, Scales::Line) if hopper => Self::Fp8Rows,
            (Scales::Blocks { square: false }, Scales::Blocks { .. })
            | (Scales::Blocks { .. }, Scales::Blocks { square: false })
                if hopper =>
            {
                Self::Fp8Groups128
            }
            _ => Self::Bf16,
        }
    }

    /// What runs in `pass` of a layer whose weight lives in `recipe`.
    pub fn of_recipe(recipe: &impl Recipe, pass: Pass, capability: (i32, i32)) -> Self {
        let codes = pass
            .operands()
            .map(|(role, orientation)| Codes::of(recipe, role, orientation));
        Self::of(codes[0], codes[1], capability)
    }

    /// In words.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Fp8Tensor => "FP8 codes, a scale per tensor",
            Self::Fp8Rows => "FP8 codes, a scale per row",
            Self::Fp8Groups128 => "FP8 codes, scales per 128",
            Self::Bf16 => "bf16",
        }
    }
}

/// Checks that layers on a GPU run a weight that lives in `recipe`.
///
/// # Errors
/// Says what they do not run.
pub fn check(recipe: &impl Recipe) -> Result<(), &'static str> {
    for role in [Role::Activation, Role::Gradient] {
        for orientation in Orientation::ALL {
            let kernel = recipe.operand(role).quantizers.of(orientation).kernel;
            if kernel.hadamard && Codes::of(recipe, role, orientation).is_none() {
                return Err(
                    "a recipe whose other operand passes a Hadamard transform while this one stays exact runs on the CPU only",
                );
            }
        }
    }
    let (read, stored) = (
        recipe.operand(Role::Weight),
        recipe.quantizers(Role::Weight),
    );
    if read.quantizers.kernels() != stored.kernels() && !read.quantized.is_empty() {
        return Err(
            "a recipe whose weights live in another code than products read runs on the CPU only",
        );
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
        (ScaleRule::BlockF32 { .. }, Some([128, 128])) => Scales::Blocks { square: true },
        (ScaleRule::BlockF32 { .. }, Some([1, 128] | [128, 1])) => Scales::Blocks { square: false },
        _ => Scales::Other,
    }
}
