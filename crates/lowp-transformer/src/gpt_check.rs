//! Linear layers against what recipes can block.

use super::model::GptConfig;
use super::recipes::Run;
use crate::usage::UsageError;
use lowp_format::spelling::Variant;
use lowp_format::{FormatError, Recipe, Role, Shape, lcm};
use lowp_fsdp::LinearSpec;

/// The shape of a linear layer against the blocks of its weight, of its input, whose columns are those of the weight, and of the gradient of
/// its output, whose columns are the weight's rows.
///
/// # Errors
/// The columns of one of them.
pub(crate) fn check_layer(recipe: &Variant, shape: Shape) -> Result<(), FormatError> {
    recipe.check(shape)?;
    for (role, cols) in [(Role::Activation, shape.cols), (Role::Gradient, shape.rows)] {
        let operand = recipe.operand(role);
        for orientation in operand.quantized.orientations() {
            let buffers = operand.quantizers.buffers(orientation.usage());
            let quanta = buffers.iter().map(|buffer| buffer.col_quantum());
            let multiple = quanta.fold(1, lcm);
            if !cols.is_multiple_of(multiple) {
                return Err(FormatError::Columns {
                    recipe: recipe.name(),
                    shape: Shape::new(shape.cols, shape.rows),
                    multiple,
                });
            }
        }
    }
    Ok(())
}

/// What [`check_layer`] found of the layer of this name.
pub(crate) fn cause(name: &str, shape: Shape, recipe: &str, error: &FormatError) -> String {
    match error {
        FormatError::Columns {
            shape: wrong,
            multiple,
            ..
        } => {
            let what = if *wrong == shape { "columns" } else { "rows" };
            format!(
                "layer {name} is {shape}, and {recipe} needs {what} at a multiple of {multiple}"
            )
        }
        other => format!("layer {name}: {other}"),
    }
}

/// Every linear layer against what its recipe can block; those that are `kept` in bf16 take any shape.
///
/// # Errors
/// A [`UsageError`] with a width that fits.
pub(super) fn check_shapes(run: &Run, model: GptConfig, kept: &[String]) -> Result<(), UsageError> {
    let shape = |linear: &LinearSpec| Shape::new(linear.rows, linear.cols);
    let recipe = |linear: &LinearSpec| match kept.contains(&linear.name) {
        true => run.recipe.in_bf16(),
        false => run.recipe.of_block(linear.block, model.layers),
    };
    let linears = model.linears();
    for linear in &linears {
        let Err(error) = check_layer(&recipe(linear), shape(linear)) else {
            continue;
        };
        // Each layer of a block in each recipe that it has in one.
        let in_block = linears.len() / model.layers;
        let mut kinds: Vec<(Variant, usize)> = Vec::new();
        for (at, linear) in linears.iter().enumerate() {
            let kind = (recipe(linear), at % in_block);
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        let fits = |dim: usize| {
            let layers = 1;
            let wide = GptConfig {
                dim,
                layers,
                ..model
            }
            .linears();
            let mut kinds = kinds.iter();
            kinds.all(|(recipe, at)| check_layer(recipe, shape(&wide[*at])).is_ok())
        };
        let next = (1..)
            .map(|n| n * model.heads)
            .skip_while(|&dim| dim <= model.dim);
        let remedy = next.take(1 << 10).find(|&dim| fits(dim)).map_or_else(
            || "choose another recipe".to_owned(),
            |dim| format!("choose --dim {dim}, or another recipe"),
        );
        return Err(UsageError::new(format!(
            "--dim {}: {}; {remedy}",
            model.dim,
            cause(&linear.name, shape(linear), &run.name, &error)
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::config::check_heads;
    use super::super::model::Arch;
    use super::*;
    use lowp_format::AnyRecipe;

    /// A width that is advised fits the heads, and the blocks of every recipe.
    #[test]
    fn every_recipe_takes_a_width_that_is_advised() {
        for (dim, heads) in [
            (128, 5),
            (128, 3),
            (100, 3),
            (100, 7),
            (384, 9),
            (96, 40),
            (96, 64),
        ] {
            for arch in [Arch::Gpt, Arch::Llama { kv_heads: heads }] {
                let model = GptConfig {
                    dim,
                    heads,
                    arch,
                    layers: 1,
                    ..GptConfig::default()
                };
                let error = check_heads(model).expect_err("odd").to_string();
                let number = |option: &str| -> Option<usize> {
                    let rest = error.split(&format!("{option} ")).last()?;
                    rest.split(|c: char| !c.is_ascii_digit())
                        .next()?
                        .parse()
                        .ok()
                };
                let wide = GptConfig {
                    dim: number("--dim").expect("a width"),
                    ..model
                };
                assert!(wide.dim > dim && check_heads(wide).is_ok(), "{error}");
                for recipe in AnyRecipe::all() {
                    let run = Run {
                        name: recipe.name().to_owned(),
                        recipe: recipe.into(),
                    };
                    assert!(check_shapes(&run, wide, &[]).is_ok(), "{recipe:?}: {error}");
                }
                // After the number of heads that was given.
                let Some(fewer) = error.rsplit_once("or --heads ") else {
                    assert!(!dim.is_multiple_of(32), "{error}");
                    continue;
                };
                let fewer = GptConfig {
                    heads: fewer.1.parse().expect("heads"),
                    arch: match arch {
                        Arch::Gpt => arch,
                        Arch::Llama { .. } => Arch::Llama {
                            kv_heads: fewer.1.parse().expect("heads"),
                        },
                    },
                    ..model
                };
                assert!(fewer.heads < heads && check_heads(fewer).is_ok(), "{error}");
            }
        }
    }

    /// The number of heads of keys and values that was given stays, and divides the heads that are advised.
    #[test]
    fn heads_that_are_advised_fit_the_heads_of_keys() {
        let model = |heads| GptConfig {
            dim: 96,
            heads,
            arch: Arch::Llama { kv_heads: 8 },
            layers: 1,
            ..GptConfig::default()
        };
        let error = check_heads(model(40))
            .expect_err("40 heads of 96")
            .to_string();
        assert!(error.ends_with("or --heads 24"), "{error}");
        assert!(check_heads(model(24)).is_ok());
        // These would be heads of odd length.
        assert!(check_heads(model(32)).is_err());
    }

    /// Also where few numbers of heads divide the width: the nearest one may be far.
    #[test]
    fn advice_takes_no_time() {
        for arch in [Arch::Gpt, Arch::Llama { kv_heads: 16_383 }] {
            let model = GptConfig {
                dim: 16_384,
                heads: 16_383,
                arch,
                layers: 1,
                ..GptConfig::default()
            };
            let error = check_heads(model).expect_err("16383 heads").to_string();
            assert!(error.ends_with("choose --heads 8192"), "{error}");
        }
    }
}
