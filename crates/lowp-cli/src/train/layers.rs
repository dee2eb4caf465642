//! The layers and matrices of a model that options name by patterns.

use crate::usage::{AMAX_GROUP, UsageError, of_patterns};
use lowp_file::patterns::{self, are_patterns, weight_of};
use lowp_format::has_tensor_scale;
use lowp_fsdp::LinearSpec;
use lowp_train::{Model, Run};
use lowp_transformer::GptConfig;

/// The linear layers of `model` whose names match one of the patterns.
pub(super) fn kept_in_bf16(keep: &[String], model: GptConfig) -> Result<Vec<String>, UsageError> {
    let linears = model.linears();
    let names = weights_of(&linears);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let kept = patterns::matching(keep, &names, || {
        format!("no linear layer; {}", layers_are(&linears))
    });
    let kept = kept.map_err(of_patterns("--keep-bf16"))?;
    let kept = linears.into_iter().zip(kept).filter(|(_, kept)| *kept);
    Ok(kept.map(|(linear, _)| linear.name).collect())
}

/// The matrices that stay in f32 and do not decay.
pub(super) fn no_decay(
    asked: &[String],
    model: GptConfig,
    is_of_folder: bool,
) -> Result<Vec<String>, UsageError> {
    let vars = model.vars().into_iter().filter(|var| var.decay);
    let names: Vec<String> = vars.map(|var| var.name).collect();
    let embedding = ["*embed_tokens*".to_owned()];
    let asked = match asked.is_empty() && is_of_folder {
        true => &embedding,
        false => asked,
    };
    let shown: Vec<&str> = names.iter().map(String::as_str).collect();
    let matching = patterns::matching(asked, &shown, || {
        format!("no matrix that stays in f32; they are {}", shown.join(", "))
    });
    let matching = matching.map_err(of_patterns("--no-decay"))?;
    let matched = names.iter().zip(matching).filter(|(_, matches)| *matches);
    Ok(matched.map(|(name, _)| name.clone()).collect())
}

/// The linear layers of `model` that have one amax, by name.
pub(super) fn amax_groups(
    asked: &[String],
    model: GptConfig,
    runs: &[Run],
    kept: &[String],
) -> Result<Vec<Vec<String>>, UsageError> {
    let mut linears = model.linears();
    linears.retain(|linear| !kept.contains(&linear.name));
    // Those that engines run as one are the same for every recipe; patterns are of layers that have an amax.
    if are_patterns(asked) {
        if !runs.iter().any(|run| has_tensor_scale(&run.recipe)) {
            let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
            return Err(UsageError::new(format!(
                "--amax-group: no scale of {} depends on the amax of a whole tensor; leave the option out",
                names.join(" or ")
            )));
        }
        linears.retain(|linear| {
            let own = |run: &Run| run.recipe.of_block(linear.block, model.layers);
            runs.iter().any(|run| has_tensor_scale(&own(run)))
        });
        if linears.is_empty() {
            return Err(UsageError::new(
                "--amax-group: no linear layer has an amax, since --keep-bf16 or +bf16-ends keeps them all in bf16; leave one of the options out"
                    .to_owned(),
            ));
        }
    }
    let names = weights_of(&linears);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let groups = patterns::amax_groups(asked, &names, || layers_are(&linears));
    let groups = groups.map_err(of_patterns(AMAX_GROUP))?;
    let named = |group: Vec<usize>| {
        let members = group.iter().map(|&member| linears[member].name.clone());
        members.collect()
    };
    Ok(groups.into_iter().map(named).collect())
}

/// The names of their weights, which patterns match.
fn weights_of(linears: &[LinearSpec]) -> Vec<String> {
    let names = linears.iter().map(|linear| weight_of(&linear.name));
    names.collect()
}

/// The names of these linear layers, for who gave others.
fn layers_are(linears: &[LinearSpec]) -> String {
    let [first, last] = [linears.first(), linears.last()].map(|end| end.map_or(0, |end| end.block));
    let names = linears.iter().filter(|linear| linear.block == first);
    let names: Vec<&str> = names.map(|linear| linear.name.as_str()).collect();
    format!("they are {}, in blocks {first} to {last}", names.join(", "))
}
