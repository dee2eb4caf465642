//! [`OptimizerArgs`]: the options of `lowp train` for hyperparameters, and what they are where none are given.

use crate::one_of::{Named, one_of};
use crate::usage::UsageError;
use lowp_optim::{Decay, Group};
use lowp_train::{Optimizer, TrainError};

/// How a learning rate falls; --decay-steps says over how many last steps.
const SCHEDULES: &[Named<Decay>] = &[
    (Decay::Cosine.name(), "Half a cosine", Decay::Cosine),
    (Decay::Linear.name(), "Linearly", Decay::Linear),
    (
        WSD.name(),
        "Constant up to the last --decay-steps, then linearly",
        WSD,
    ),
];
const WSD: Decay = Decay::Stable { decay: 0 };

// No doc comment: clap would print it in place of the command's own.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(crate) struct OptimizerArgs {
    /// Highest learning rate: linear warm-up, then --schedule down to --final-lr of it [default: 3e-3 with adamw and moonlight, 1e-3 with
    /// lion, 0.1 with sgd, 0.02 with muon; with the weights of --model 2e-5, 7e-6, 7e-4, 1e-4]
    #[arg(long, value_name = "LR", allow_negative_numbers = true)]
    pub(super) lr: Option<f64>,

    /// With muon and moonlight, the highest learning rate of what adamw updates: embeddings, heads, norms and biases [default: 3e-3, or 2e-5
    /// with the weights of --model]
    #[arg(long, value_name = "LR", allow_negative_numbers = true)]
    pub(super) var_lr: Option<f64>,

    /// How the learning rate falls after warm-up
    #[arg(long, value_name = "NAME", default_value = "cosine", value_parser = one_of(SCHEDULES))]
    pub(super) schedule: Decay,

    /// Last steps in which the learning rate falls, with --schedule wsd [default: a fifth of the steps, at most those after warm-up]
    #[arg(long, value_name = "N")]
    pub(super) decay_steps: Option<u64>,

    /// Learning rate of the last step, as a fraction of the highest
    #[arg(
        long,
        value_name = "FRACTION",
        default_value_t = 0.1,
        allow_negative_numbers = true
    )]
    pub(super) final_lr: f64,

    /// Warm-up steps [default: a tenth of the steps, at most 100]
    #[arg(long, value_name = "N")]
    pub(super) warmup: Option<usize>,

    /// Decay of the second moment of adamw, and of the momentum of lion [default: 0.95, or 0.99 with lion]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(super) beta2: Option<f64>,

    /// Weight decay of all matrices but those of --no-decay: decoupled, or added to gradients with sgd [default: 0.1, or 0.3 with lion, 0
    /// with sgd]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(super) weight_decay: Option<f64>,

    /// Matrices that stay in f32 and do not decay, by name [default: none, or the embedding with --model]
    #[arg(long, value_name = "GLOB,..")]
    pub(super) no_decay: Vec<String>,

    /// Global gradient norm above which gradients are scaled down
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    pub(super) clip: f64,

    /// Coefficient of the z-loss: adds X * (log sum exp of the logits)^2 to the loss that is differentiated, which keeps logits small.
    /// Losses that are shown are without it
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub(super) z_loss: f64,
}

impl OptimizerArgs {
    /// How the learning rate falls.
    pub(super) fn decay(&self, steps: u64, warmup: u64) -> Decay {
        let fifth = steps.div_ceil(5).min(steps.saturating_sub(warmup));
        match self.schedule {
            Decay::Stable { .. } => Decay::Stable {
                decay: self.decay_steps.unwrap_or(fifth),
            },
            other => other,
        }
    }
}

/// What hyperparameters are unless options say otherwise, and the learning rate of variables; the weights are random, or of a model that
/// `is_trained`.
pub(super) fn defaults(optimizer: Optimizer, is_trained: bool) -> (Group, f32) {
    let rate = |optimizer: Optimizer| match is_trained {
        true => optimizer.fine_tuning_rate(),
        false => optimizer.defaults().lr,
    };
    let (own, adamw) = (optimizer.defaults(), Optimizer::AdamW.defaults());
    // Beside an optimizer of matrices AdamW updates variables.
    let (betas, var_lr) = match optimizer.rule().is_of_matrices() {
        true => (adamw.betas, rate(Optimizer::AdamW)),
        false => (own.betas, adamw.lr),
    };
    let lr = rate(optimizer);
    (Group { lr, betas, ..own }, var_lr)
}

/// `value` as the optimizer holds it: finite, and above zero unless `zero` is fine.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the check is made on the narrow value"
)]
pub(super) fn narrow(field: &'static str, value: f64, zero: bool) -> Result<f32, UsageError> {
    let narrow = value as f32;
    if narrow.is_finite() && (narrow > 0.0 || (zero && value == 0.0)) {
        return Ok(narrow);
    }
    Err(TrainError::Number { field, value, zero }.into())
}
