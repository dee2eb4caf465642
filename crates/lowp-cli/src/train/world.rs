//! [`World`]: where the ranks of a command are: threads of this process, or processes that a launcher started.

use super::args::Args;
use super::config::Setup;
use super::options::named;
use super::source::Batches;
use crate::usage::{UsageError, exit_code, input_error};
use anyhow::{Context, Result, anyhow};
use clap::ValueEnum;
use lowp_checkpoint::checksum;
use lowp_comm::{CommError, Control, Launch, join};
use lowp_fsdp::cost::MAX_RANKS;
use lowp_train::{Checkpoints, shown_value};
use serde_json::{Map, Value};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The ranks of one command.
#[derive(Debug)]
pub(crate) struct World {
    /// How long a rank waits for others.
    pub(crate) limit: Duration,
    /// This process as a rank of its world.
    process: Option<Process>,
}

#[derive(Debug)]
struct Process {
    launch: Launch,
    control: Arc<dyn Control>,
}

impl World {
    /// The world that the launcher of this process made, joined; or none, where there was none.
    pub(crate) fn find(seconds: u64) -> Result<Self> {
        let limit = Duration::from_secs(seconds);
        let launch =
            Launch::from_env(limit, "").map_err(|error| UsageError::new(error.to_string()))?;
        if let Some(launch) = launch.as_ref().filter(|launch| launch.world > MAX_RANKS) {
            return Err(input_error(format!(
                "{} ranks were started; lowp train takes at most {MAX_RANKS}",
                launch.world
            )));
        }
        let process = match launch {
            Some(launch) => {
                let build = build();
                let launch = Launch { build, ..launch };
                let control = join(&launch).map_err(|error| anyhow!(named(&error.to_string())))?;
                Some(Process { launch, control })
            }
            None => None,
        };
        Ok(Self { limit, process })
    }

    /// What a launcher said of this process.
    pub(crate) fn launch(&self) -> Option<&Launch> {
        self.process.as_ref().map(|process| &process.launch)
    }

    /// Whether this process tells the user what becomes of the command.
    pub(crate) fn reports(&self) -> bool {
        self.launch().is_none_or(|launch| launch.rank == 0)
    }

    /// Ranks that share the cores of this machine, of `ranks` in all.
    pub(crate) fn ranks_here(&self, ranks: usize) -> usize {
        self.launch().map_or(ranks, |launch| launch.local_world)
    }

    /// The numbers of these ranks; those of a machine follow each other.
    pub(crate) fn numbers_here(&self, ranks: usize) -> Range<usize> {
        self.launch().map_or(0..ranks, |launch| {
            let first = launch.rank.saturating_sub(launch.local_rank);
            first..first + launch.local_world
        })
    }

    /// `result`, if no rank has an error; else a rank without one ends with the exit code of the first that has one, and that rank says why. Collective.
    pub(crate) fn all_ok<T>(&self, result: Result<T>) -> Result<T> {
        let Some(Process { control, .. }) = &self.process else {
            return result;
        };
        let code = result.as_ref().err().map_or(0, exit_code);
        let failed = control.first_failed("whether lowp train can begin", code);
        let value = result?;
        match failed?.map(|(rank, code)| (code, format!("rank {rank} cannot begin: see its error")))
        {
            None => Ok(value),
            Some((2, why)) => Err(input_error(why)),
            Some((_, why)) => Err(anyhow!(why)),
        }
    }

    /// Checks that all ranks were started for the same work.
    pub(crate) fn agree(&self, args: &Args, setup: &Setup, text: &Batches) -> Result<()> {
        let Some(Process { control, .. }) = &self.process else {
            return Ok(());
        };
        let own = alike(args, setup)?;
        let digest = checksum(&serde_json::to_vec(&own)?);
        let digests = control.all_gather("the options of lowp train", digest.into_bytes())?;
        if digests.iter().any(|digest| *digest != digests[0]) {
            disagree(&**control, &own)?;
        }
        let same = control.all_equal("the text to train on", &text.digest());
        same.map_err(of_options)
    }

    /// This process as the only rank of it, for one run: its control, and its number among the ranks of this machine. `None` where ranks
    /// are threads.
    pub(crate) fn rank(&self) -> Result<Option<(Arc<dyn Control>, usize)>> {
        let Some(Process { control, launch }) = &self.process else {
            return Ok(None);
        };
        // A group of its own, whose bytes are counted from zero.
        let control = control.split(0, control.rank())?;
        Ok(Some((control, launch.local_rank)))
    }

    /// How the command ends on this rank: an error ends it on all.
    pub(crate) fn end(&self, result: Result<()>) -> Result<()> {
        let Some(Process { control, launch }) = &self.process else {
            return result;
        };
        result
            .inspect_err(|error| control.abort(&format!("{error:#}")))
            .with_context(|| format!("rank {} of {}", launch.rank, launch.world))
    }
}

/// Options, and their values as text.
type Options = Vec<(String, String)>;

