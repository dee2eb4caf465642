//! [`Variant`]: a recipe with ingredients swapped, for controls that should train worse.
//!
//! It is a recipe that `lowp-format` does not list: `NAME+MODIFIER+MODIFIER`.

use std::str::FromStr;

use super::plain_recipe;
use lowp_format::{
    AnyRecipe, BufferList, BufferSpec, Code, FormatError, Fp8Format, KernelKey, MxScale, Operand,
    Part, Recipe, RecipeOptions, Role, Rounding, ScaleRule, ScaleSource, SourceRounding, Usage,
};

/// The modifiers and what they do.
pub(crate) const MODIFIERS: [(&str, &str); 12] = [
    ("e4m3", "E4M3 codes for gradients too"),
    ("hybrid", "E5M2 codes for gradients"),
    ("pow2", "per-tensor scales rounded down to powers of two"),
    (
        "ocp-floor",
        "E8M0 scales rounded down: block maxima saturate",
    ),
    ("via-bf16", "masters rounded to bf16 before the cast"),
    (
        "nearest",
        "gradients rounded to nearest instead of stochastically",
    ),
    (
        "no-hadamard",
        "no Hadamard transform of the weight-gradient operands",
    ),
    (
        "tensor-scale",
        "weights cast to one scale for the tensor instead of one per block",
    ),
    (
        "operand-tensor-scale",
        "activations and gradients cast to one scale for the tensor",
    ),
    ("f32-activations", "activations not quantized"),
    ("f32-gradients", "gradients not quantized"),
    (
        "bf16-ends",
        "weights and operands of the first and the last block in bf16",
    ),
];

/// A recipe of the list and what is changed about it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Variant {
    recipe: AnyRecipe,
    nearest: bool,
    no_hadamard: bool,
    tensor_scale: bool,
    operand_tensor_scale: bool,
    f32_activations: bool,
    f32_gradients: bool,
    bf16_ends: bool,
}

impl FromStr for Variant {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let mut parts = text.split('+').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let mut options = RecipeOptions::default();
        let [
            mut nearest,
            mut no_hadamard,
            mut tensor_scale,
            mut operand_tensor_scale,
            mut f32_activations,
            mut f32_gradients,
            mut bf16_ends,
        ] = [false; 7];
        for modifier in parts {
            match modifier {
                "e4m3" => options.format = Some(Fp8Format::E4M3),
                "hybrid" => options.format = Some(Fp8Format::Hybrid),
                "pow2" => options.pow2 = Some(true),
                "ocp-floor" => options.mx_scale = Some(MxScale::OcpFloor),
                "via-bf16" => options.source_rounding = Some(SourceRounding::ViaBf16),
                "nearest" => nearest = true,
                "no-hadamard" => no_hadamard = true,
                "tensor-scale" => tensor_scale = true,
                "operand-tensor-scale" => operand_tensor_scale = true,
                "f32-activations" => f32_activations = true,
                "f32-gradients" => f32_gradients = true,
                "bf16-ends" => bf16_ends = true,
                other => {
                    let known: Vec<&str> = MODIFIERS.iter().map(|(name, _)| *name).collect();
                    return Err(FormatError::UnknownRecipe {
                        name: format!("{name}+{other}"),
                        known: format!("NAME+MODIFIER with modifiers {}", known.join(", ")),
                    });
                }
            }
        }
        let recipe = AnyRecipe::from_name(name, &options)?;
        Ok(Self {
            recipe,
            nearest,
            no_hadamard,
            tensor_scale,
            operand_tensor_scale,
            f32_activations,
            f32_gradients,
            bf16_ends,
        })
    }
}

/// Scales that follow from the amax of the whole tensor.
const TENSOR_AMAX: ScaleSource = ScaleSource::TensorAmax {
    pow2: false,
    epsilon: 0.0,
};

/// The same elements under one scale.
fn per_tensor(kernel: KernelKey) -> KernelKey {
    KernelKey {
        scale: ScaleRule::Tensor,
        blocks: None,
        ..kernel
    }
}

/// The data buffers, and one tensor scale.
fn without_blocks(buffers: BufferList) -> BufferList {
    let data = |spec: &BufferSpec| spec.key.part == Part::Data;
    let mut kept: BufferList = buffers.into_iter().filter(data).collect();
    kept.push(BufferSpec::tensor_scale());
    kept
}

