//! [`GptConfig::check`]: sizes by themselves, against each other, and against what recipes can block.

use lowp_format::spelling::Variant;
use lowp_format::{Shape, check_layer, layer_error, lcm};
use lowp_fsdp::LinearSpec;
use lowp_train::Model;
use thiserror::Error;

use crate::gpt_config::{Arch, BYTES, GptConfig};
use crate::llama::Llama;

/// Most parameters of a model; each takes over 16 bytes in masters, moments and gradients.
const MAX_PARAMETERS: usize = 1 << 31;
/// Largest width of a model.
const MAX_DIM: usize = 1 << 14;
/// Most tokens of a vocabulary.
const MAX_VOCABULARY: usize = 1 << 20;
/// The longest block of any recipe, of whose length widths are multiples.
const BLOCK: usize = 32;

/// What is wrong with the sizes of a [`GptConfig`]. Messages name its fields in backticks, so that a program may put its own names there.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    /// A size out of its range.
    #[error("`{field}` must be from 1 to {most}, not {value}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The largest that is possible.
        most: usize,
    },
    /// Too few tokens, or too many.
    #[error("`vocab` must be from {BYTES}, one for each byte, to {MAX_VOCABULARY}, not {vocab}")]
    Vocabulary {
        /// Tokens.
        vocab: usize,
    },
    /// Heads of no whole width.
    #[error("`dim` {dim} is not divisible by `heads` {heads}; {remedy}")]
    Heads {
        /// The width.
        dim: usize,
        /// Its heads.
        heads: usize,
        /// Others that would work.
        remedy: String,
    },
    /// Heads of keys and values that serve no whole number of heads of queries.
    #[error(
        "`kv_heads` {kv_heads} does not divide `heads` {heads}; choose `kv_heads` 1, {heads} or another divisor"
    )]
    KvHeads {
        /// Heads of keys and values.
        kv_heads: usize,
        /// Heads of queries.
        heads: usize,
    },
    /// Heads that rotary positions cannot turn.
    #[error(
        "`arch` llama: `dim` {dim} over `heads` {heads} gives heads of odd length, which rotary position embeddings do not support; {remedy}"
    )]
    OddHeads {
        /// The width.
        dim: usize,
        /// Its heads.
        heads: usize,
        /// Others that would work.
        remedy: String,
    },
    /// More parameters than are possible.
    #[error(
        "`dim` {dim} and `layers` {layers} give {parameters} parameters; the maximum is {MAX_PARAMETERS}"
    )]
    Parameters {
        /// The width.
        dim: usize,
        /// Blocks.
        layers: usize,
        /// Parameters.
        parameters: usize,
    },
    /// A layer that a recipe cannot block.
    #[error("`dim` {dim}: {cause}; {remedy}")]
    Layer {
        /// The width.
        dim: usize,
        /// The layer, and why.
        cause: String,
        /// A width that would work, where there is one.
        remedy: String,
    },
}

impl GptConfig {
    /// Checks every size by itself and against the others.
    ///
    /// # Errors
    /// A size out of its range, or heads that do not divide the width, with others that would.
    pub fn check(&self) -> Result<(), SizeError> {
        for (field, value, most) in [
            ("dim", self.dim, MAX_DIM),
            ("layers", self.layers, 1 << 10),
            ("heads", self.heads, 1 << 14),
            ("seq", self.seq, 1 << 16),
            ("vocab", self.vocab, MAX_VOCABULARY),
        ] {
            if !(1..=most).contains(&value) {
                return Err(SizeError::Range { field, value, most });
            }
        }
        let Self { dim, heads, .. } = *self;
        let own_width = matches!(
            self.arch,
            Arch::Llama(Llama {
                head_dim: Some(_),
                ..
            })
        );
        if !own_width && !dim.is_multiple_of(heads) {
            let remedy = other_heads(*self);
            return Err(SizeError::Heads { dim, heads, remedy });
        }
        let Arch::Llama(Llama { kv_heads, .. }) = self.arch else {
            return Ok(());
        };
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(SizeError::KvHeads { kv_heads, heads });
        }
        if !self.head_dim().is_multiple_of(2) {
            let remedy = other_heads(*self);
            return Err(SizeError::OddHeads { dim, heads, remedy });
        }
        Ok(())
    }

    /// Checks that each byte is a token, as in a model that reads text as bytes.
    ///
    /// # Errors
    /// There are fewer tokens.
    pub fn check_bytes(&self) -> Result<(), SizeError> {
        match self.vocab {
            BYTES..=MAX_VOCABULARY => Ok(()),
            vocab => Err(SizeError::Vocabulary { vocab }),
        }
    }

    /// Checks that there are not too many parameters to train.
    ///
    /// # Errors
    /// There are.
    pub fn check_parameters(&self) -> Result<(), SizeError> {
        let (dim, layers, parameters) = (self.dim, self.layers, self.parameters());
        match parameters > MAX_PARAMETERS {
            true => Err(SizeError::Parameters {
                dim,
                layers,
                parameters,
            }),
            false => Ok(()),
        }
    }

    /// Checks every linear layer against what `recipe`, called `name`, can block; those that are `kept` in bf16 take any shape.
    ///
    /// # Errors
    /// A layer that does not fit, with a width that would.
    pub fn check_recipe(
        &self,
        name: &str,
        recipe: Variant,
        kept: &[String],
    ) -> Result<(), SizeError> {
        let model = *self;
        let shape = |linear: &LinearSpec| Shape::new(linear.rows, linear.cols);
        let recipe_of = |linear: &LinearSpec| match kept.contains(&linear.name) {
            true => recipe.in_bf16(),
            false => recipe.of_block(linear.block, model.layers),
        };
        let linears = model.linears();
        for linear in &linears {
            let Err(error) = check_layer(&recipe_of(linear), shape(linear)) else {
                continue;
            };
            // Each layer of a block in each recipe that it has in one.
            let in_block = linears.len() / model.layers;
            let mut kinds: Vec<(Variant, usize)> = Vec::new();
            for (at, linear) in linears.iter().enumerate() {
                let kind = (recipe_of(linear), at % in_block);
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
                |dim| format!("choose `dim` {dim}, or another recipe"),
            );
            return Err(SizeError::Layer {
                dim: model.dim,
                cause: layer_error(&linear.name, shape(linear), name, &error),
                remedy,
            });
        }
        Ok(())
    }
}