/// The error about the first option of which ranks have several values. A rank may have options that others left out. Collective.
fn disagree(control: &dyn Control, own: &Options) -> Result<()> {
    let all = control.all_gather("the options of lowp train", serde_json::to_vec(own)?)?;
    let all = all.iter().map(|options| serde_json::from_slice(options));
    let all = all.collect::<Result<Vec<Options>, _>>()?;
    let value = |of: &Options, option: &str| {
        let found = of.iter().find(|(known, _)| known == option);
        found.map_or_else(|| LEFT_OUT.to_owned(), |(_, value)| value.clone())
    };
    let differs = |option: &&String| {
        let mut values = all.iter().map(|of| value(of, option));
        let first = values.next();
        values.any(|value| Some(value) != first)
    };
    let options = all.iter().flatten().map(|(option, _)| option);
    let follows = |option: &&String| FOLLOWING.iter().position(|other| other == option);
    match options.filter(differs).min_by_key(follows) {
        Some(option) => {
            let text = value(own, option);
            let same = control.all_equal(&format!("{option} of lowp train"), &text);
            same.map_err(of_options)
        }
        None => Ok(()),
    }
}

/// Options whose values may follow from others, those that others of them follow from first.
const FOLLOWING: [&str; 18] = [
    "--arch",
    "--dim",
    "--heads",
    "--kv-heads",
    "--layers",
    "--seq",
    "--vocab",
    "--steps",
    "--keep-bf16",
    "--amax-group",
    "--no-decay",
    "--lr",
    "--var-lr",
    "--beta2",
    "--weight-decay",
    "--warmup",
    "--schedule",
    "--precision-tail (in steps)",
];

/// The error of ranks, which is one of the arguments where these differ.
fn of_options(error: CommError) -> anyhow::Error {
    match error {
        CommError::Mismatch { what, descriptions } => input_error(format!(
            "the ranks disagree on {what}: {}; give every rank the same options and data",
            descriptions.join("; ")
        )),
        error => error.into(),
    }
}

/// The value of an option that was not given.
const LEFT_OUT: &str = "left out";

/// What ranks must have been started with alike.
fn alike(args: &Args, setup: &Setup) -> Result<Options> {
    let text = serde_json::to_string(&setup.config)?;
    let record: Map<String, Value> = serde_json::from_str(&text)?;
    let field = |(field, value): (&String, &Value)| {
        let option = named(&format!("`{field}`"));
        (option, shown_value(field, &value.to_string()).into_owned())
    };
    let mut options: Options = record.iter().map(field).collect();
    let runs: Vec<&str> = setup.runs.iter().map(|run| run.name.as_str()).collect();
    let Checkpoints {
        save,
        save_every,
        keep,
        resume,
        newest_whole,
        stop_after,
    } = &setup.checkpoints;
    let number = |number: &Option<usize>| number.map(|number| number.to_string());
    let paths = [save, resume, &args.json, &args.report, &args.log_dir];
    let [save, resume, json, report, logs] = paths.map(|path| {
        let path = path.as_ref();
        path.map(|path| path.display().to_string())
    });
    let preset = args.params.and_then(|preset| preset.to_possible_value());
    let folder = setup.folder.as_ref().map(|folder| folder.digest());
    let flag = |given: bool| given.then(|| "given".to_owned());
    let others = [
        (
            "--params",
            preset.map(|preset| preset.get_name().to_owned()),
        ),
        ("--tokens", number(&args.tokens)),
        ("--epochs", args.epochs.map(|epochs| epochs.to_string())),
        ("--from-scratch", flag(args.from_scratch)),
        ("--model", folder.transpose()?),
        ("--device", Some(args.device.kind().to_owned())),
        ("--no-audit", flag(args.no_audit)),
        ("--no-cudnn", args.sharded.no_cudnn.clone()),
        (
            "--nondeterministic-attention",
            flag(args.sharded.nondeterministic_attention),
        ),
        ("--agree-amaxes", flag(args.agree_amaxes)),
        ("--no-prefetch", flag(args.sharded.no_prefetch)),
        ("--recipe or --compare", Some(runs.join(","))),
        ("--save", save),
        ("--save-every", number(save_every)),
        ("--keep", number(keep)),
        ("--log-codes", number(&args.log_codes)),
        ("--resume", resume),
        ("--resume latest", flag(*newest_whole)),
        ("--stop-after", number(stop_after)),
        ("--json", json),
        ("--report", report),
        ("--log-dir", logs),
    ];
    let text = |text: Option<String>| text.unwrap_or_else(|| LEFT_OUT.to_owned());
    options.extend(others.map(|(option, value)| (option.to_owned(), text(value))));
    Ok(options)
}

/// The version, and a digest of the program: other builds of one version compute other bits.
fn build() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let program = std::env::current_exe().and_then(std::fs::read);
    program.map_or_else(
        |_| version.to_owned(),
        |bytes| format!("{version} ({})", checksum(&bytes)),
    )
}
