//! `lowp plan`: what one weight or a whole model costs, from the specs and plans that training runs.

mod args;
mod json;
mod model;
mod weight;

pub(crate) use args::Args;

use crate::output;
use crate::usage::UsageError;
use anyhow::Result;
use args::Weight;
use lowp_format::AnyRecipe;
use lowp_format::spelling::Variant;

/// The recipe that is asked for.
enum Asked {
    Plain(AnyRecipe),
    Modified(Variant),
}

/// Runs the command.
pub(crate) fn main(args: &Args) -> Result<()> {
    let recipe = recipe(args)?;
    let text = match (args.shape, args.world_size) {
        (Some(shape), Some(world)) => {
            if let Some(option) = args.sizes.given().next() {
                return Err(UsageError::new(format!(
                    "{option} is a size of a model; leave it out, or give --model PRESET in place of --shape"
                ))
                .into());
            }
            let weight = Weight {
                recipe: &args.recipe,
                shape,
                world,
                usage: args.usage,
                reshard: args.sharded.reshard_after_forward,
            };
            match recipe {
                Asked::Plain(recipe) => weight::plan(&recipe, weight, args.json)?,
                Asked::Modified(variant) => weight::plan(&variant, weight, args.json)?,
            }
        }
        _ => model::plan(
            args,
            match recipe {
                Asked::Plain(recipe) => recipe.into(),
                Asked::Modified(variant) => variant,
            },
        )?,
    };
    output::print(&text)
}

fn recipe(args: &Args) -> Result<Asked> {
    if args.recipe.contains('+') {
        args.options.reject_beside_modifiers()?;
        let variant = args.recipe.parse().map_err(UsageError::from)?;
        return Ok(Asked::Modified(variant));
    }
    let recipe = args.options.recipe(&args.recipe, &[]);
    let recipe = recipe.map_err(|e| match args.options.message(&args.recipe, &e) {
        Some(message) => UsageError::new(message),
        None => e.into(),
    })?;
    Ok(Asked::Plain(recipe))
}
