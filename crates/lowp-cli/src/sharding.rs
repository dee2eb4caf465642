//! [`ShardingArgs`]: options of `lowp train` and `lowp plan` that say how a model is spread over ranks.

use crate::one_of::{Named, by_name, one_of};
use lowp_comm::{GradWire, Mesh};
use lowp_format::spelling::Variant;
use lowp_format::{ReshardAfterForward, is_in_bf16};
use lowp_fsdp::Sharding;
use lowp_optim::{MasterDtype, StateDtypes};
use lowp_train::Optimizer;
use lowp_transformer::CudnnPasses;

const SHARDINGS: &[Named<Sharding>] = &[
    (
        Sharding::Fsdp.name(),
        "Rows of weights, masters and states of the optimizer; weights are gathered for each use",
        Sharding::Fsdp,
    ),
    (
        Sharding::Zero1.name(),
        "The full low-precision weights, gathered once per step, and flat slices of masters and states",
        Sharding::Zero1,
    ),
];

// No doc comment: clap would print it in place of the command's own.
// Options that both commands have.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(crate) struct ShardingArgs {
    /// Replicate x shard mesh: R groups that each hold all weights, sharded over S ranks [default: one group of all ranks]
    #[arg(long, value_name = "RxS")]
    pub(crate) mesh: Option<Mesh>,

    /// How weights are sharded between steps
    #[arg(long, value_name = "NAME", default_value = "fsdp", value_parser = one_of(SHARDINGS))]
    pub(crate) sharding: Sharding,

    /// true: free gathered weights after the forward pass and gather them again for the backward pass. false: keep them. N: each
    /// rank of a group of N keeps a part, and the group gathers it for the backward pass (with fsdp) [default: true]
    #[arg(long, value_name = "BOOL|N")]
    pub(crate) reshard_after_forward: Option<ReshardAfterForward>,

    /// Dtype in which gradients are sent; sums are accumulated in fp32 in both cases
    #[arg(long, value_name = "CODE", default_value = "f32", value_parser = by_name(GradWire::ALL, GradWire::name))]
    pub(crate) grad_wire: GradWire,

    /// What updates parameters
    #[arg(long, value_name = "NAME", default_value = "adamw", value_parser = by_name(Optimizer::ALL, Optimizer::name))]
    pub(crate) optimizer: Optimizer,

    /// Dtypes of the optimizer's states: exp_avg=bf16, or exp_avg=bf16,exp_avg_sq=bf16 with adamw, exp_avg=bf16 with lion,
    /// momentum_buffer=bf16 with sgd; also fp8 for bf16. master=bf16 for masters, which are rounded stochastically; master=bf16+16 for
    /// those of weights in bf16, which have the values of f32: the weight is the upper half; others stay in f32. With muon
    /// and moonlight: masters of all parameters, states of what adamw updates. The fp32 baseline of a comparison keeps f32 [default: f32]
    #[arg(long, value_name = "DTYPES")]
    pub(crate) optimizer_state: Option<StateDtypes>,

    /// On GPUs, keep masters and states of the optimizer in page-locked memory of the host, which each step reads and writes over PCIe. It
    /// changes no result
    #[arg(long)]
    pub(crate) offload_optimizer: bool,

    /// Number of micro-batches that a step is split into; their gradients are added
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) accumulate: usize,

    /// Reduce gradients in every micro-batch. Otherwise each rank adds those of its micro-batches and reduces them once per step, which
    /// takes 4 bytes per parameter on every rank
    #[arg(long)]
    pub(crate) reduce_every_micro_batch: bool,

    /// Save only the input of each block for the backward pass, which runs the block forward again: its weights are gathered again,
    /// unless they are kept
    #[arg(long)]
    pub(crate) recompute: bool,

    /// Linear layers that stay in bf16, by name: block0.qkv of a preset, model.layers.0.self_attn.q_proj of a Hugging Face model, with
    /// `.weight` at the end or without
    #[arg(long, value_name = "GLOB,..")]
    pub(crate) keep_bf16: Vec<String>,

    /// Run attention on a GPU as plain products, even if cuDNN is available: both passes, or with `=backward` that one alone
    #[arg(long, value_name = "PASS", num_args = 0..=1, require_equals = true, default_missing_value = "both", value_parser = ["both", "backward"], hide_possible_values = true)]
    pub(crate) no_cudnn: Option<String>,

    /// Let cuDNN add gradients of attention in any order, which takes less time for long sequences, and less memory; runs do not repeat
    /// to the bit then
    #[arg(long, conflicts_with = "no_cudnn")]
    pub(crate) nondeterministic_attention: bool,

    /// On GPUs, gather the weights of a block when it runs, not already while the previous block runs
    #[arg(long)]
    pub(crate) no_prefetch: bool,
}

impl ShardingArgs {
    /// The options of GPUs alone, and whether each is given.
    pub(crate) fn of_gpus(&self) -> [(&'static str, bool); 4] {
        let unordered = self.nondeterministic_attention;
        [
            ("--no-cudnn", self.no_cudnn.is_some()),
            ("--nondeterministic-attention", unordered),
            ("--no-prefetch", self.no_prefetch),
            ("--offload-optimizer", self.offload_optimizer),
        ]
    }

    /// The passes of attention that run by cuDNN.
    pub(crate) fn cudnn(&self) -> CudnnPasses {
        match self.no_cudnn.as_deref() {
            None if self.nondeterministic_attention => CudnnPasses::AnyOrder,
            None => CudnnPasses::Both,
            Some("backward") => CudnnPasses::Forward,
            Some(_) => CudnnPasses::None,
        }
    }

    /// The dtypes of masters and of the optimizer's states.
    pub(crate) fn optimizer_state(&self) -> StateDtypes {
        self.optimizer_state.unwrap_or_default()
    }
}

/// The note where masters of 16 bits beside weights in bf16 are asked for, and `name` has no layers in bf16 among those of `recipes`.
pub(crate) fn none_in_bf16(
    state: StateDtypes,
    name: &str,
    recipes: impl IntoIterator<Item = Variant>,
) -> Option<String> {
    let halves = state.master == MasterDtype::Bf16Plus16;
    let none = halves && !recipes.into_iter().any(|recipe| is_in_bf16(&recipe));
    none.then(|| {
        format!(
            "--optimizer-state master=bf16+16 is for weights in bf16, and {name} has none: all masters are in f32. master=bf16 takes 2 bytes in any recipe"
        )
    })
}