/// The next width that the heads of `model` divide, and the next smaller number of heads for its width, where every recipe can block them.
fn other_heads(model: GptConfig) -> String {
    let GptConfig { dim, heads, .. } = model;
    // Rotary positions turn pairs.
    let each = match model.arch {
        Arch::Gpt => 1,
        Arch::Llama(_) => 2,
    };
    let fits = |fewer: usize| {
        let kv_heads = match model.arch {
            // As many as heads, unless it is given.
            Arch::Llama(Llama { kv_heads, .. }) if kv_heads != heads => kv_heads,
            _ => fewer,
        };
        dim.is_multiple_of(each * fewer) && fewer.is_multiple_of(kv_heads)
    };
    let wider = dim.next_multiple_of(lcm(each * heads, BLOCK));
    let wider = (wider <= MAX_DIM).then(|| format!("`dim` {wider}"));
    let blocks = dim.is_multiple_of(BLOCK);
    let fewer = (1..heads).rev().find(|&fewer| blocks && fits(fewer));
    let fewer = fewer.map(|fewer| format!("`heads` {fewer}"));
    let choices: Vec<String> = wider.into_iter().chain(fewer).collect();
    match choices.is_empty() {
        true => "choose fewer heads".to_owned(),
        false => format!("choose {}", choices.join(" or ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_format::{AnyRecipe, Recipe};

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
            for arch in [Arch::Gpt, Arch::Llama(Llama::new(heads))] {
                let model = GptConfig {
                    dim,
                    heads,
                    arch,
                    layers: 1,
                    ..GptConfig::default()
                };
                let error = model.check().expect_err("odd").to_string();
                let number = |option: &str| -> Option<usize> {
                    let rest = error.split(&format!("{option} ")).last()?;
                    rest.split(|c: char| !c.is_ascii_digit())
                        .next()?
                        .parse()
                        .ok()
                };
                let wide = GptConfig {
                    dim: number("`dim`").expect("a width"),
                    ..model
                };
                assert!(wide.dim > dim && wide.check().is_ok(), "{error}");
                for recipe in AnyRecipe::all() {
                    let fits = wide.check_recipe(recipe.name(), recipe.into(), &[]);
                    assert!(fits.is_ok(), "{recipe:?}: {error}");
                }
                // After the number of heads that was given.
                let Some(fewer) = error.rsplit_once("or `heads` ") else {
                    assert!(!dim.is_multiple_of(32), "{error}");
                    continue;
                };
                let fewer = GptConfig {
                    heads: fewer.1.parse().expect("heads"),
                    arch: match arch {
                        Arch::Gpt => arch,
                        Arch::Llama(_) => Arch::Llama(Llama::new(fewer.1.parse().expect("heads"))),
                    },
                    ..model
                };
                assert!(fewer.heads < heads && fewer.check().is_ok(), "{error}");
            }
        }
    }

    /// The number of heads of keys and values that was given stays, and divides the heads that are advised.
    #[test]
    fn heads_that_are_advised_fit_the_heads_of_keys() {
        let model = |heads| GptConfig {
            dim: 96,
            heads,
            arch: Arch::Llama(Llama::new(8)),
            layers: 1,
            ..GptConfig::default()
        };
        let error = model(40).check().expect_err("40 heads of 96").to_string();
        assert!(error.ends_with("or `heads` 24"), "{error}");
        assert!(model(24).check().is_ok());
        // These would be heads of odd length.
        assert!(model(32).check().is_err());
    }

    /// Also where few numbers of heads divide the width: the nearest one may be far.
    #[test]
    fn advice_takes_no_time() {
        for arch in [Arch::Gpt, Arch::Llama(Llama::new(16_383))] {
            let model = GptConfig {
                dim: 16_384,
                heads: 16_383,
                arch,
                layers: 1,
                ..GptConfig::default()
            };
            let error = model.check().expect_err("16383 heads").to_string();
            assert!(error.ends_with("choose `heads` 8192"), "{error}");
        }
    }
}
