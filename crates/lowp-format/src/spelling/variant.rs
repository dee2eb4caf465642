//! [`Variant`]: a recipe with options set, or with ingredients swapped for ablations that should train worse.
//!
//! It is a recipe that the list does not have: `NAME+MODIFIER+MODIFIER`.

use std::fmt;
use std::str::FromStr;

use super::modifier::{self, Ablation, Modifier, ModifierWords};
use crate::{
    AnyRecipe, Code, Columnwise, Extent, FormatError, KernelKey, Operand, Orientation, Quantizer,
    Quantizers, Recipe, RecipeOptions, Role, ScaleRule, Shape, SourceRounding, Usage,
};

/// A recipe of the list and what is changed about it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Variant {
    recipe: AnyRecipe,
    tensor_scale: bool,
    operand_tensor_scale: bool,
    exact: Exact,
    bf16_ends: bool,
    bf16_forward: bool,
}

/// The products, by the orientation of the operand, that read its values and not their codes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Exact {
    activations: Usage,
    gradients: Usage,
    weights: Usage,
}

impl FromStr for Variant {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let mut parts = text.split('+').map(str::trim);
        let name = parts.next().unwrap_or_default();
        // The error of an unknown name comes before those of its modifiers.
        AnyRecipe::options_of(name)?;
        let modifiers = modifier::parse(text, name, parts)?;
        let variant = Self::made(name, &modifiers)?;
        for modifier in &modifiers {
            if let Modifier::Ablation(ablation) = modifier
                && !Self::made(name, std::slice::from_ref(modifier))?.differs()
            {
                return Err(modifier::changes_nothing(text, name, ablation.name()));
            }
        }
        Ok(variant)
    }
}

/// One text for all spellings: the recipe's name, the options that are not its defaults, and the ablations, each in their order.
impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.recipe.name())?;
        for modifier in modifier::spelled(&self.recipe) {
            write!(f, "+{modifier}")?;
        }
        for ablation in Ablation::ALL {
            let mut with = *self;
            if with.apply(self.recipe.name(), *ablation).is_ok() && with == *self {
                write!(f, "+{}", ablation.name())?;
            }
        }
        Ok(())
    }
}

impl From<AnyRecipe> for Variant {
    /// The recipe by itself.
    fn from(recipe: AnyRecipe) -> Self {
        Self {
            recipe,
            tensor_scale: false,
            operand_tensor_scale: false,
            exact: Exact {
                activations: Usage::empty(),
                gradients: Usage::empty(),
                weights: Usage::empty(),
            },
            bf16_ends: false,
            bf16_forward: false,
        }
    }
}

impl Variant {
    /// The recipe `name` with `modifiers`.
    fn made(name: &str, modifiers: &[Modifier]) -> Result<Self, FormatError> {
        let mut options = RecipeOptions::default();
        let mut ablations = Vec::new();
        for modifier in modifiers {
            match modifier {
                Modifier::Option { option, value, .. } => options.set(option, value),
                Modifier::Ablation(ablation) => ablations.push(*ablation),
            }
        }
        let mut variant = AnyRecipe::from_name(name, &options)
            .map(Self::from)
            .map_err(|error| modifier::problem(name, &error))?;
        for ablation in ablations {
            variant.apply(name, ablation)?;
        }
        Ok(variant)
    }

    fn apply(&mut self, name: &str, ablation: Ablation) -> Result<(), FormatError> {
        let KernelKey { element, scale, .. } = self.recipe.kernel(Orientation::Rowwise);
        let exact = &mut self.exact;
        match ablation {
            Ablation::TensorScale | Ablation::OperandTensorScale if scale == ScaleRule::None => {
                return Err(FormatError::spelling(format!(
                    "{name}+{}: {element} elements have no scale; use this modifier with a recipe below 16 bits",
                    ablation.name()
                )));
            }
            Ablation::TensorScale => self.tensor_scale = true,
            Ablation::OperandTensorScale => self.operand_tensor_scale = true,
            Ablation::ExactActivationsForward => exact.activations |= Usage::ROWWISE,
            Ablation::ExactActivationsWgrad => exact.activations |= Usage::COLUMNWISE,
            Ablation::ExactGradientsDgrad => exact.gradients |= Usage::ROWWISE,
            Ablation::ExactGradientsWgrad => exact.gradients |= Usage::COLUMNWISE,
            Ablation::ExactWeightsForward => exact.weights |= Usage::ROWWISE,
            Ablation::ExactWeightsDgrad => exact.weights |= Usage::COLUMNWISE,
            Ablation::Bf16Ends => self.bf16_ends = true,
            Ablation::Bf16Forward => self.bf16_forward = true,
        }
        Ok(())
    }
}

