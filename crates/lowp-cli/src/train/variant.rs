//! [`Variant`]: a recipe with ingredients swapped, for controls that should train worse.
//!
//! It is a recipe that `lowp-format` does not list: `NAME+MODIFIER+MODIFIER`.

use std::collections::BTreeSet;
use std::str::FromStr;

use super::plain_recipe;
use crate::usage::UsageError;
use lowp_format::{
    AnyRecipe, BufferList, BufferSpec, Code, FormatError, Fp8Format, KernelKey, MxScale, Operand,
    Part, Recipe, RecipeOptions, Role, Rounding, ScaleRule, ScaleSource, Shape, SourceRounding,
    Usage,
};

/// The modifiers and what they do.
pub(crate) const MODIFIERS: [(&str, &str); 16] = [
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
        "weights cast to one scale for the whole tensor, from its amax",
    ),
    (
        "operand-tensor-scale",
        "activations and gradients cast to one scale for the tensor",
    ),
    (
        "exact-activations-forward",
        "activations not quantized in y = x W",
    ),
    (
        "exact-activations-wgrad",
        "activations not quantized in the weight gradient",
    ),
    (
        "exact-gradients-dgrad",
        "gradients not quantized in the input gradient",
    ),
    (
        "exact-gradients-wgrad",
        "gradients not quantized in the weight gradient",
    ),
    (
        "exact-weights-forward",
        "weights in f32, not quantized in y = x W",
    ),
    (
        "exact-weights-dgrad",
        "weights in f32, not quantized in the input gradient",
    ),
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
    exact: Exact,
    bf16_ends: bool,
}

/// The products, by the orientation of the operand, that read its values and not their codes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Exact {
    activations: Usage,
    gradients: Usage,
    weights: Usage,
}

impl FromStr for Variant {
    type Err = UsageError;

    fn from_str(text: &str) -> Result<Self, UsageError> {
        check_modifiers(text)?;
        let mut parts = text.split('+').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let modifiers: Vec<&str> = parts.collect();
        let variant = Self::made(name, &modifiers)?;
        // Those that set an option are checked by the recipe.
        let control = |modifier: &&&str| !Self::OPTIONS.contains(*modifier);
        for modifier in modifiers.iter().filter(control) {
            if !Self::made(name, &[*modifier])?.differs() {
                return Err(UsageError::new(format!(
                    "{text}: +{modifier} changes nothing of {name}; leave it out (`lowp recipes` lists the recipes that it changes)"
                )));
            }
        }
        Ok(variant)
    }
}

impl Variant {
    /// Modifiers that set an option of the recipe.
    pub(crate) const OPTIONS: [&str; 5] = ["e4m3", "hybrid", "pow2", "ocp-floor", "via-bf16"];

    /// The recipe `name` with `modifiers`.
    fn made(name: &str, modifiers: &[&str]) -> Result<Self, UsageError> {
        let mut options = RecipeOptions::default();
        let [
            mut nearest,
            mut no_hadamard,
            mut tensor_scale,
            mut operand_tensor_scale,
            mut bf16_ends,
        ] = [false; 5];
        let mut exact = Exact {
            activations: Usage::empty(),
            gradients: Usage::empty(),
            weights: Usage::empty(),
        };
        for &modifier in modifiers {
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
                "exact-activations-forward" => exact.activations |= Usage::ROWWISE,
                "exact-activations-wgrad" => exact.activations |= Usage::COLUMNWISE,
                "exact-gradients-dgrad" => exact.gradients |= Usage::ROWWISE,
                "exact-gradients-wgrad" => exact.gradients |= Usage::COLUMNWISE,
                "exact-weights-forward" => exact.weights |= Usage::ROWWISE,
                "exact-weights-dgrad" => exact.weights |= Usage::COLUMNWISE,
                "bf16-ends" => bf16_ends = true,
                other => {
                    let known: Vec<&str> = MODIFIERS.iter().map(|(name, _)| *name).collect();
                    return Err(UsageError::from(FormatError::UnknownRecipe {
                        name: format!("{name}+{other}"),
                        known: format!("NAME+MODIFIER with modifiers {}", known.join(", ")),
                    }));
                }
            }
        }
        let recipe = AnyRecipe::from_name(name, &options)?;
        let text = [&[name], modifiers].concat().join("+");
        if (tensor_scale || operand_tensor_scale) && recipe.kernel().scale == ScaleRule::None {
            return Err(UsageError::new(format!(
                "{text}: {} elements take no scale; modify a recipe below 16 bits (`lowp recipes` lists them)",
                recipe.kernel().element
            )));
        }
        Ok(Self {
            recipe,
            nearest,
            no_hadamard,
            tensor_scale,
            operand_tensor_scale,
            exact,
            bf16_ends,
        })
    }
}

