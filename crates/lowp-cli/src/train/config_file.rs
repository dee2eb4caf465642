//! `--config`: options from a TOML file, in the place of arguments.

use super::args::Args;
use super::data::DataArg;
use super::dependent::dependence;
use crate::files::read_regular;
use crate::output::{self, shown};
use crate::usage::UsageError;
use clap::{Arg, ArgAction, Args as _, Command};
use lowp_comm::Launch;
use std::any::TypeId;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::slice;
use std::time::Duration;
use toml::{Table, Value};

/// Longest file that is read.
const MAX_BYTES: u64 = 1 << 20;

/// Arguments, and those of them that a file gave.
#[derive(Debug, Default)]
pub(crate) struct Expanded {
    pub(crate) args: Vec<OsString>,
    file: String,
    /// Options of the file.
    added: Vec<String>,
}

impl Expanded {
    /// What to know of an error: which of the options that it names come from the file.
    pub(crate) fn origin(&self, error: &str) -> Option<String> {
        let is_named = |option: &&str| {
            let mut words = error.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
            words.any(|word| word == *option)
        };
        let added = self.added.iter().map(String::as_str);
        let named: Vec<&str> = added.filter(is_named).collect();
        (!named.is_empty()).then(|| format!("from {}: {}", shown(&self.file), named.join(", ")))
    }

    /// The options of the file, where an error may be of one that it does not name.
    pub(crate) fn options(&self) -> Option<String> {
        let options = self.added.join(", ");
        (!options.is_empty()).then(|| format!("options of {}: {options}", shown(&self.file)))
    }
}

/// The arguments of `lowp train` with the options of the file that `--config` names; those of other commands as they are.
pub(crate) fn expand(args: Vec<OsString>) -> Result<Expanded, UsageError> {
    let is_train = args.get(1).is_some_and(|command| command == "train");
    let asks_help = args.iter().any(|arg| arg == "--help" || arg == "-h");
    let file = (is_train && !asks_help).then(|| value_of(&args, "--config"));
    let Some(file) = file.flatten() else {
        return Ok(Expanded {
            args,
            ..Expanded::default()
        });
    };
    let text = read_regular(Path::new(&file), MAX_BYTES);
    let text = text.map_err(|e| UsageError::new(format!("--config {}: {e}", shown(&file))))?;
    let wrong = |why: String| UsageError::new(format!("--config {}: {why}", shown(&file)));
    let text = String::from_utf8(text).map_err(|error| wrong(error.to_string()))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start));
        let line = before.map_or(1, |before| before.matches('\n').count() + 1);
        wrong(format!("line {line}: {}", error.message()))
    })?;
    let mut all = args;
    let (added, moot) = options(&file, &table, &all)?;
    // One rank speaks for all.
    let launch = Launch::from_env(Duration::ZERO, "");
    if launch.is_ok_and(|launch| launch.is_none_or(|launch| launch.rank == 0)) {
        for line in moot {
            output::note(&format!("--config {}: {line}", shown(&file)));
        }
    }
    let name = |arg: &OsString| {
        let arg = arg.to_string_lossy();
        arg.split('=').next().unwrap_or_default().to_owned()
    };
    let mut names: Vec<String> = added.iter().map(name).collect();
    names.dedup();
    all.splice(2..2, added);
    Ok(Expanded {
        args: all,
        file,
        added: names,
    })
}

/// What follows `option`.
fn value_of(args: &[OsString], option: &str) -> Option<String> {
    let mut rest = args.iter().map(|arg| arg.to_string_lossy());
    let with = format!("{option}=");
    while let Some(arg) = rest.next() {
        if arg == option {
            return rest.next().map(|value| value.into_owned());
        }
        if let Some(value) = arg.strip_prefix(&with) {
            return Some(value.to_owned());
        }
    }
    None
}

