//! The memory that a run cannot do without, known before it begins: what does not fit is an error with its bytes instead
//! of ending in the allocator.

use super::ops::LOGITS;

use lowp_fsdp::LinearSpec;
use lowp_fsdp::cost::{parameter_state, variable_state};
use lowp_kernels::bf16;
use lowp_optim::{Rule, StateDtypes};
use lowp_train::{Model, Optimizer};
use lowp_transformer::GptConfig;
use thiserror::Error;

/// Values per token and unit of width that one block saves for its backward pass: two norms, the residual stream twice,
/// queries, keys and values, attention and its projection, four of `fc`, four of its GELU, `out`.
const PER_BLOCK: u128 = 19;
const F32: u128 = 4;

/// A machine with less memory than a run needs. The message names fields of configurations in backticks, so that a program may put its own
/// names there.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error(
    "training needs at least {total} bytes of memory, {bytes} of them for {what}, and this machine has {machine}; choose a smaller {remedy}"
)]
pub struct NoMemory {
    /// Bytes of all.
    pub total: u128,
    /// Bytes of what needs most.
    pub bytes: u128,
    /// What that is.
    pub what: &'static str,
    /// Bytes of the machine.
    pub machine: u128,
    /// What would help.
    pub remedy: &'static str,
}

/// Bytes that a step of `batch` sequences over `replicas` copies of the weights holds at one time, at the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needed {
    parameters: u128,
    attention: u128,
    activations: u128,
    gradients: u128,
}

impl Needed {
    /// `sequences` are those of all ranks' micro-batches, of which all are on this machine ([`Needed::of_ranks`]). With `recompute`, one
    /// block at a time has its values, and of the others only the input is kept.
    pub fn new(model: GptConfig, sequences: usize, replicas: usize, recompute: bool) -> Self {
        let [dim, layers, heads, seq, vocab] =
            [model.dim, model.layers, model.heads, model.seq, model.vocab].map(|n| n as u128);
        let tokens = sequences as u128 * seq;
        let logits = (tokens * vocab).min(LOGITS.max(model.vocab) as u128);
        let (whole, inputs) = if recompute { (1, layers) } else { (layers, 0) };
        Self {
            parameters: parameter_state(
                Rule::default(),
                StateDtypes::default(),
                model.parameters() as u128,
            ) * replicas as u128,
            attention: whole * heads * tokens * seq * F32,
            activations: (tokens * (whole * PER_BLOCK + inputs) * dim + logits) * F32,
            gradients: 0,
        }
    }

    /// With the masters of linear layers and the states of `optimizer` in these dtypes, not those of AdamW in f32.
    #[must_use]
    pub fn with_optimizer(
        self,
        model: GptConfig,
        optimizer: Optimizer,
        state: StateDtypes,
    ) -> Self {
        let all = self.parameters / parameter_state(Rule::default(), StateDtypes::default(), 1);
        let copies = all / (model.parameters() as u128).max(1);
        let of_linear = |linear: &LinearSpec| linear.rows as u128 * linear.cols as u128;
        let linear = copies * model.linears().iter().map(of_linear).sum::<u128>();
        // Matrices that are made orthogonal are in bf16.
        let matrices = match optimizer.rule().is_of_matrices() {
            true => size_of::<bf16>() as u128 * linear,
            false => 0,
        };
        let parameters = parameter_state(optimizer.rule(), state, linear)
            + variable_state(optimizer.var_rule(), state, all - linear)
            + matrices;
        Self { parameters, ..self }
    }

    /// Of `here` ranks on this machine, of `world` in all.
    #[must_use]
    pub fn of_ranks(self, here: usize, world: usize) -> Self {
        let share = |bytes: u128| bytes * here as u128 / world.max(1) as u128;
        Self {
            parameters: share(self.parameters),
            attention: share(self.attention),
            activations: share(self.activations),
            gradients: share(self.gradients),
        }
    }

    /// With full gradients that each of `ranks` ranks keeps from micro-batch to micro-batch.
    #[must_use]
    pub fn keeping_gradients(mut self, model: GptConfig, ranks: usize) -> Self {
        self.gradients += model.parameters() as u128 * F32 * ranks as u128;
        self
    }

    fn total(&self) -> u128 {
        self.parameters + self.attention + self.activations + self.gradients
    }