impl Recipe for Variant {
    fn name(&self) -> &'static str {
        self.recipe.name()
    }

    fn kernel(&self) -> KernelKey {
        let kernel = self.recipe.kernel();
        if self.tensor_scale {
            per_tensor(kernel)
        } else {
            kernel
        }
    }

    fn scale_source(&self) -> ScaleSource {
        if self.tensor_scale {
            TENSOR_AMAX
        } else {
            self.recipe.scale_source()
        }
    }

    fn buffers(&self, usage: Usage) -> BufferList {
        let buffers = self.recipe.buffers(usage);
        if self.tensor_scale {
            without_blocks(buffers)
        } else {
            buffers
        }
    }

    fn source_rounding(&self) -> SourceRounding {
        self.recipe.source_rounding()
    }

    fn operand(&self, role: Role) -> Operand {
        let plain = match role {
            Role::Weight => false,
            Role::Activation => self.f32_activations,
            Role::Gradient => self.f32_gradients,
        };
        if plain && let Some(recipe) = plain_recipe(Code::F32) {
            return recipe.operand(role);
        }
        let mut operand = self.recipe.operand(role);
        if self.nearest {
            operand.rounding = Rounding::Nearest;
        }
        // The transform cancels only where both operands of a product have it.
        operand.hadamard &= !self.no_hadamard && !self.f32_activations && !self.f32_gradients;
        if self.operand_tensor_scale {
            operand.kernel = per_tensor(operand.kernel);
            operand.scale_source = TENSOR_AMAX;
            operand.buffers = without_blocks(operand.buffers);
        }
        operand
    }

    fn options(&self) -> RecipeOptions {
        self.recipe.options()
    }
}

impl Variant {
    /// The variant in which weights of block `block` of `blocks` live.
    pub(crate) fn of_block(self, block: usize, blocks: usize) -> Self {
        let plain = match plain_recipe(Code::Bf16) {
            Some(recipe) if self.bf16_ends && (block == 0 || block + 1 == blocks) => recipe,
            _ => return self,
        };
        Self {
            recipe: plain,
            tensor_scale: false,
            operand_tensor_scale: false,
            ..self
        }
    }

    /// Whether weights live in the code that gradients need more range for.
    pub(crate) fn weights_lack_precision(&self) -> bool {
        self.kernel().element == Code::E5M2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_modifier_changes_nothing() {
        for recipe in AnyRecipe::all() {
            let variant: Variant = recipe.name().parse().expect("a name of the list");
            assert_eq!(variant.kernel(), recipe.kernel());
            assert_eq!(variant.buffers(Usage::BOTH), recipe.buffers(Usage::BOTH));
            for role in [Role::Activation, Role::Gradient] {
                assert_eq!(variant.operand(role), recipe.operand(role));
            }
        }
    }

    #[test]
    fn modifiers_reach_the_recipe() {
        for recipe in AnyRecipe::low_precision() {
            let text = format!(
                "{}+tensor-scale+operand-tensor-scale+nearest+no-hadamard",
                recipe.name()
            );
            let variant: Variant = text.parse().expect("modifiers of every recipe");
            assert_eq!(variant.kernel().scale, ScaleRule::Tensor);
            let operand = variant.operand(Role::Gradient);
            assert_eq!(operand.kernel.scale, ScaleRule::Tensor);
            assert_eq!(
                (operand.rounding, operand.hadamard),
                (Rounding::Nearest, false)
            );
        }
    }

    #[test]
    fn operands_stay_in_f32() {
        let roles = [Role::Activation, Role::Gradient];
        let variant: Variant = "nvfp4-1d+f32-activations".parse().expect("a variant");
        let elements = roles.map(|role| variant.operand(role).kernel.element);
        assert_eq!(elements, [Code::F32, Code::E2M1]);
        assert!(roles.iter().all(|&role| !variant.operand(role).hadamard));
        let variant: Variant = "nvfp4-1d+f32-gradients".parse().expect("a variant");
        let elements = roles.map(|role| variant.operand(role).kernel.element);
        assert_eq!(elements, [Code::E2M1, Code::F32]);
    }

    #[test]
    fn ends_stay_in_bf16() {
        let variant: Variant = "mxfp8+bf16-ends+tensor-scale".parse().expect("a variant");
        let of = |block| variant.of_block(block, 4).kernel().element;
        assert_eq!([of(0), of(3)], [Code::Bf16; 2]);
        assert_eq!([of(1), of(2)], [Code::E4M3; 2]);
        let plain: Variant = "mxfp8".parse().expect("a recipe");
        assert_eq!(plain.of_block(0, 4), plain);
    }

    #[test]
    fn unknown_modifiers_are_named() {
        let error = "bf16+faster"
            .parse::<Variant>()
            .expect_err("no such modifier");
        assert!(error.to_string().contains("bf16+faster"), "{error}");
    }
}