/// Scales that follow from the amax of the whole tensor.
const TENSOR_SCALE: ScaleRule = ScaleRule::Current {
    extent: Extent::Tensor,
    pow2: false,
    epsilon: 0.0,
};

/// `quantizers` with operands of `y = x W` in bf16; the other orientation is quantized from the source.
fn with_bf16_forward(quantizers: Quantizers) -> Quantizers {
    if quantizers.rowwise.kernel.element == Code::Bf16 {
        return quantizers;
    }
    Quantizers {
        rowwise: Quantizer::row_major(KernelKey::new(Code::Bf16, ScaleRule::None)),
        relation: Columnwise::Quantized,
        ..quantizers
    }
}

/// `quantizers` with the same elements under one scale.
fn per_tensor(quantizers: Quantizers) -> Quantizers {
    let under_one = |quantizer: Quantizer| Quantizer {
        kernel: KernelKey {
            scale: TENSOR_SCALE,
            block: None,
            ..quantizer.kernel
        },
        ..quantizer
    };
    Quantizers {
        rowwise: under_one(quantizers.rowwise),
        columnwise: under_one(quantizers.columnwise),
        ..quantizers
    }
}

impl Recipe for Variant {
    fn name(&self) -> &'static str {
        self.recipe.name()
    }

    fn quantizers(&self, role: Role) -> Quantizers {
        match role {
            Role::Weight => {
                let stored = self.stored_by().quantizers(role);
                if self.weights_in_f32() {
                    return stored;
                }
                let stored = match self.tensor_scale {
                    true => per_tensor(stored),
                    false => stored,
                };
                match self.bf16_forward {
                    true => with_bf16_forward(stored),
                    false => stored,
                }
            }
            Role::Activation | Role::Gradient => self.operand(role).quantizers,
        }
    }

    fn source_rounding(&self) -> SourceRounding {
        self.stored_by().source_rounding()
    }

    fn operand(&self, role: Role) -> Operand {
        let mut operand = self.recipe.operand(role);
        let (exact, under_one) = match role {
            Role::Weight => (self.exact.weights, self.tensor_scale),
            Role::Activation => (self.exact.activations, self.operand_tensor_scale),
            Role::Gradient => (self.exact.gradients, self.operand_tensor_scale),
        };
        operand.quantized = !exact;
        if under_one {
            operand.quantizers = per_tensor(operand.quantizers);
        }
        if self.bf16_forward && role != Role::Gradient {
            operand.quantizers = with_bf16_forward(operand.quantizers);
        }
        operand
    }

    fn options(&self) -> RecipeOptions {
        self.recipe.options()
    }

    fn check(&self, shape: Shape) -> Result<(), FormatError> {
        // Activations have the recipe's blocks, whatever the weights live in.
        self.recipe.check(shape)
    }
}

impl Variant {
    /// Whether it trains otherwise than its recipe by itself.
    fn differs(&self) -> bool {
        let plain = Self::from(self.recipe);
        let facts = |variant: &Self| {
            let operands = Role::ALL.map(|role| {
                let operand = variant.operand(role);
                // A cast to f32 changes no value.
                let mut kernels = operand.quantizers.kernels().into_iter();
                let exact = kernels.all(|key| key.element == Code::F32);
                Operand {
                    quantized: if exact {
                        Usage::BOTH
                    } else {
                        operand.quantized
                    },
                    ..operand
                }
            });
            (variant.recipe, variant.quantizers(Role::Weight), operands)
        };
        // Also the blocks at the ends, of which a network of one block has one.
        [*self, self.of_block(0, 1)]
            .iter()
            .any(|variant| facts(variant) != facts(&plain))
    }

