//! The options of `lowp plan`.

use crate::device::Device;
use crate::file::USAGES;
use crate::one_of::{by_name, one_of};
use crate::recipes::{RecipeName, RecipeOptionArgs};
use crate::sharding::ShardingArgs;
use crate::train::{DEFAULT_RECIPE, SizeArgs};
use clap::ArgGroup;
use lowp_format::{ReshardAfterForward, Shape, Usage};

/// Heading of the options of a whole model.
const MODEL: &str = "With --model";

fn examples() -> String {
    format!(
        "Examples:
  lowp plan --shape 4096x1024 --world-size 8
  lowp plan --recipe {DEFAULT_RECIPE} --shape 4096x1024 --world-size 8 --reshard-after-forward false
  lowp plan --recipe {DEFAULT_RECIPE} --shape 100x64 --world-size 3 --usage rowwise --json
  lowp plan --model 1b --world-size 8
  lowp plan --model 1b --vocab 32768 --world-size 8 --device cuda --batch 128
  lowp plan --model config.json --mesh 16x64 --accumulate 4 --recompute --bandwidth 350,40
  lowp plan --model config.json --world-size 8 --keep-bf16 '*.down_proj' --json

Columns of --shape: `entries` and `bytes` are what is stored, sent and saved; `padded` is the
layout of TransformerEngine, `swizzled` that of cuBLASLt operands. A rank stores the buffers that
are not derived, and rows are cut at multiples of their `quantum`. `rank bytes` is what one rank
sends of a buffer, `wire bytes` what all ranks send together.

Columns of --model: `sent` counts each byte once, at the rank that sends it, over the ranks of one
replica, as `lowp train` does. The other columns count it at every rank that receives it, over links
within nodes and between them: `/ rank` is the share of one rank on the busiest node, `/ world` all
ranks together. Ranks are numbered replica by replica and fill one node after the other. A piece
that many ranks gather enters each node once and is forwarded within it, as in NCCL's rings; f32
sums take the same way back. Gradients that are sent in bf16 are sent directly to the rank that
adds them. `ms` is the time of all gathers in sequence;
each takes as long as its slower kind of link."
    )
}

const JSON: &str = "\
JSON of --model:
  model                  name, linear_layers, linear_parameters, variables, variable_parameters
  config                 recipe, mesh [replicate, shard], ranks, ranks_per_node, nodes, sharding,
                         reshard_after_forward, grad_wire, accumulate, reduce_every_micro_batch,
                         recompute, kept_in_bf16, and optimizer and optimizer_state if not the
                         defaults
  resident_weight_bytes  these four as in the JSON of `lowp train`, to the byte
  master_weight_bytes
  wire_bytes_per_step
  parameter_bytes_per_rank
  memory                 bytes of the `rank` that holds most, and their sum, `total`:
      weights            stored between steps
      masters, states, gradients  of the linear layers: --optimizer-state of --optimizer, reduced
                         in f32
      matrices           with --optimizer muon or moonlight: matrices that the rank makes
                         orthogonal, pieces of the others, and what the work takes, in bf16
      gathered           weights at once, and what they are brought together in
      parts              kept from forward to backward, with --reshard-after-forward N
      decoded            weights as f32, which products on a CPU read
      staged             beside full weights, with --sharding zero1
      buckets            of full gradients: one at a time; with several micro-batches the full
                         gradients and one bucket, unless --reduce-every-micro-batch
      variables          full f32 values of those that stay, and what embeddings and heads are
                         gathered in, one after the other
      variable_state     masters, states and gradients of the own rows of all of them
  by_rank                min, mean and max over the ranks of a replica, of linear layers: bytes of
                         masters, states, codes, scales and their total; sent_of_a_block: bytes
                         sent of the block that is least even, by what it is gathered for
  device                 with --device cuda: what its GPU holds beside `memory`, and in all:
      sequences          of a micro-batch
      scales             those bytes of `weights` that are no codes
      variables_gathered  f32 shards of the variables, and the memory to gather those that stay
      staging            where gradients arrive that are added there or sent on
      activations        kept for backward; null, as the next two, where `lowp train` runs no such
                         network on GPUs
      in_turn            operands, logits and gradients of activations, whose memory layers reuse
      workspaces         of products and attention
      total              of all; `planned_bytes_per_rank` of `lowp train`
  host                   with --offload-optimizer: masters and states, which `memory` counts, too:
      bytes_per_rank     page-locked memory
      bytes_per_node     of all ranks of the node that has most
      read_per_step      bytes that a GPU reads over PCIe, at least: masters once for each pass
      written_per_step   and writes
  left_out               array of `what`, and its `bytes` or null
  operations             array, in the order of a step:
      what               transient_variables (embeddings and heads), forward,
                         forward_again, backward, full_weights, gradients, replicas, matrices
                         (momenta to those who make them orthogonal, and back), or variables
      code, passes       recipe or dtype; how often in a step
      sent_bytes         over the ranks of one replica
      rank, world        `within_node` and `between_nodes`: bytes that arrive
      seconds            of gathers, with --bandwidth; else null
  total                  sums of `operations`: rank, world, seconds
  bf16                   with all linear layers in bf16: memory_total, wire_bytes_per_step, rank,
                         world, seconds
  ratio                  of bf16 to this plan: memory, wire, within_node and between_nodes (world),
                         seconds; null where there is nothing to divide
  bandwidth              within_node and between_nodes: where each rate comes from
  notes                  array: the assumptions of the plan";

