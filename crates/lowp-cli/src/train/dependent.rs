//! Options that mean something only beside some values of another option: elsewhere they are an error on a command line, and left out of a file
//! of `--config`.

use super::data::DataArg;
use crate::usage::UsageError;
use lowp_file::patterns::are_patterns;
use lowp_format::has_tensor_scale;
use lowp_format::spelling::Variant;
use lowp_optim::StateDtypes;
use lowp_train::{Optimizer, Tokens};

/// Whether an option's value means something beside a value of another option.
type Applies = fn(&str, &str) -> bool;

/// What such an option depends on.
pub(super) struct Dependence {
    /// The first of these that is given counts.
    pub(super) others: &'static [&'static str],
    applies: Applies,
    /// Of an option whose value is a list: what of it means something.
    part: Option<fn(&str, &str) -> Option<String>>,
    /// The end of an error that begins with the option; VALUE is that of the other. Where it is empty, another check has its own error.
    why: &'static str,
}

impl Dependence {
    /// What of `own` means something beside `value`.
    pub(super) fn kept(&self, own: &str, value: &str) -> Option<String> {
        match self.part {
            Some(part) => part(own, value),
            None => (self.applies)(own, value).then(|| own.to_owned()),
        }
    }
}

pub(super) fn dependence(option: &str) -> Option<Dependence> {
    const OF_OPTIMIZERS: &str = "has no meaning with --optimizer VALUE; leave it out";
    let (others, applies, why): (&[&str], Applies, _) = match option {
        "--beta2" => (
            &["--optimizer"],
            |_, name| optimizer(name).is_none_or(Optimizer::has_beta2),
            OF_OPTIMIZERS,
        ),
        "--var-lr" => (
            &["--optimizer"],
            |_, name| optimizer(name).is_none_or(|found| found.rule().is_of_matrices()),
            OF_OPTIMIZERS,
        ),
        "--optimizer-state" => (&["--optimizer"], |_, _| true, ""),
        "--amax-group" => (&["--recipe", "--compare"], groups_apply, ""),
        "--save-every" | "--stop-after" | "--eval-every" | "--log-codes" => {
            (&["--steps"], is_within, "")
        }
        "--decay-steps" => (
            &["--schedule"],
            |_, name| name == "wsd",
            "only applies to --schedule wsd; add it, or leave the option out",
        ),
        "--kv-heads" => (
            &["--arch"],
            |_, name| name != "gpt",
            "has no effect with --arch gpt; add --arch llama, or leave it out",
        ),
        "--held-out" | "--mask-documents" => (
            &["--data"],
            |_, text| (text.parse()).is_ok_and(|data: DataArg| Tokens::are_at(&data.path)),
            "only applies to tokens, and this data is text; leave it out",
        ),
        "--reshard-after-forward" => (
            &["--sharding"],
            |_, name| name != "zero1",
            "has no effect with --sharding zero1, where every rank has the full weights; leave it out",
        ),
        "--profile"
        | "--no-cudnn"
        | "--nondeterministic-attention"
        | "--agree-amaxes"
        | "--no-prefetch"
        | "--offload-optimizer" => (
            &["--device"],
            |_, name| name != "cpu",
            "only applies to GPUs: add --device cuda, or leave it out",
        ),
        _ => return None,
    };
    let part = (option == "--optimizer-state").then_some(kept_states as _);
    Some(Dependence {
        others,
        applies,
        part,
        why,
    })
}

/// The dtypes of states that the optimizer of this name has.
fn kept_states(own: &str, name: &str) -> Option<String> {
    let (Ok(all), Some(optimizer)) = (own.parse::<StateDtypes>(), optimizer(name)) else {
        return Some(own.to_owned());
    };
    match all.kept_by(optimizer.var_rule()) {
        kept if kept == all => Some(own.to_owned()),
        kept => (kept != StateDtypes::default()).then(|| kept.to_string()),
    }
}

/// Steps of a run: numbers that others check, and those up to the last.
fn is_within(own: &str, steps: &str) -> bool {
    let [own, steps] = [own, steps].map(str::parse::<usize>);
    steps.is_err() || own.ok() <= steps.ok()
}

/// Patterns are of recipes with an amax of the whole tensor.
fn groups_apply(own: &str, recipes: &str) -> bool {
    let lacks = |name: &str| (name.parse()).is_ok_and(|own: Variant| !has_tensor_scale(&own));
    let patterns = !own.is_empty() && are_patterns(&[own.to_owned()]);
    !(patterns && recipes.split(',').all(lacks))
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
        Some(of) if of.kept(own, value).is_none() => {
            let why = of.why.replace("VALUE", value);
            Err(UsageError::new(format!("{given} {why}")))
        }
        _ => Ok(()),
    }
}