/// The options of `table` but those that are among `given`, or conflict with one that is; and of those that mean nothing next to one
/// that is, what to say.
fn options(
    file: &str,
    table: &Table,
    words: &[OsString],
) -> Result<(Vec<OsString>, Vec<String>), UsageError> {
    let mut command = Args::augment_args(Command::new("train").disable_help_flag(true));
    command.build();
    let given: Vec<&Arg> = command
        .get_arguments()
        .filter(|arg| words.iter().any(|word| names(arg, word)))
        .collect();
    let wrong = |key: &str, why: &str| {
        UsageError::new(format!("--config {}: {} {why}", shown(file), shown(key)))
    };
    let (mut all, mut moot) = (Vec::new(), Vec::new());
    for (key, value) in table {
        let long = key.replace('_', "-");
        let known = command
            .get_arguments()
            .find(|arg| arg.get_long() == Some(long.as_str()) && long != "config");
        let arg = known.ok_or_else(|| {
            wrong(
                key,
                "is no option of lowp train; keys are the names of options without --",
            )
        })?;
        let is_given = given.iter().any(|given| given.get_id() == arg.get_id());
        let takes_none = matches!(arg.get_action(), ArgAction::SetTrue);
        let may_take_none = arg.get_num_args().is_some_and(|n| n.min_values() == 0);
        if is_given || ((takes_none || may_take_none) && *value == Value::Boolean(false)) {
            continue;
        }
        let option = format!("--{long}");
        let excluded = || {
            let other = given.iter().find(|given| conflict(&command, given, arg))?;
            Some((format!("--{}", other.get_long()?), None))
        };
        if let Some((next_to, kept)) = excluded().or_else(|| makes_moot(&option, value, words)) {
            moot.push(match &kept {
                None => format!(
                    "{} has no meaning with {next_to} and is left out",
                    shown(key)
                ),
                Some(kept) => format!("of {} only {kept} has a meaning with {next_to}", shown(key)),
            });
            all.extend(kept.map(|kept| format!("{option}={kept}").into()));
            continue;
        }
        let (takes_list, form) = match arg.get_action() {
            ArgAction::Append => (true, "must be a list of values"),
            _ => (false, "must be one value"),
        };
        let values = match value {
            Value::Boolean(true) if takes_none || may_take_none => {
                all.push(option.into());
                continue;
            }
            _ if takes_none => return Err(wrong(key, "must be true or false")),
            Value::Array(values) if takes_list => &values[..],
            value => slice::from_ref(value),
        };
        // A list repeats the option.
        for value in values {
            let text = scalar(value).ok_or_else(|| wrong(key, form))?;
            if let Some(wanted) = wanted(arg, value).filter(|_| !may_take_none) {
                return Err(wrong(key, &format!("must be {wanted}, not {text}")));
            }
            all.push(format!("{option}={text}").into());
        }
    }
    Ok((all, moot))
}

/// What `arg` takes, where that is no `value` of this type.
fn wanted(arg: &Arg, value: &Value) -> Option<&'static str> {
    let found = arg.get_value_parser().type_id();
    let takes = |types: &[TypeId]| types.iter().any(|&other| found == other);
    let is_fraction = value.as_float().is_some_and(|value| value.fract() != 0.0);
    let (what, fits) = if takes(&[TypeId::of::<PathBuf>(), TypeId::of::<DataArg>()]) {
        ("a path, or left out for none", value.is_str())
    } else if takes(&[TypeId::of::<f64>()]) {
        ("a number", !value.is_bool())
    } else if takes(&[TypeId::of::<usize>(), TypeId::of::<u64>()]) {
        ("a whole number", !value.is_bool() && !is_fraction)
    } else {
        return None;
    };
    (!fits).then_some(what)
}

/// The option of the command line `words`, with its value, next to which the key of a file that stands for `option` means nothing, or not all of
/// its `value` does; and the part that does.
fn makes_moot(option: &str, value: &Value, words: &[OsString]) -> Option<(String, Option<String>)> {
    let found = dependence(option)?;
    let mut others = found.others.iter();
    let (other, given) = others.find_map(|other| Some((other, value_of(words, other)?)))?;
    let all = value.as_array();
    let values = all.map_or(slice::from_ref(value), Vec::as_slice);
    let own: Vec<String> = values.iter().filter_map(scalar).collect();
    let own = own.join(",");
    let kept = found.kept(&own, &given);
    (kept.as_ref() != Some(&own)).then(|| (format!("{other} {given}"), kept))
}

/// Whether `word` of a command line is the option `arg`, with its value or without.
fn names(arg: &Arg, word: &OsStr) -> bool {
    let word = word.to_string_lossy();
    let Some(word) = word.strip_prefix("--") else {
        return false;
    };
    let name = word.split_once('=').map_or(word, |(name, _)| name);
    arg.get_long() == Some(name)
}

/// Whether the two cannot be given together.
fn conflict(command: &Command, one: &Arg, other: &Arg) -> bool {
    let names = |one: &Arg, other: &Arg| {
        let conflicts = command.get_arg_conflicts_with(one);
        conflicts.iter().any(|arg| arg.get_id() == other.get_id())
    };
    names(one, other) || names(other, one)
}