/// An option of a whole model alone.
fn of_model(arg: clap::Arg) -> clap::Arg {
    arg.conflicts_with("shape").help_heading(MODEL)
}

/// Print the cost of one weight or a whole model: bytes that ranks store, hold in memory and send
#[derive(Clone, Debug, clap::Args)]
#[command(
    group(ArgGroup::new("subject").required(true).args(["shape", "model"])),
    mut_arg("mesh", of_model),
    mut_arg("sharding", of_model),
    mut_arg("grad_wire", of_model),
    mut_arg("optimizer", of_model),
    mut_arg("optimizer_state", of_model),
    mut_arg("offload_optimizer", of_model),
    mut_arg("accumulate", of_model),
    mut_arg("reduce_every_micro_batch", of_model),
    mut_arg("recompute", of_model),
    mut_arg("keep_bf16", of_model),
    mut_arg("no_cudnn", of_model),
    mut_arg("nondeterministic_attention", of_model),
    mut_arg("no_prefetch", of_model),
    mut_arg("dim", |arg| arg.help("Width, in place of the preset's").help_heading(MODEL)),
    mut_arg("layers", |arg| arg.help("Transformer blocks, in place of the preset's").help_heading(MODEL)),
    mut_arg("heads", |arg| arg.help("Attention heads, in place of the preset's").help_heading(MODEL)),
    mut_arg("seq", |arg| arg.help("Tokens per sequence, in place of the preset's; of a file with --device cuda [default: 1024, or its number of positions if that is smaller]").help_heading(MODEL)),
    mut_arg("vocab", |arg| arg.help("Size of the vocabulary, in place of the preset's").help_heading(MODEL)),
    after_help = examples(),
    after_long_help = format!("{}\n\n{JSON}", examples())
)]
pub(crate) struct Args {
    /// Recipe of the weight, as NAME or NAME+MODIFIER; `lowp recipes` describes each
    #[arg(long, value_name = "NAME", default_value = DEFAULT_RECIPE, value_parser = RecipeName::default())]
    pub(super) recipe: String,

    /// Rows x columns of the full weight: output x input features
    #[arg(long, value_name = "MxK")]
    pub(super) shape: Option<Shape>,

    /// Plan a whole model: a preset of `lowp train --params` (10m, 125m, 350m, 1b), or the config.json, or its folder, of a model like
    /// Llama or GPT-2, also with experts
    #[arg(long, value_name = "PRESET|FILE|DIR", conflicts_with = "usage")]
    pub(super) model: Option<String>,

    /// Device of the model: `cpu`, or `cuda` with one GPU per rank
    #[arg(
        long,
        value_name = "NAME",
        default_value = "cpu",
        value_parser = by_name([Device::Cpu, Device::Cuda(0)], Device::kind),
        conflicts_with = "shape",
        help_heading = MODEL
    )]
    pub(super) device: Device,

    /// Sequences per step on GPUs, over all ranks [default: 16]
    #[arg(long, value_name = "N", conflicts_with = "shape", help_heading = MODEL)]
    pub(super) batch: Option<usize>,

    /// Count the masks that `lowp train --mask-documents` has on GPUs
    #[arg(long, conflicts_with = "shape", help_heading = MODEL)]
    pub(super) mask_documents: bool,

    /// Number of ranks that the rows are sharded over
    #[arg(long, value_name = "N", required_unless_present = "mesh")]
    pub(super) world_size: Option<usize>,

    /// What the weight is gathered for: forward needs rowwise, backward columnwise
    #[arg(
        long,
        value_name = "USAGE",
        default_value = "both",
        value_parser = one_of(USAGES)
    )]
    pub(super) usage: Usage,

    /// Print JSON instead of tables
    #[arg(long)]
    pub(super) json: bool,

    /// Ranks of a node: links within it are faster than those between nodes
    #[arg(long, value_name = "N", default_value_t = 8, conflicts_with = "shape", help_heading = MODEL)]
    pub(super) ranks_per_node: usize,

    /// Bandwidth within a node and between nodes, for the time of gathers: GB/s that a rank receives (10^9 bytes per second), or
    /// a file of `lowp bench --device cuda --ranks N --json FILE`, which also has the time of a rank's copies and transposes
    #[arg(
        long,
        value_name = "GB/S|FILE[,GB/S|FILE]",
        allow_negative_numbers = true,
        conflicts_with = "shape",
        help_heading = MODEL
    )]
    pub(super) bandwidth: Option<String>,

    #[command(flatten)]
    pub(super) sharded: ShardingArgs,

    #[command(flatten)]
    pub(super) sizes: SizeArgs,

    #[command(flatten)]
    pub(super) options: RecipeOptionArgs,
}

/// The weight that a plan is of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weight<'a> {
    /// The recipe as it was given.
    pub(super) recipe: &'a str,
    pub(super) shape: Shape,
    pub(super) world: usize,
    pub(super) usage: Usage,
    /// Where it was given.
    pub(super) reshard: Option<ReshardAfterForward>,
}
