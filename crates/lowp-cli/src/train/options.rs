//! The options of `lowp train` behind the fields of lowp-train: in messages of errors, and in what ranks must have been given alike.

use super::args::Args;
use super::config::Setup;
use crate::device::Device;
use crate::usage::UsageError;
use anyhow::anyhow;
use lowp_candle::transformer::NoMemory;
use lowp_train::{Checkpoints, TrainError};
use lowp_transformer::SizeError;
use serde_json::{Map, Value};

/// Fields of configurations and checkpoints, and the options that set them.
const OPTIONS: [(&str, &str); 32] = [
    ("dim", "--dim"),
    ("layers", "--layers"),
    ("heads", "--heads"),
    ("seq", "--seq"),
    ("vocab", "--vocab"),
    ("arch", "--arch"),
    ("kv_heads", "--kv-heads"),
    ("batch", "--batch"),
    ("accumulate", "--accumulate"),
    ("recompute", "--recompute"),
    ("kept_in_bf16", "--keep-bf16"),
    ("amax_groups", "--amax-group"),
    ("tail_steps", "--precision-tail of steps"),
    ("steps", "--steps"),
    ("seed", "--seed"),
    ("seeds", "--seeds"),
    ("mesh", "--world-size or --mesh"),
    ("sharding", "--sharding"),
    ("reshard_after_forward", "--reshard-after-forward"),
    ("grad_wire", "--grad-wire"),
    ("lr", "--lr"),
    ("warmup", "--warmup"),
    ("final_lr", "--final-lr"),
    ("weight_decay", "--weight-decay"),
    ("clip", "--clip"),
    ("eval_batches", "--eval-batches"),
    ("data", "--data"),
    ("save", "--save"),
    ("save_every", "--save-every"),
    ("keep", "--keep"),
    ("resume", "--resume"),
    ("stop_after", "--stop-after"),
];

/// `text`, whose fields stand in backticks, with options in their place.
pub(crate) fn named(text: &str) -> String {
    let put =
        |text: String, (field, option): &(&str, &str)| text.replace(&format!("`{field}`"), option);
    OPTIONS.iter().fold(text.to_owned(), put)
}

/// The error of a run, or of what it was asked for.
pub(crate) fn failed(error: TrainError) -> anyhow::Error {
    match error.is_input() {
        true => UsageError::from(error).into(),
        false => anyhow!(named(&error.chain())),
    }
}

impl From<TrainError> for UsageError {
    fn from(error: TrainError) -> Self {
        Self::new(named(&error.to_string()))
    }
}

impl From<SizeError> for UsageError {
    fn from(error: SizeError) -> Self {
        Self::new(named(&error.to_string()))
    }
}

impl From<NoMemory> for UsageError {
    fn from(error: NoMemory) -> Self {
        Self::new(named(&error.to_string()))
    }
}

/// Checks that options of GPUs are given where there are some.
///
/// # Errors
/// A [`UsageError`] with the option.
pub(crate) fn check_device(args: &Args) -> Result<(), UsageError> {
    let of_gpus = [
        ("--profile", args.profile),
        ("--no-cudnn", args.no_cudnn),
        ("--agree-amaxes", args.agree_amaxes),
        ("--no-prefetch", args.no_prefetch),
    ];
    match (of_gpus.iter().find(|(_, given)| *given), args.device) {
        (Some((option, _)), Device::Cpu) => Err(UsageError::new(format!(
            "{option} is of GPUs: add --device cuda, or leave it out"
        ))),
        _ => Ok(()),
    }
}

/// What ranks must have been started with alike: options, and their values as text.
///
/// # Errors
/// A value that has no JSON form.
pub(crate) fn alike(args: &Args, setup: &Setup) -> Result<Vec<(String, String)>, UsageError> {
    let told = |error: serde_json::Error| UsageError::new(error.to_string());
    let text = serde_json::to_string(&setup.config).map_err(told)?;
    let record: Map<String, Value> = serde_json::from_str(&text).map_err(told)?;
    let field = |(field, value): (&String, &Value)| {
        let option = named(&format!("`{field}`"));
        (option, value.to_string())
    };
    let mut options: Vec<(String, String)> = record.iter().map(field).collect();
    let runs: Vec<&str> = setup.runs.iter().map(|run| run.name.as_str()).collect();
    let Checkpoints {
        save,
        save_every,
        keep,
        resume,
        stop_after,
    } = &setup.checkpoints;
    let number = |number: &Option<usize>| number.map(|number| number.to_string());
    let [save, resume] = [save, resume].map(|path| {
        let path = path.as_ref();
        path.map(|path| path.display().to_string())
    });
    let flag = |given: bool| given.then(|| "given".to_owned());
    let others = [
        ("--device", Some(args.device.kind().to_owned())),
        ("--no-audit", flag(args.no_audit)),
        ("--no-cudnn", flag(args.no_cudnn)),
        ("--agree-amaxes", flag(args.agree_amaxes)),
        ("--no-prefetch", flag(args.no_prefetch)),
        ("--recipe or --compare", Some(runs.join(","))),
        ("--save", save),
        ("--save-every", number(save_every)),
        ("--keep", number(keep)),
        ("--resume", resume),
        ("--stop-after", number(stop_after)),
    ];
    let text = |text: Option<String>| text.unwrap_or_else(|| "left out".to_owned());
    options.extend(others.map(|(option, value)| (option.to_owned(), text(value))));
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cli, Command};
    use clap::{CommandFactory, Parser};

    /// Each field has an option that there is, and each field of a configuration is here.
    #[test]
    fn fields_have_options() {
        let command = Cli::command();
        let train = command.find_subcommand("train").expect("train");
        let known: Vec<_> = train.get_arguments().filter_map(|a| a.get_long()).collect();
        for (field, option) in OPTIONS {
            let mut words = option.split(' ').filter_map(|word| word.strip_prefix("--"));
            assert!(words.all(|word| known.contains(&word)), "{field}");
        }
        let cli = Cli::try_parse_from(["lowp", "train"]).expect("a command line");
        let Command::Train(args) = cli.command else {
            panic!("another command")
        };
        let setup = Setup::new(&args, None).expect("a setup");
        for (option, _) in alike(&args, &setup).expect("options") {
            assert!(option.starts_with("--"), "{option}");
        }
    }
}