/// A value as an argument.
fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(text: &str, args: &[&str]) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("run.toml");
        std::fs::write(&file, text).expect("a file");
        let begin = ["lowp", "train", "--config"].map(OsString::from);
        let args = args.iter().map(OsString::from);
        let all: Vec<OsString> = begin.into_iter().chain([file.into()]).chain(args).collect();
        let all = expand(all).map_err(|error| error.to_string())?;
        let mut all: Vec<String> = all
            .args
            .into_iter()
            .filter_map(|arg| arg.into_string().ok())
            .collect();
        all.retain(|arg| arg != "--config" && !arg.ends_with("run.toml"));
        Ok(all.split_off(2))
    }

    #[test]
    fn an_error_says_which_options_are_of_the_file() {
        let expanded = Expanded {
            args: Vec::new(),
            file: "run.toml".into(),
            added: vec!["--lr".into(), "--held-out".into(), "--no-audit".into()],
        };
        let found = |error| expanded.origin(error);
        assert_eq!(
            found("--held-out only applies to `--data`, --lr").as_deref(),
            Some("from run.toml: --lr, --held-out")
        );
        assert_eq!(found("--lr-min and --no-audits are none"), None);
        assert_eq!(
            expanded.options().as_deref(),
            Some("options of run.toml: --lr, --held-out, --no-audit")
        );
        assert_eq!(Expanded::default().options(), None);
    }

    #[test]
    fn keys_are_options() {
        let text = "steps = 30\nlr = 0.0003\nrecompute = true\nno_audit = false\nkeep-bf16 = ['a*', 'b']\nreshard_after_forward = true\ncompare = []\n";
        let found = expanded(text, &["--lr", "1e-3"]).expect("options");
        let expected = [
            "--keep-bf16=a*",
            "--keep-bf16=b",
            "--recompute",
            "--reshard-after-forward=true",
            "--steps=30",
            "--lr",
            "1e-3",
        ];
        assert_eq!(found, expected);
    }

    /// An option that is given also replaces those of the file that it conflicts with.
    #[test]
    fn an_option_that_is_given_goes_before_the_file() {
        for (text, given) in [
            ("steps = 3", "--steps=4"),
            ("world_size = 2", "--world-size=3"),
            ("world_size = 2", "--mesh=1x3"),
            ("mesh = '1x2'", "--world-size=3"),
            ("steps = 3", "--tokens=4000"),
            ("tokens = 4000", "--steps=3"),
            ("recipe = 'mxfp8'", "--compare=all"),
            ("compare = 'all'", "--recipe=mxfp8"),
            ("params = '10m'", "--model=folder"),
            ("model = 'folder'", "--params=10m"),
            ("model = 'folder'\nfrom_scratch = true", "--params=10m"),
            ("dim = 64\narch = 'llama'\nkv_heads = 2", "--model=folder"),
            ("no_prefetch = false", "--device=cpu"),
        ] {
            assert_eq!(expanded(text, &[given]).expect(text), [given], "{text}");
            let (option, value) = given.split_once('=').expect("a value");
            let apart = [option, value];
            assert_eq!(expanded(text, &apart).expect(text), apart, "{text}");
        }
        // Others stay.
        let found = expanded("tokens = 4000\nworld_size = 2", &["--lr=1"]).expect("options");
        assert_eq!(found, ["--tokens=4000", "--world-size=2", "--lr=1"]);
    }

    /// What other options give their meaning to goes with them; where the file has both, the command says what is wrong.
    #[test]
    fn keys_that_mean_nothing_are_left_out() {
        for (text, given, next_to) in [
            ("beta2 = 0.9", "--optimizer=sgd", "--optimizer sgd"),
            ("var_lr = 1e-3", "--optimizer=adamw", "--optimizer adamw"),
            (
                "optimizer_state = 'exp_avg=bf16,exp_avg_sq=bf16'",
                "--optimizer=sgd",
                "--optimizer sgd",
            ),
            ("decay_steps = 3", "--schedule=linear", "--schedule linear"),
            (
                "reshard_after_forward = 2",
                "--sharding=zero1",
                "--sharding zero1",
            ),
            ("no_prefetch = true", "--device=cpu", "--device cpu"),
            ("held_out = 0.2", "--data=text.txt", "--data text.txt"),
            ("mask_documents = true", "--data=text", "--data text"),
            ("amax_group = '*.{q,k}'", "--recipe=mxfp8", "--recipe mxfp8"),
            ("steps = 3", "--tokens=4000", "--tokens"),
            ("dim = 64", "--model=folder", "--model"),
            ("kv_heads = 2", "--arch=gpt", "--arch gpt"),
            ("from_scratch = true", "--arch=llama", "--arch"),
            ("epochs = 2.0", "--steps=3", "--steps"),
            ("save_every = 4", "--steps=3", "--steps 3"),
            ("stop_after = 4", "--steps=3", "--steps 3"),
            ("eval_every = 4", "--steps=3", "--steps 3"),
            ("log_codes = 4", "--steps=3", "--steps 3"),
        ] {
            assert_eq!(expanded(text, &[given]).expect(text), [given], "{text}");
            let table: Table = text.parse().expect("TOML");
            let key = table.keys().next().expect("a key");
            let (_, moot) = options("x", &table, &[given.into()]).expect("options");
            let expected = format!("{key} has no meaning with {next_to} and is left out");
            assert_eq!(moot, [expected]);
        }
        let state = "optimizer_state = 'master=bf16,exp_avg=fp8,exp_avg_sq=fp8'";
        for (optimizer, kept) in [("lion", "master=bf16,exp_avg=fp8"), ("sgd", "master=bf16")] {
            let given = format!("--optimizer={optimizer}");
            let table: Table = state.parse().expect("TOML");
            let (all, moot) = options("x", &table, &[given.into()]).expect("options");
            assert_eq!(all, [OsString::from(format!("--optimizer-state={kept}"))]);
            let note = format!(
                "of optimizer_state only {kept} has a meaning with --optimizer {optimizer}"
            );
            assert_eq!(moot, [note]);
        }
        for (text, given) in [
            ("beta2 = 0.9", "--optimizer=muon"),
            ("var_lr = 1e-3", "--optimizer=muon"),
            ("optimizer_state = 'exp_avg=bf16'", "--optimizer=lion"),
            ("decay_steps = 3", "--schedule=wsd"),
            ("no_prefetch = true", "--device=cuda"),
            ("held_out = 0.2", "--data=ids.npy"),
            ("amax_group = 'none'", "--recipe=mxfp8"),
            ("amax_group = ['none']", "--recipe=mxfp8"),
            ("save_every = 3", "--steps=3"),
            ("save_every = 4", "--steps=x"),
            ("warmup = 4", "--steps=3"),
            ("kv_heads = 2", "--arch=llama"),
            ("amax_group = '*.{q,k}'", "--compare=mxfp8,fp8-current"),
        ] {
            assert_eq!(expanded(text, &[given]).expect(text).len(), 2, "{text}");
        }
    }

    #[test]
    fn flags_that_may_have_a_value_are_flags_too() {
        for (text, expected) in [
            ("no_cudnn = true", "--no-cudnn"),
            ("no_cudnn = 'backward'", "--no-cudnn=backward"),
        ] {
            assert_eq!(expanded(text, &[]).expect(text), [expected]);
        }
        assert_eq!(expanded("no_cudnn = false", &[]).expect("none"), [""; 0]);
    }

    #[test]
    fn other_keys_are_errors() {
        for (text, why) in [
            ("step = 3", "is no option"),
            ("config = 'x'", "is no option"),
            ("help = true", "is no option"),
            ("recompute = 3", "true or false"),
            ("steps = {a = 1}", "one value"),
            (
                "save = false",
                "save must be a path, or left out for none, not false",
            ),
            (
                "save = 3",
                "save must be a path, or left out for none, not 3",
            ),
            (
                "report = nan",
                "report must be a path, or left out for none, not NaN",
            ),
            (
                "data = ['a', 3]",
                "data must be a path, or left out for none, not 3",
            ),
            ("compare = [['all']]", "compare must be a list of values"),
            ("steps = true", "steps must be a whole number, not true"),
            ("steps = []", "steps must be one value"),
            ("save = ['a', 'b']", "save must be one value"),
            ("timeout = 1.5", "timeout must be a whole number, not 1.5"),
            (
                "peak_tflops = false",
                "peak_tflops must be a number, not false",
            ),
            ("lr = 1\nsteps = ", "line 2"),
        ] {
            let error = expanded(text, &[]).expect_err(text);
            assert!(error.contains(why), "{error}");
        }
    }
}
