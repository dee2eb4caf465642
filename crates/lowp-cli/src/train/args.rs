//! The options of `lowp train`.

use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser;
use lowp_shard::Mesh;
use std::path::PathBuf;

/// Train a small byte-level transformer whose weights live in a low-precision format, sharded over ranks of this
/// process, next to an fp32 baseline of the same seed and batches.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp train
  lowp train --compare all --ranks 2 --report train.html
  lowp train --recipe mxfp8 --mesh 2x2 --steps 1000 --json train.json")]
pub(crate) struct Args {
    /// Format of the sharded weights; the fp32 baseline runs beside it
    #[arg(
        long,
        value_name = "NAME",
        default_value = "mxfp8",
        conflicts_with = "compare"
    )]
    pub(crate) recipe: String,

    /// Train several recipes one after the other: `all`, or names separated by commas
    #[arg(long, value_name = "all|NAME,NAME", value_delimiter = ',')]
    pub(crate) compare: Vec<String>,

    /// Number of ranks that the weights are sharded over [default: 2]
    #[arg(long, value_name = "N", conflicts_with = "mesh")]
    pub(crate) ranks: Option<usize>,

    /// Replicate x shard mesh: R groups that each hold all weights, sharded over S ranks
    #[arg(long, value_name = "RxS")]
    pub(crate) mesh: Option<Mesh>,

    /// Free gathered weights after the forward pass and gather them again for the backward pass
    #[arg(
        long,
        value_name = "BOOL",
        default_value = "true",
        action = clap::ArgAction::Set,
        value_parser = PossibleValuesParser::new(["true", "false"]).map(|v| v == "true")
    )]
    pub(crate) reshard_after_forward: bool,

    /// How gradients travel; sums are accumulated in fp32 either way
    #[arg(long, value_name = "f32|bf16", default_value = "f32", value_parser = PossibleValuesParser::new(["f32", "bf16"]))]
    pub(crate) grad_wire: String,

    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub(crate) steps: usize,

    /// Seed of the initial weights, the batches and stochastic rounding
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// Text to train on instead of the bundled book; its last 10% is the validation split
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,

    /// Sequences per step, over all ranks
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) batch: usize,

    /// Width of the model
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Model")]
    pub(crate) dim: usize,

    /// Transformer blocks
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Model")]
    pub(crate) layers: usize,

    /// Attention heads; must divide the width
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Model")]
    pub(crate) heads: usize,

    /// Bytes per sequence
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Model")]
    pub(crate) seq: usize,

    /// Highest learning rate: linear warm-up, then a cosine down to a tenth of it
    #[arg(
        long,
        value_name = "LR",
        default_value_t = 3e-3,
        help_heading = "Optimizer"
    )]
    pub(crate) lr: f64,

    /// Warm-up steps [default: a tenth of the steps, at most 100]
    #[arg(long, value_name = "N", help_heading = "Optimizer")]
    pub(crate) warmup: Option<usize>,

    /// Decoupled weight decay of all matrices
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.1,
        help_heading = "Optimizer"
    )]
    pub(crate) weight_decay: f64,

    /// Global gradient norm above which gradients are scaled down
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        help_heading = "Optimizer"
    )]
    pub(crate) clip: f64,

    /// Batches of the validation split that the final loss is averaged over
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) eval_batches: usize,

    /// Write the runs as JSON
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,

    /// Write one self-contained HTML page with loss curves and byte bars
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    pub(crate) report: Option<PathBuf>,
}