/// Modifiers that set the same option to different values.
const EXCLUSIVE: [[&str; 2]; 1] = [["e4m3", "hybrid"]];

/// Rejects modifiers of `text` that are there twice, or that exclude each other.
fn check_modifiers(text: &str) -> Result<(), UsageError> {
    let modifiers: Vec<&str> = text.split('+').skip(1).map(str::trim).collect();
    let mut seen = BTreeSet::new();
    if let Some(twice) = modifiers.iter().find(|modifier| !seen.insert(**modifier)) {
        return Err(UsageError::new(format!(
            "{text}: +{twice} is there twice; leave one of them out"
        )));
    }
    for [a, b] in EXCLUSIVE {
        if seen.contains(a) && seen.contains(b) {
            return Err(UsageError::new(format!(
                "{text}: +{a} and +{b} exclude each other; leave one of them out"
            )));
        }
    }
    Ok(())
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
    kept.push(BufferSpec::decode_scale());
    kept
}

impl Recipe for Variant {
    fn name(&self) -> &'static str {
        self.recipe.name()
    }

    fn kernel(&self) -> KernelKey {
        let kernel = self.stored_by().kernel();
        if self.weights_under_one_scale() {
            per_tensor(kernel)
        } else {
            kernel
        }
    }

    fn scale_source(&self) -> ScaleSource {
        if self.weights_under_one_scale() {
            TENSOR_AMAX
        } else {
            self.stored_by().scale_source()
        }
    }

    fn buffers(&self, usage: Usage) -> BufferList {
        let buffers = self.stored_by().buffers(usage);
        if self.weights_under_one_scale() {
            without_blocks(buffers)
        } else {
            buffers
        }
    }

    fn source_rounding(&self) -> SourceRounding {
        self.stored_by().source_rounding()
    }

    fn operand(&self, role: Role) -> Operand {
        let mut operand = self.recipe.operand(role);
        let exact = match role {
            Role::Weight => self.exact.weights,
            Role::Activation => self.exact.activations,
            Role::Gradient => self.exact.gradients,
        };
        operand.quantized = !exact;
        if self.nearest {
            operand.rounding = Rounding::Nearest;
        }
        // Both operands of the weight gradient or neither: the transform cancels only then.
        operand.hadamard &= !self.no_hadamard;
        let per_tensor_role = match role {
            Role::Weight => self.tensor_scale,
            Role::Activation | Role::Gradient => self.operand_tensor_scale,
        };
        if per_tensor_role {
            operand.kernel = per_tensor(operand.kernel);
            operand.scale_source = TENSOR_AMAX;
            operand.buffers = without_blocks(operand.buffers);
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
        let plain = Self {
            nearest: false,
            no_hadamard: false,
            tensor_scale: false,
            operand_tensor_scale: false,
            exact: Exact {
                activations: Usage::empty(),
                gradients: Usage::empty(),
                weights: Usage::empty(),
            },
            bf16_ends: false,
            ..*self
        };
        let facts = |variant: &Self| {
            let roles = [Role::Activation, Role::Gradient, Role::Weight];
            let usages = [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH];
            (
                (variant.kernel(), variant.scale_source(), variant.recipe),
                usages.map(|usage| variant.buffers(usage)),
                roles.map(|role| {
                    let operand = variant.operand(role);
                    // A cast to f32 changes no value.
                    let exact = operand.kernel.element == Code::F32;
                    Operand {
                        quantized: if exact {
                            Usage::BOTH
                        } else {
                            operand.quantized
                        },
                        ..operand
                    }
                }),
            )
        };
        // Also the blocks at the ends, of which a network of one block has one.
        [*self, self.of_block(0, 1)]
            .iter()
            .any(|variant| facts(variant) != facts(&plain))
    }

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

    /// Weights that a product reads exactly live in f32; the other product quantizes them.
    fn weights_in_f32(&self) -> bool {
        !self.exact.weights.is_empty()
    }

    /// The recipe that weights live in.
    fn stored_by(&self) -> AnyRecipe {
        match plain_recipe(Code::F32) {
            Some(plain) if self.weights_in_f32() => plain,
            _ => self.recipe,
        }
    }

    fn weights_under_one_scale(&self) -> bool {
        self.tensor_scale && !self.weights_in_f32()
    }

    /// Whether one product would have to cast weights by a scale of earlier steps, which belongs to
    /// weights that live in the recipe.
    pub(crate) fn casts_weights_late(&self) -> bool {
        let delayed = matches!(self.recipe.scale_source(), ScaleSource::History { .. });
        delayed && self.weights_in_f32() && self.exact.weights != Usage::BOTH
    }

    /// Whether weights live in the code that gradients need more range for.
    pub(crate) fn weights_lack_precision(&self) -> bool {
        self.kernel().element == Code::E5M2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor, Var};
    use lowp_candle::{Gradients, LinearSpec, ModelOptions, ShardedModel, Sharding};
    use lowp_format::ReshardAfterForward;
    use lowp_kernels::{Backend, Cpu};
    use lowp_optim::Group;
    use lowp_shard::{GradBucketOptions, GradParam, Init, LocalComm, Mesh, MeshComm};
    use std::sync::Arc;

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
        let changed = |text: String| text.parse::<Variant>().ok();
        for recipe in AnyRecipe::low_precision() {
            let [weights, operands, nearest, plain] = [
                "tensor-scale",
                "operand-tensor-scale",
                "nearest",
                "no-hadamard",
            ]
            .map(|modifier| changed(format!("{}+{modifier}", recipe.name())));
            let of = |role| recipe.operand(role);
            let [weight, gradient] = [Role::Weight, Role::Gradient].map(of);
            assert_eq!(weights.is_some(), weight.scale_source != TENSOR_AMAX);
            if let Some(variant) = weights {
                assert_eq!(variant.kernel().scale, ScaleRule::Tensor);
            }
            assert_eq!(operands.is_some(), gradient.scale_source != TENSOR_AMAX);
            if let Some(variant) = operands {
                let operand = variant.operand(Role::Gradient);
                assert_eq!(operand.kernel.scale, ScaleRule::Tensor);
            }
            assert_eq!(nearest.is_some(), gradient.rounding != Rounding::Nearest);
            if let Some(variant) = nearest {
                assert_eq!(variant.operand(Role::Gradient).rounding, Rounding::Nearest);
            }
            let hadamard = gradient.hadamard || of(Role::Activation).hadamard;
            assert_eq!(plain.is_some(), hadamard);
            if let Some(variant) = plain {
                assert!(!variant.operand(Role::Gradient).hadamard);
            }
        }
    }

    /// `y`, `dx` and `dW` of one layer under `text`, as bits.
    fn products(text: &str) -> [Vec<u32>; 3] {
        let (tokens, rows, cols) = (64, 96, 32);
        let variant: Variant = text.parse().expect("a variant");
        let cpu = Cpu;
        let comm = Arc::new(LocalComm::solo(&cpu));
        let mesh = MeshComm::new(Mesh::sharded(1), comm).expect("one rank");
        let spec = LinearSpec {
            name: "layer".to_owned(),
            block: 0,
            rows,
            cols,
            init: Init::Normal(0.1),
        };
        let options = ModelOptions {
            sharding: Sharding::Fsdp,
            reshard_after_forward: ReshardAfterForward::Yes,
            grads: GradBucketOptions::default(),
            seed: 1,
            group: Group::default(),
            threads: 1,
        };
        let model = ShardedModel::new(&cpu, &mesh, |_| variant, &[spec], &[], options);
        let model = model.expect("a model");
        let dw = cpu.alloc::<f32>(rows * cols).expect("room");
        let weight = model.weight(0).expect("a layer");
        let param = GradParam {
            name: "dw".to_owned(),
            ranges: weight.element_ranges().to_vec(),
            out: dw.clone(),
        };
        let gradients = Gradients::new(&cpu, &mesh, vec![param], options.grads);
        let gradients = Arc::new(gradients.expect("a bucket"));
        weight.connect(&gradients, 0).expect("a weight");
        model.begin(0, 0, true).expect("a first pass");
        let values = |number, cols| {
            let values = Init::Normal(1.0).rows(2, number, 0..tokens, cols);
            Var::from_vec(values, (tokens, cols), &Device::Cpu).expect("values")
        };
        let (x, dy) = (values(0, cols), values(1, rows));
        let y = model.layers()[0].forward(&x).expect("y");
        let sum = (&y * dy.as_tensor()).and_then(|sum| sum.sum_all());
        let gradients = sum.and_then(|sum| sum.backward()).expect("gradients");
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
        let flat = |t: &Tensor| t.flatten_all().and_then(|t| t.to_vec1()).expect("values");
        let dx = gradients.get(&x).expect("dx");
        let dw = cpu.download(&dw).expect("dW");
        [bits(flat(&y)), bits(flat(dx)), bits(dw)]
    }

    /// Each control changes one operand of one product: the other two products keep their bits, and
    /// with both operands exact the product is that of f32.
    #[test]
    fn a_control_changes_one_product() {
        let exact = products("fp32");
        let pairs = [
            ["exact-activations-forward", "exact-weights-forward"],
            ["exact-gradients-dgrad", "exact-weights-dgrad"],
            ["exact-activations-wgrad", "exact-gradients-wgrad"],
        ];
        for recipe in ["fp8-current", "mxfp8", "nvfp4-2d", "nvfp4-2d+no-hadamard"] {
            let all = products(recipe);
            for (changed, pair) in pairs.iter().enumerate() {
                let both = products(&format!("{recipe}+{}+{}", pair[0], pair[1]));
                // The transform of two exact operands cancels but for the rounding of its sums.
                let rotated = changed == 2 && recipe == "nvfp4-2d";
                assert_eq!(
                    both[changed] == exact[changed],
                    !rotated,
                    "{recipe}, {pair:?}"
                );
                for control in pair {
                    let one = products(&format!("{recipe}+{control}"));
                    for product in 0..3 {
                        let same = one[product] == all[product];
                        let what = format!("{recipe}+{control}, product {product}");
                        assert_eq!(same, product != changed, "{what}");
                    }
                    assert_ne!(one[changed], exact[changed], "{recipe}+{control}");
                }
            }
        }
    }

    #[test]
    fn controls_leave_the_transform_alone() {
        for (control, _) in MODIFIERS {
            let text = format!("nvfp4-2d+{control}");
            let Ok(variant) = text.parse::<Variant>() else {
                continue; // a modifier of other recipes
            };
            for role in [Role::Activation, Role::Gradient] {
                let hadamard = variant.operand(role).hadamard;
                assert_eq!(hadamard, control != "no-hadamard", "{text}");
            }
        }
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
    fn modifiers_that_contradict_or_repeat_are_named() {
        for (text, expected) in [
            ("mxfp8+e4m3+hybrid", "+e4m3 and +hybrid exclude each other"),
            (
                "fp8-current+hybrid+pow2+ e4m3",
                "+e4m3 and +hybrid exclude each other",
            ),
            (
                "nvfp4-2d+nearest+no-hadamard+nearest",
                "+nearest is there twice",
            ),
            ("mxfp8+hybrid+hybrid", "+hybrid is there twice"),
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
        for [a, b] in EXCLUSIVE {
            let known = |name| MODIFIERS.iter().any(|(known, _)| *known == name);
            assert!(known(a) && known(b), "{a}, {b}");
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