    /// The variant in which weights of block `block` of `blocks` live.
    pub fn of_block(self, block: usize, blocks: usize) -> Self {
        match self.bf16_ends && (block == 0 || block + 1 == blocks) {
            true => self.in_bf16(),
            false => self,
        }
    }

    /// The variant of a layer that stays in bf16; wider weights stay as they are.
    pub fn in_bf16(self) -> Self {
        let bits = |key: KernelKey| key.element.bits();
        let narrow = self.recipe.quantizers(Role::Weight).kernels().map(bits);
        match AnyRecipe::plain(Code::Bf16) {
            Some(recipe) if narrow.iter().any(|&bits| bits < 16) => Self {
                exact: self.exact,
                bf16_ends: self.bf16_ends,
                ..Self::from(recipe)
            },
            _ => self,
        }
    }

    /// The variant in which the forward products run in bf16; one of wider weights stays as it is.
    pub fn with_bf16_forward(self) -> Self {
        Self {
            bf16_forward: self.in_bf16() != self,
            ..self
        }
    }

    /// Weights that a product reads exactly live in f32; the other product quantizes them.
    fn weights_in_f32(&self) -> bool {
        !self.exact.weights.is_empty()
    }

    /// The recipe that weights live in.
    fn stored_by(&self) -> AnyRecipe {
        match AnyRecipe::plain(Code::F32) {
            Some(plain) if self.weights_in_f32() => plain,
            _ => self.recipe,
        }
    }

    /// Whether one product would have to cast weights by a scale of earlier steps, which belongs to
    /// weights that live in the recipe.
    pub fn casts_weights_late(&self) -> bool {
        let kernels = self.recipe.quantizers(Role::Weight).kernels();
        let delayed = kernels.iter().any(|key| key.scale.is_delayed());
        delayed && self.weights_in_f32() && self.exact.weights != Usage::BOTH
    }

    /// Whether weights live in the code that gradients need more range for.
    pub fn weights_lack_precision(&self) -> bool {
        let kernels = self.quantizers(Role::Weight).kernels();
        kernels.iter().any(|key| key.element == Code::E5M2)
    }
}

