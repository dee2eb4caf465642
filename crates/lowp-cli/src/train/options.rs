//! The options of `lowp train` that set the fields of lowp-train, for messages of its errors.

use crate::usage::UsageError;
use anyhow::anyhow;
use lowp_candle::transformer::NoMemory;
use lowp_train::TrainError;
use lowp_transformer::SizeError;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::CommandFactory;
    use lowp_train::Config;
    use lowp_transformer::GptConfig;

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
        let config = serde_json::to_value(Config::new(GptConfig::default())).expect("JSON");
        for field in config.as_object().expect("fields").keys() {
            let option = named(&format!("`{field}`"));
            assert!(option.starts_with("--"), "{option}");
        }
    }
}
