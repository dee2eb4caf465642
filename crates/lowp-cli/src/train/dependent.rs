//! Options that mean something only beside some values of another option: elsewhere they are an error on a command line, and left out of a file
//! of `--config`.

use super::data::DataArg;
use crate::usage::UsageError;
use lowp_train::{Optimizer, Tokens};

/// What such an option depends on.
pub(super) struct Dependence {
    pub(super) other: &'static str,
    /// Whether the option means something beside this value of the other.
    pub(super) applies: fn(&str) -> bool,
    /// The end of an error that begins with the option; VALUE is that of the other.
    why: &'static str,
}

pub(super) fn dependence(option: &str) -> Option<Dependence> {
    let (other, applies, why): (_, fn(&str) -> bool, _) = match option {
        "--beta2" => (
            "--optimizer",
            |name| optimizer(name).is_none_or(Optimizer::has_beta2),
            "has no meaning with --optimizer VALUE; leave it out",
        ),
        "--var-lr" => (
            "--optimizer",
            |name| optimizer(name).is_none_or(|found| found.rule().is_of_matrices()),
            "has no meaning with --optimizer VALUE; leave it out",
        ),
        "--decay-steps" => (
            "--schedule",
            |name| name == "wsd",
            "only applies to --schedule wsd; add it, or leave the option out",
        ),
        "--kv-heads" => (
            "--arch",
            |name| name != "gpt",
            "has no effect with --arch gpt; add --arch llama, or leave it out",
        ),
        "--held-out" | "--mask-documents" => (
            "--data",
            |text| {
                text.parse()
                    .is_ok_and(|DataArg { path, .. }| Tokens::are_at(&path))
            },
            "only applies to tokens, and this data is text; leave it out",
        ),
        "--reshard-after-forward" => (
            "--sharding",
            |name| name != "zero1",
            "has no effect with --sharding zero1, where every rank has the full weights; leave it out",
        ),
        "--profile"
        | "--no-cudnn"
        | "--nondeterministic-attention"
        | "--agree-amaxes"
        | "--no-prefetch"
        | "--offload-optimizer" => (
            "--device",
            |name| name != "cpu",
            "only applies to GPUs: add --device cuda, or leave it out",
        ),
        _ => return None,
    };
    Some(Dependence {
        other,
        applies,
        why,
    })
}

/// The optimizer of this name.
pub(super) fn optimizer(name: &str) -> Option<Optimizer> {
    Optimizer::ALL
        .into_iter()
        .find(|found| found.name() == name)
}

/// Checks that the option `given`, which may have its value, means something beside `value` of the option that it depends on.
pub(super) fn check(given: &str, value: &str) -> Result<(), UsageError> {
    match dependence(given.split(' ').next().unwrap_or(given)) {
        Some(Dependence { applies, why, .. }) if !applies(value) => {
            let why = why.replace("VALUE", value);
            Err(UsageError::new(format!("{given} {why}")))
        }
        _ => Ok(()),
    }
}
