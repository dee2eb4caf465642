//! The options of `lowp train` that set the fields of lowp-train, for messages of its errors.

use super::args::Args;
use crate::usage::UsageError;
use anyhow::anyhow;
use clap::Args as _;
use lowp_candle::transformer::NoMemory;
use lowp_train::TrainError;
use lowp_transformer::SizeError;

/// Fields whose options have other names.
const OTHERS: [(&str, &str); 5] = [
    ("kept_in_bf16", "--keep-bf16"),
    ("amax_groups", "--amax-group"),
    ("tail_steps", "--precision-tail (in steps)"),
    ("newest_whole", "--resume latest"),
    ("mesh", "--world-size or --mesh"),
];

/// `text`, whose fields stand in backticks, with options in their place.
pub(crate) fn named(text: &str) -> String {
    let mut text = text.to_owned();
    for (field, option) in OTHERS {
        text = text.replace(&format!("`{field}`"), option);
    }
    let command = Args::augment_args(clap::Command::new("train"));
    for long in command.get_arguments().filter_map(|arg| arg.get_long()) {
        text = text.replace(
            &format!("`{}`", long.replace('-', "_")),
            &format!("--{long}"),
        );
    }
    text
}

/// The error of a run, or of what it was asked for.
pub(crate) fn failed(error: TrainError) -> anyhow::Error {
    match error.is_input() {
        true => UsageError::from(error).into(),
        false => anyhow!(named(&error.chain())),
    }
}

macro_rules! usage_errors {
    ($($error:ty),*) => {
        $(impl From<$error> for UsageError {
            fn from(error: $error) -> Self {
                Self::new(named(&error.to_string()))
            }
        })*
    };
}

usage_errors!(TrainError, SizeError, NoMemory);

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_train::Config;
    use lowp_transformer::GptConfig;

    /// Each field of a configuration and of checkpoints has options that there are.
    #[test]
    fn fields_have_options() {
        let command = Args::augment_args(clap::Command::new("train"));
        let known: Vec<_> = command
            .get_arguments()
            .filter_map(|a| a.get_long())
            .collect();
        let config = serde_json::to_value(Config::new(GptConfig::default())).expect("JSON");
        let others = [
            "kv_heads",
            "data",
            "save",
            "save_every",
            "keep",
            "resume",
            "stop_after",
            "newest_whole",
        ];
        let fields = config
            .as_object()
            .expect("fields")
            .keys()
            .map(String::as_str);
        for field in fields.chain(others) {
            let option = named(&format!("`{field}`"));
            let mut words = option.split(' ').filter_map(|word| word.strip_prefix("--"));
            assert!(option.starts_with("--"), "{option}");
            assert!(words.all(|word| known.contains(&word)), "{option}");
        }
    }
}
