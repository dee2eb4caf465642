//! [`check_formats`]: whether the operands of each product of a layer share a format (docs/numerics.md 21).

use std::fmt;

use lowp_format::{Extent, KernelKey, Orientation, Recipe, Role, ScaleRule};
use lowp_gemm::table::Pass;
use thiserror::Error;

/// Operands of one product in different formats.
#[derive(Clone, Debug, Error, PartialEq)]
#[error(
    "{product} reads {} of the {} and {} of the {}; a product needs operands of one format: quantize both in the same format, or \
     leave one of them exact",
    Words(.kernels[0]), name(.roles[0]), Words(.kernels[1]), name(.roles[1])
)]
pub struct FormatMismatch {
    /// The product, by the name of its [`Pass`](lowp_gemm::table::Pass).
    pub product: &'static str,
    /// The product's operands.
    pub roles: [Role; 2],
    /// How each is quantized.
    pub kernels: [KernelKey; 2],
}

/// Checks that products of a layer whose weight lives in `recipe` read operands of one format: elements of one width
/// under scales of one kind and block length, and both transformed or neither. What one scale covers whole is of any
/// format with its elements: the scale is a factor of the product.
///
/// # Errors
/// Names the first product whose operands differ.
pub fn check_formats(recipe: &impl Recipe) -> Result<(), FormatMismatch> {
    for pass in Pass::ALL {
        let read = pass.operands();
        let operands = read.map(|(role, orientation)| (recipe.operand(role), orientation));
        let kernels = operands
            .each_ref()
            .map(|(operand, orientation)| operand.quantizers.of(*orientation).kernel);
        let quantized = operands
            .iter()
            .all(|(operand, orientation)| operand.quantized.contains(orientation.usage()));
        let [(_, x), (_, y)] = operands;
        let alike = !quantized || share_format(&kernels[0], x, &kernels[1], y);
        if !alike || kernels[0].hadamard != kernels[1].hadamard {
            return Err(FormatMismatch {
                product: pass.name(),
                roles: read.map(|(role, _)| role),
                kernels,
            });
        }
    }
    Ok(())
}

fn share_format(a: &KernelKey, along_a: Orientation, b: &KernelKey, along_b: Orientation) -> bool {
    let scales = [scales(a, along_a), scales(b, along_b)];
    let any = scales.contains(&Scales::One);
    a.element.bits() == b.element.bits() && (any || scales[0] == scales[1])
}

/// What scales an operand along the axis that the product contracts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scales {
    None,
    /// One scale for the tensor.
    One,
    /// One scale for each line.
    Line,
    /// Powers of two for so many elements each.
    PowerOfTwo(usize),
    /// Two levels.
    TwoLevel(usize),
    /// f32.
    Float(usize),
}

fn scales(key: &KernelKey, along: Orientation) -> Scales {
    let length = key.block.map_or(0, |[rows, cols]| match along {
        Orientation::Rowwise => cols,
        Orientation::Columnwise => rows,
    });
    match key.scale {
        ScaleRule::None => Scales::None,
        ScaleRule::Delayed { .. } => Scales::One,
        ScaleRule::Current { extent, .. } => match extent {
            Extent::Tensor => Scales::One,
            Extent::Line => Scales::Line,
        },
        ScaleRule::E8M0(_) => Scales::PowerOfTwo(length),
        ScaleRule::TwoLevel { .. } => Scales::TwoLevel(length),
        ScaleRule::BlockF32 { .. } => Scales::Float(length),
    }
}

fn name(role: Role) -> &'static str {
    match role {
        Role::Weight => "weight",
        Role::Activation => "input",
        Role::Gradient => "gradient",
    }
}

