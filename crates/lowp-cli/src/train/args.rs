//! The options of `lowp train`.

use super::data::DataArg;
use super::optimizer::OptimizerArgs;
use super::sizes::{Preset, SizeArgs};
use crate::device::Device;
use crate::recipes::{self, RecipeName};
use crate::sharding::ShardingArgs;
use lowp_train::Checkpoints;
use lowp_transformer::GptConfig;
use std::path::{Path, PathBuf};

/// The recipe that commands use unless an option says otherwise: no amax to agree on, and half the bytes of bf16 on the wire.
pub(crate) const DEFAULT_RECIPE: &str = "mxfp8";

/// Sequences per step that are trained unless an option says otherwise.
pub(crate) const DEFAULT_BATCH: usize = 16;

/// Examples of the help text.
fn examples() -> String {
    format!(
        "Examples:
  lowp train
  lowp train --compare all --report train.html
  lowp train --recipe {DEFAULT_RECIPE} --mesh 2x2 --steps 1000 --json train.json
  lowp train --compare {DEFAULT_RECIPE},{DEFAULT_RECIPE}+ocp-floor --seeds 3
  lowp train --sharding zero1 --world-size 3
  lowp train --world-size 4 --data my.txt --dim 256 --layers 6
  lowp train --params 10m --data my-folder --tokens 10000000 --keep-bf16 'block0.*'
  lowp train --model my-llama --data tokens --recipe {DEFAULT_RECIPE} --steps 500 --save runs"
    )
}

const JSON: &str = "\
JSON: {\"device\": \"cpu\" or \"cuda\", \"unit\": \"byte\" or \"token\", \"data\": a digest, \"runs\": [..], \"config\": {..}}. Losses are in nats per `unit`, that of the data. One entry of `runs` per seed and recipe, fp32 first:
  recipe                 the name as given
  seed                   of initial weights, batches and stochastic rounding
  ranks, steps           number of ranks; number of completed steps
  resumed_at             the step of the checkpoint from which the run resumed, or 0
  train_loss             array: loss of each step's batch before its update
  val_loss               loss on the validation split after the last step
  evaluations            array: `step` and `loss` of each evaluation of --eval-every
  gap_percent            val_loss above that of fp32 with the same seed, or null
  wire_bytes_per_step    bytes of linear weights that one replica sent per step, as counted
  wire_bytes_formula     the same by the gather plans; if they differ, the command fails
  wire_bytes_tail        both of the steps of --precision-tail, or null
  resident_weight_bytes  bytes of linear weights that one replica holds between steps
  master_weight_bytes    bytes of the optimizer's masters of them
  peak_weight_bytes      peak bytes for these weights: resident, masters, and the memory to gather, decode and reduce in
  parameters             weights of the linear layers, which the bytes are of
  model_parameters       all; embeddings, norms and the head stay in f32
  skipped_steps          steps whose gradients were not finite
  seconds_per_step       wall time, without evaluations
  data_seconds_per_step  those in which rank 0 waited for its data
  tokens_per_second      over all ranks
  flops_per_second       of the model's products and attention, forward and backward, without recomputed work
  parameter_bytes_per_rank  most bytes of weights, masters, states, gradients, variables and what muon works in that a rank held at once
  device_bytes_per_rank  on GPUs, most bytes that a rank held there, activations included: as counted, and as measured
  page_locked_bytes_per_rank  with --offload-optimizer, most bytes of masters and states that a rank held on the host; else absent
  ways                   on GPUs, how attention ran: by cuDNN, deterministic or not, or as products
  planned_bytes_per_rank  the same by the accounting of `lowp plan --device cuda`, before anything was allocated; null on a CPU
  optimizer_state        dtypes of its masters and states, or null where all are f32
  gather_seconds_exposed  seconds of a step in which rank 0 only waited for gathered weights: of an average step; on a GPU, of the last step
  gather_seconds         on GPUs, total seconds of the gathers of the last step, each from its start to its end; null if the optimizer step gathers
  gather_seconds_hidden  seconds of gather_seconds in which rank 0 did not wait for a weight; 0 on a CPU
Losses that are not finite are null.";