impl ModifierWords {
    /// The recipes that it changes, by name.
    pub fn recipes(&self) -> Vec<&'static str> {
        let changes = |recipe: &&str| {
            let plain = recipe.parse::<Variant>();
            let variant = format!("{recipe}+{}", self.name).parse();
            // A modifier may name the default, which is no change.
            variant.is_ok_and(|variant: Variant| plain.is_ok_and(|plain| variant != plain))
        };
        AnyRecipe::names().into_iter().filter(changes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_modifier_changes_nothing() {
        for recipe in AnyRecipe::all() {
            let variant: Variant = recipe.name().parse().expect("a name of the list");
            for role in Role::ALL {
                assert_eq!(variant.quantizers(role), recipe.quantizers(role));
                assert_eq!(variant.operand(role), recipe.operand(role));
            }
        }
    }

    #[test]
    fn controls_reach_the_recipe() {
        let changed = |text: String| text.parse::<Variant>().ok();
        for recipe in AnyRecipe::low_precision() {
            let [weights, operands] = ["tensor-scale", "operand-tensor-scale"]
                .map(|modifier| changed(format!("{}+{modifier}", recipe.name())));
            let kernels = |role| recipe.operand(role).quantizers.kernels();
            let other = |keys: [KernelKey; 2]| keys.iter().any(|key| key.scale != TENSOR_SCALE);
            assert_eq!(weights.is_some(), other(kernels(Role::Weight)));
            if let Some(variant) = weights {
                assert!(!other(variant.quantizers(Role::Weight).kernels()));
            }
            assert_eq!(operands.is_some(), other(kernels(Role::Gradient)));
            if let Some(variant) = operands {
                assert!(!other(variant.operand(Role::Gradient).quantizers.kernels()));
            }
        }
    }

    /// Every value of every option, by its shortest modifier and by its name.
    #[test]
    fn modifiers_set_options() {
        for recipe in AnyRecipe::all() {
            for spec in AnyRecipe::options_of(recipe.name()).expect("a recipe") {
                for value in (spec.names)() {
                    let mut options = RecipeOptions::default();
                    options.set(spec.name, value);
                    let made = AnyRecipe::from_name(recipe.name(), &options).ok();
                    let short = match *value {
                        "true" => spec.name.replace('_', "-"),
                        "false" => format!("no-{}", spec.name.replace('_', "-")),
                        value => value.to_owned(),
                    };
                    for modifier in [short, format!("{}={value}", spec.name)] {
                        let text = format!("{}+{modifier}", recipe.name());
                        let found = text.parse::<Variant>();
                        if modifier.starts_with("no-") && made == Some(recipe) {
                            let error = found.expect_err(&text).to_string();
                            assert!(error.contains("changes nothing"), "{error}");
                            continue;
                        }
                        assert_eq!(found.ok().map(|v| v.recipe), made, "{text}");
                    }
                }
            }
        }
        let numbers: Variant = "fp8-delayed+history=16+margin=-2".parse().expect("options");
        let options = numbers.options();
        assert_eq!(options.get("history"), Some("16"));
        assert_eq!(options.get("margin"), Some("-2"));
    }

    #[test]
    fn controls_leave_the_transform_alone() {
        for ablation in Ablation::ALL {
            let text = format!("nvfp4-2d+{}", ablation.name());
            let variant: Variant = text.parse().expect(&text);
            for role in [Role::Activation, Role::Gradient] {
                let kernels = variant.operand(role).quantizers.kernels();
                assert_eq!(kernels.map(|key| key.hadamard), [false, true], "{text}");
            }
        }
    }

    #[test]
    fn ends_stay_in_bf16() {
        let variant: Variant = "mxfp8+bf16-ends+tensor-scale".parse().expect("a variant");
        let of = |block| {
            variant
                .of_block(block, 4)
                .kernel(Orientation::Rowwise)
                .element
        };
        assert_eq!([of(0), of(3)], [Code::Bf16; 2]);
        assert_eq!([of(1), of(2)], [Code::E4M3; 2]);
        let plain: Variant = "mxfp8".parse().expect("a recipe");
        assert_eq!(plain.of_block(0, 4), plain);
    }

    #[test]
    fn modifiers_that_contradict_or_repeat_are_named() {
        for (text, expected) in [
            ("mxfp8+e4m3+hybrid", "+e4m3 and +hybrid exclude each other"),
            (
                "fp8-current+hybrid+pow2+ e4m3",
                "+hybrid and +e4m3 exclude each other",
            ),
            (
                "nvfp4-2d+nearest+no-hadamard+nearest",
                "+nearest is there twice",
            ),
            ("mxfp8+hybrid+hybrid", "+hybrid is there twice"),
            (
                "fp8-current+pow2+no-pow2",
                "+pow2 and +no-pow2 exclude each other",
            ),
            (
                "fp8-delayed+history=1+history=2",
                "+history=1 and +history=2 exclude each other",
            ),
            (
                "fp8-current+no-pow2",
                "+no-pow2 changes nothing of fp8-current",
            ),
            ("nvfp4-1d+pow2", "+pow2 changes nothing of nvfp4-1d"),
            (
                "nvfp4-1d+history=3",
                "+history=3 changes nothing of nvfp4-1d",
            ),
            (
                "fp8-current+nearest",
                "+nearest changes nothing of fp8-current",
            ),
            (
                "mxfp8+e4m3+no-hadamard",
                "+no-hadamard changes nothing of mxfp8",
            ),
            ("fp32+nearest", "+nearest changes nothing of fp32"),
            ("bf16+bf16-ends", "+bf16-ends changes nothing of bf16"),
            (
                "fp8-current+tensor-scale",
                "+tensor-scale changes nothing of fp8-current",
            ),
        ] {
            let error = text.parse::<Variant>().expect_err(text).to_string();
            assert!(
                error.starts_with(text) && error.contains(expected),
                "{error}"
            );
        }
    }

    #[test]
    fn unknown_modifiers_are_named() {
        let error = "bf16+faster"
            .parse::<Variant>()
            .expect_err("no such modifier");
        assert!(error.to_string().contains("bf16+faster"), "{error}");
    }
}