/// Ingredients in words: `E2M1 with E4M3 scales per 1x16`.
struct Words(KernelKey);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.0;
        write!(f, "{}", key.element)?;
        match (key.block.zip(key.scale.entry()), key.scale.outer()) {
            (Some(([rows, cols], entry)), _) => write!(f, " with {entry} scales per {rows}x{cols}"),
            (None, Some((Extent::Tensor, _))) => f.write_str(" with one scale"),
            (None, Some((Extent::Line, _))) => f.write_str(" with a scale per line"),
            (None, None) => Ok(()),
        }?;
        match key.hadamard {
            true => f.write_str(" after a Hadamard transform"),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_format::{AnyRecipe, Columnwise, Operand, Quantizers, RecipeOptions};

    /// Roles quantized by recipes of their own.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Mixed {
        weight: AnyRecipe,
        activation: AnyRecipe,
        gradient: AnyRecipe,
        exact: bool,
    }

    impl Recipe for Mixed {
        fn name(&self) -> &'static str {
            "mixed"
        }

        fn quantizers(&self, role: Role) -> Quantizers {
            let of = match role {
                Role::Weight => self.weight,
                Role::Activation => self.activation,
                Role::Gradient => self.gradient,
            };
            of.quantizers(role)
        }

        fn operand(&self, role: Role) -> Operand {
            let mut operand = Operand {
                quantizers: self.quantizers(role),
                ..self.weight.operand(role)
            };
            if self.exact && role == Role::Activation {
                operand.quantized = lowp_format::Usage::empty();
            }
            operand
        }
    }

    fn recipe(name: &str, option: &str, value: &str) -> AnyRecipe {
        let mut options = RecipeOptions::default();
        if !option.is_empty() {
            options.set(option, value);
        }
        AnyRecipe::from_name(name, &options).expect("a recipe")
    }

    #[test]
    fn every_recipe_agrees_with_itself_under_any_option() {
        for found in AnyRecipe::all() {
            assert_eq!(check_formats(&found), Ok(()), "{}", found.name());
            for spec in AnyRecipe::options_of(found.name()).expect("options") {
                for value in (spec.names)() {
                    let mut options = RecipeOptions::default();
                    options.set(spec.name, value);
                    if let Ok(other) = AnyRecipe::from_name(found.name(), &options) {
                        check_formats(&other)
                            .unwrap_or_else(|e| panic!("{} {value}: {e}", found.name()));
                    }
                }
            }
        }
    }

    #[test]
    fn formats_that_differ_are_named() {
        let plain = |name| recipe(name, "", "");
        let mixed = |[weight, activation, gradient]: [AnyRecipe; 3], exact| Mixed {
            weight,
            activation,
            gradient,
            exact,
        };
        let [mxfp8, nvfp4, block] = ["mxfp8", "nvfp4-1d", "fp8-block"].map(plain);
        let still = recipe("nvfp4-1d", "hadamard", "false");
        for (roles, product, words) in [
            (
                [nvfp4, mxfp8, mxfp8],
                "y = x W^T",
                "E2M1 with E4M3 scales per 1x16 of the weight and E4M3 with E8M0 scales per 1x32 of the input",
            ),
            (
                [mxfp8, mxfp8, block],
                "dx = dy W",
                "E4M3 with E8M0 scales per 32x1 of the weight and E4M3 with F32 scales per 1x128 of the gradient",
            ),
            (
                [nvfp4, nvfp4, still],
                "dW = dy^T x",
                "after a Hadamard transform of the input and E2M1 with E4M3 scales per 16x1 of the gradient",
            ),
        ] {
            let error = check_formats(&mixed(roles, false)).expect_err(product);
            assert_eq!(error.product, product);
            let text = error.to_string();
            assert!(text.contains(words) && text.contains(product), "{text}");
        }
        // What is not quantized has no format, but must be transformed alike.
        let exact = mixed([mxfp8, block, mxfp8], true);
        assert_eq!(check_formats(&exact), Ok(()));
        assert!(check_formats(&mixed([nvfp4, still, nvfp4], true)).is_err());
        // One scale is a factor of the product.
        let scaled = mixed([plain("fp8-current"), mxfp8, mxfp8], false);
        assert_eq!(check_formats(&scaled), Ok(()));
        assert_eq!(
            block.quantizers(Role::Weight).relation,
            Columnwise::Transposed
        );
    }
}