    /// Rejects what `machine` bytes cannot hold.
    ///
    /// # Errors
    /// A [`NoMemory`] with the bytes needed, what needs most of them, and what would help.
    pub fn check(&self, machine: u128) -> Result<(), NoMemory> {
        let Self {
            parameters,
            attention,
            activations,
            gradients,
        } = *self;
        if self.total() <= machine {
            return Ok(());
        }
        let (bytes, what, remedy) = [
            (parameters, "the parameters", "`dim` or `layers`"),
            (
                attention,
                "attention",
                "`seq`, which counts squared, or `batch`, or add `recompute` or `accumulate`",
            ),
            (
                activations,
                "activations",
                "`batch` or `seq`, or add `recompute` or `accumulate`",
            ),
            (
                gradients,
                "gradients that ranks keep between micro-batches",
                "`dim` or `layers`, or add `reduce_every_micro_batch`",
            ),
        ]
        .into_iter()
        .max_by_key(|(bytes, ..)| *bytes)
        .unwrap_or_default();
        Err(NoMemory {
            total: self.total(),
            bytes,
            what,
            machine,
            remedy,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_transformer::Arch;

    const MODEL: GptConfig = GptConfig {
        dim: 128,
        layers: 4,
        heads: 4,
        seq: 128,
        vocab: 256,
        arch: Arch::Gpt,
    };

    #[test]
    fn what_does_not_fit_is_an_error_with_its_bytes() {
        let fits = Needed::new(MODEL, 16, 1, false);
        assert!(fits.check(fits.total()).is_ok() && fits.total() < 1 << 28);
        let long = Needed::new(
            GptConfig {
                seq: 65_536,
                ..MODEL
            },
            16,
            1,
            false,
        );
        let text = long.check(1 << 40).unwrap_err().to_string();
        let attention = 4u128 * 4 * 16 * 65_536 * 65_536 * 4;
        assert!(
            text.contains(&format!("{attention} of them for attention")),
            "{text}"
        );
        assert!(
            text.contains("`seq`") && text.contains("this machine has 1099511627776"),
            "{text}"
        );
        let wide = Needed::new(MODEL, 65_536, 1, false);
        let text = wide.check(1 << 36).unwrap_err().to_string();
        assert!(text.contains("`batch`"), "{text}");
        let largest = GptConfig {
            dim: 1 << 14,
            layers: 1 << 10,
            heads: 1 << 14,
            seq: 1 << 16,
            vocab: 1 << 20,
            arch: Arch::Gpt,
        };
        assert!(
            Needed::new(largest, 1 << 16, 64, true)
                .check(u128::from(u64::MAX))
                .is_err()
        );
    }

    /// Linear weights and variables have the states of their rules.
    #[test]
    fn optimizers_need_what_they_keep() {
        let linears = MODEL.linears();
        let linear: usize = linears.iter().map(|linear| linear.rows * linear.cols).sum();
        let vars = MODEL.parameters() - linear;
        let all = Needed::new(MODEL, 16, 2, false);
        let of = |optimizer, state: &str| {
            let state = match state {
                "" => StateDtypes::default(),
                state => state.parse().expect("dtypes"),
            };
            all.with_optimizer(MODEL, optimizer, state).parameters
        };
        let bytes =
            |[of_linear, of_var]: [usize; 2]| 2 * (of_linear * linear + of_var * vars) as u128;
        assert_eq!(of(Optimizer::AdamW, ""), all.parameters);
        assert_eq!(of(Optimizer::AdamW, ""), bytes([16; 2]));
        assert_eq!(
            of(Optimizer::AdamW, "master=bf16,exp_avg=bf16"),
            bytes([12; 2])
        );
        assert_eq!(of(Optimizer::Lion, ""), bytes([12; 2]));
        assert_eq!(of(Optimizer::Muon, ""), bytes([14, 16]));
    }

    /// Each rank keeps full gradients; other machines have their own.
    #[test]
    fn ranks_on_other_machines_need_nothing_here() {
        let gradients = MODEL.parameters() as u128 * 4;
        let all = Needed::new(MODEL, 64, 1, false);
        let here = all.of_ranks(4, 64);
        assert!(here.total() <= all.total() / 16);
        let kept = here.keeping_gradients(MODEL, 4);
        assert_eq!(kept.total(), here.total() + 4 * gradients);
        let kept = here.keeping_gradients(MODEL, 1000);
        let error = kept.check(1 << 20).expect_err("too much").to_string();
        assert!(error.contains("add `reduce_every_micro_batch`"), "{error}");
    }
}