/// Train a small transformer with sharded low-precision weights, and compare it with fp32
///
/// The model reads text as bytes. The weights of its linear layers are stored in a low-precision format and sharded over
/// the ranks of this process: they are gathered before a layer runs, freed after it, and cast again after each update. An
/// fp32 baseline with the same seed and batches runs first.
///
/// If torchrun, mpirun or srun starts the command, each process is one rank of the launcher's world, and the losses equal those of
/// `--world-size` in one process. Rank 0 prints, writes files, and listens on port MASTER_PORT of MASTER_ADDR.
#[derive(Clone, Debug, clap::Args)]
#[command(
    after_help = examples(),
    after_long_help = format!("{}\n\n{}\n{JSON}", examples(), recipes::modifiers())
)]
pub(crate) struct Args {
    /// Recipe of the sharded weights, as NAME or NAME+MODIFIER; the fp32 baseline is trained as well
    #[arg(
        long,
        value_name = "NAME",
        default_value = DEFAULT_RECIPE,
        value_parser = RecipeName::default(),
        conflicts_with = "compare"
    )]
    pub(crate) recipe: String,

    /// Train several recipes one after the other: `all`, or names separated by commas
    #[arg(long, value_name = "all|NAME,NAME", value_delimiter = ',', hide_possible_values = true, value_parser = RecipeName { all: Some(("all", "every low-precision recipe")) })]
    pub(crate) compare: Vec<String>,

    /// Device of the model: `cpu`, or `cuda` with one GPU per rank; with `cuda:N` the first rank uses GPU N
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    pub(crate) device: Device,

    /// Number of ranks that the weights are sharded over [default: 2, or as many as a launcher started]
    #[arg(long, value_name = "N", conflicts_with = "mesh")]
    pub(crate) world_size: Option<usize>,

    #[command(flatten)]
    pub(crate) sharded: ShardingArgs,

    /// Seconds that a rank waits for others before all ranks fail. Ranks wait 5 seconds longer for rank 0, and for the first rank of their node, which is their relay
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,

    /// Optimizer steps [default: 200]
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<usize>,

    /// Train on at least N tokens, instead of giving a number of steps
    #[arg(long, value_name = "N", conflicts_with = "steps")]
    pub(crate) tokens: Option<usize>,

    /// With tokens: train on N times as many sequences as the training splits of all sources have, rounded up to a batch, instead of giving a
    /// number of steps
    #[arg(
        long,
        value_name = "N",
        conflicts_with_all = ["steps", "tokens"],
        allow_negative_numbers = true
    )]
    pub(crate) epochs: Option<f64>,

    /// Seed of the initial weights, the batches and stochastic rounding
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// Repeat every run with N seeds, beginning with --seed; the table shows means
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seeds: usize,

    /// What to train on instead of the bundled book. Tokens: a folder of `lowp tokenize`, a .npy file of ids, or the .bin and .idx files
    /// of Megatron-LM. Text, read as bytes: a file, or all files of a folder and its folders in the order of their paths, at most 4 GiB
    /// in all and without links; its last 10% is the validation split. Tokens of several sources: repeat the option; WEIGHT is the relative
    /// share of sequences, of each source or of none
    #[arg(long, value_name = "FILE|DIR[=WEIGHT]")]
    pub(crate) data: Vec<DataArg>,

    /// With tokens: the part of their sequences, the last ones, that is the validation split [default: 0.1]
    #[arg(long, value_name = "FRACTION", allow_negative_numbers = true)]
    pub(crate) held_out: Option<f64>,

    /// With tokens: a token sees only the tokens of its own document, and the first token of a document is not predicted
    #[arg(long)]
    pub(crate) mask_documents: bool,

    /// Read options from a TOML file, whose keys are their names; options on the command line override it
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Sequences per step, over all ranks
    #[arg(long, value_name = "N", default_value_t = DEFAULT_BATCH)]
    pub(crate) batch: usize,

    /// Batches of the validation split that a loss on it is averaged over
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) eval_batches: usize,

    /// Evaluate on the validation split after every N steps, not only after the last
    #[arg(long, value_name = "N")]
    pub(crate) eval_every: Option<usize>,

    /// Skip the check at the end, which compares every gathered weight with a cast of its masters
    #[arg(long)]
    pub(crate) no_audit: bool,

    /// Scale activations and gradients on GPUs by their amax over all ranks, as on the CPU, not by the amax of each rank's tokens
    #[arg(long)]
    pub(crate) agree_amaxes: bool,

    /// Print how the GPU spent its time in the last step
    #[arg(long)]
    pub(crate) profile: bool,

    /// Do not train the fp32 baseline
    #[arg(long)]
    pub(crate) no_baseline: bool,

    /// Continue from the weights of a Hugging Face folder, in f32, f16, bf16 or quantized: Llama, Mistral or Qwen3. No fp32 baseline is
    /// trained, unless --compare names it
    #[arg(
        long,
        value_name = "DIR",
        help_heading = "Model",
        conflicts_with_all = ["params", "dim", "layers", "heads", "vocab", "arch", "kv_heads"]
    )]
    pub(crate) model: Option<PathBuf>,

    /// Begin with random weights, and take only the sizes and the tokenizer of --model
    #[arg(
        long,
        requires = "model",
        // Where one of those that --model conflicts with is given, clap does not ask for --model.
        conflicts_with_all = ["params", "dim", "layers", "heads", "vocab", "arch", "kv_heads"],
        help_heading = "Model"
    )]
    pub(crate) from_scratch: bool,

    /// Preset with the sizes of the model; the options below change single sizes
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub(crate) params: Option<Preset>,

    #[command(flatten)]
    pub(crate) sizes: SizeArgs,

    /// Layers that share one amax, if a scale follows from the amax of the tensor. `auto`: layers that inference engines run as one
    /// (query, key and value; gate and up). `none`: no layers. A pattern groups the names that it matches and that differ only inside its
    /// braces: '*.{q,k,v}_proj,*.{gate,up}_proj' [default: auto]
    #[arg(long, value_name = "GLOB,..", help_heading = "Model")]
    pub(crate) amax_group: Vec<String>,

    /// Run the forward products of the last part of the steps in bf16; FRACTION is from 0 to 1. At its first step weights are cast again
    /// from their masters
    #[arg(
        long,
        value_name = "FRACTION",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        help_heading = "Model"
    )]
    pub(crate) precision_tail: f64,

    #[command(flatten, next_help_heading = "Optimizer")]
    pub(crate) optimizer: OptimizerArgs,

    /// Save checkpoints of each run to DIR/NAME-seedN: after the last step, and as --save-every says
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    pub(crate) save: Option<PathBuf>,

    /// Also save after every N steps; training continues while the checkpoint is written
    #[arg(
        long,
        value_name = "N",
        requires = "save",
        help_heading = "Checkpoints"
    )]
    pub(crate) save_every: Option<usize>,

    /// Keep the N latest checkpoints of a run [default: all]
    #[arg(
        long,
        value_name = "N",
        requires = "save",
        help_heading = "Checkpoints"
    )]
    pub(crate) keep: Option<usize>,

    /// End after step N; the schedule stays that of all steps
    #[arg(long, value_name = "N", help_heading = "Checkpoints")]
    pub(crate) stop_after: Option<usize>,

    /// Resume from the latest checkpoints in DIR, a folder of --save, or from one checkpoint. On the same mesh the result equals that
    /// of a run without a stop, bit for bit; another mesh loads the same state; another recipe starts from the masters. `latest` resumes
    /// from the newest whole checkpoint in the folder of --save, or starts at step 0 if there is none: for a command that is started again
    /// whenever it stops
    #[arg(long, value_name = "latest|DIR", help_heading = "Checkpoints")]
    pub(crate) resume: Option<PathBuf>,

    /// Write the runs as JSON; `--help` describes it
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,

    /// Log each step of a run to DIR/NAME-seedN: metrics.jsonl has a JSON object per line, and TensorBoard reads the event files
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) log_dir: Option<PathBuf>,

    /// Also log the shares of each layer's codes that are saturated or zero, every N steps
    #[arg(long, value_name = "N", requires = "log_dir", help_heading = "Output")]
    pub(crate) log_codes: Option<usize>,

    /// TFLOP/s that the device of a rank can do, for the MFU in the log [default: of dense bf16 products, where the GPU is known]
    #[arg(
        long,
        value_name = "X",
        allow_negative_numbers = true,
        requires = "log_dir",
        help_heading = "Output"
    )]
    pub(crate) peak_tflops: Option<f64>,

    /// Write a self-contained HTML page with loss curves and charts of bytes
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    pub(crate) report: Option<PathBuf>,
}

impl Args {
    /// The sizes of the model without --model: those of the preset, changed by the options of single sizes.
    pub(crate) fn byte_model(&self) -> GptConfig {
        let preset = self.params.map(Preset::config).unwrap_or_default();
        self.sizes.of(preset)
    }

    /// What is saved, and what runs resume from.
    pub(crate) fn checkpoints(&self) -> Checkpoints {
        let checkpoints = Checkpoints {
            save: self.save.clone(),
            save_every: self.save_every,
            keep: self.keep,
            resume: self.resume.clone(),
            stop_after: self.stop_after,
            ..Checkpoints::default()
        };
        match self.resumes_latest() {
            true => checkpoints.resume_newest(),
            false => checkpoints,
        }
    }

    /// Whether `--resume latest` was given.
    pub(crate) fn resumes_latest(&self) -> bool {
        self.resume.as_deref() == Some(Path::new("latest"))
    }

    /// The files to write, each with its option.
    pub(crate) fn outputs(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let files = [("--json", &self.json), ("--report", &self.report)];
        files
            .into_iter()
            .filter_map(|(option, path)| Some((option, path.as_deref()?)))
    }
}
