//! Options that mean something only beside some values of another option: elsewhere they are an error on a command line, and left out of a file
//! of `--config`.

use super::data::DataArg;
use crate::usage::UsageError;
use lowp_file::patterns::are_patterns;
use lowp_format::has_tensor_scale;
use lowp_format::spelling::Variant;
use lowp_optim::StateDtypes;
use lowp_train::{Optimizer, Tokens};

/// What of an option's value means something beside a value of another option: all, a part of a list, or nothing.
type Kept = fn(&str, &str) -> Option<String>;

/// What such an option depends on.
pub(super) struct Dependence {
    /// The first of these that is given counts.
    pub(super) others: &'static [&'static str],
    pub(super) kept: Kept,
    /// The end of an error that begins with the option; VALUE is that of the other. Where it is empty, another check has its own error.
    why: &'static str,
}

pub(super) fn dependence(option: &str) -> Option<Dependence> {
    let (others, kept, why): (&[&str], Kept, _) = match option {
        "--beta2" => (
            &["--optimizer"],
            |own, name| all_if(own, optimizer(name).is_none_or(Optimizer::has_beta2)),
            "has no meaning with --optimizer VALUE; leave it out",
        ),
        "--var-lr" => (
            &["--optimizer"],
            |own, name| {
                all_if(
                    own,
                    optimizer(name).is_none_or(|found| found.rule().is_of_matrices()),
                )
            },
            "has no meaning with --optimizer VALUE; leave it out",
        ),
        "--optimizer-state" => (&["--optimizer"], kept_states, ""),
        "--amax-group" => (&["--recipe", "--compare"], kept_groups, ""),
        "--save-every" | "--stop-after" | "--eval-every" | "--log-codes" => (
            &["--steps"],
            |own, steps| {
                let [own_steps, steps] = [own, steps].map(str::parse::<usize>);
                all_if(own, steps.is_err() || own_steps.ok() <= steps.ok())
            },
            "",
        ),
        "--decay-steps" => (
            &["--schedule"],
            |own, name| all_if(own, name == "wsd"),
            "only applies to --schedule wsd; add it, or leave the option out",
        ),
        "--kv-heads" => (
            &["--arch"],
            |own, name| all_if(own, name != "gpt"),
            "has no effect with --arch gpt; add --arch llama, or leave it out",
        ),
        "--held-out" | "--mask-documents" => (
            &["--data"],
            |own, text| {
                all_if(
                    own,
                    text.parse()
                        .is_ok_and(|data: DataArg| Tokens::are_at(&data.path)),
                )
            },
            "only applies to tokens, and this data is text; leave it out",
        ),
        "--reshard-after-forward" => (
            &["--sharding"],
            |own, name| all_if(own, name != "zero1"),
            "has no effect with --sharding zero1, where every rank has the full weights; leave it out",
        ),
        "--profile"
        | "--no-cudnn"
        | "--nondeterministic-attention"
        | "--agree-amaxes"
        | "--no-prefetch"
        | "--offload-optimizer" => (
            &["--device"],
            |own, name| all_if(own, name != "cpu"),
            "only applies to GPUs: add --device cuda, or leave it out",
        ),
        _ => return None,
    };
    Some(Dependence { others, kept, why })
}

fn all_if(own: &str, applies: bool) -> Option<String> {
    applies.then(|| own.to_owned())
}

/// The dtypes of states that the optimizer of this name has.
fn kept_states(own: &str, name: &str) -> Option<String> {
    let (Ok(all), Some(optimizer)) = (own.parse::<StateDtypes>(), optimizer(name)) else {
        return all_if(own, true);
    };
    match all.kept_by(optimizer.var_rule()) {
        kept if kept == all => all_if(own, true),
        kept => (kept != StateDtypes::default()).then(|| kept.to_string()),
    }
}

/// Patterns are of recipes with an amax of the whole tensor.
fn kept_groups(own: &str, recipes: &str) -> Option<String> {
    let lacks = |name: &str| {
        name.parse()
            .is_ok_and(|own: Variant| !has_tensor_scale(&own))
    };
    let patterns = !own.is_empty() && are_patterns(&[own.to_owned()]);
    all_if(own, !(patterns && recipes.split(',').all(lacks)))
}

/// The optimizer of this name.
fn optimizer(name: &str) -> Option<Optimizer> {
    Optimizer::ALL
        .into_iter()
        .find(|found| found.name() == name)
}

/// Checks that the option `given`, which may have its value, means something beside `value` of the option that it depends on.
pub(super) fn check(given: &str, value: &str) -> Result<(), UsageError> {
    let (option, own) = given.split_once(' ').unwrap_or((given, ""));
    match dependence(option) {
        Some(Dependence { kept, why, .. }) if kept(own, value).is_none() => {
            let why = why.replace("VALUE", value);
            Err(UsageError::new(format!("{given} {why}")))
        }
        _ => Ok(()),
    }
}
