//! [`Setup`]: a small model, trained as a test says.

use super::super::Gpt;
use crate::{CandleVars, layers, transients};
use anyhow::Error;
use lowp_checkpoint::{Checkpoint, Saver};
use lowp_comm::{Mesh, MeshComm, run_ranks};
use lowp_format::{AnyRecipe, Phase, Recipe, ReshardAfterForward};
use lowp_fsdp::{ModelError, ModelOptions, Passes, SavedModel, ShardedModel, Sharding, VarPlace};
use lowp_kernels::Cpu;
use lowp_optim::{Group, StepOptions};
use lowp_shard::GradBucketOptions;
use lowp_train::Batch;
use lowp_train::Model;
use lowp_transformer::{Arch, GptConfig};
use std::path::PathBuf;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Bits of the weights that products read, by layer and phase.
pub(super) type Weights = Vec<Vec<u32>>;

/// How the model is trained.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) recipe: AnyRecipe,
    pub(super) world: usize,
    pub(super) sharding: Sharding,
    pub(super) reshard: ReshardAfterForward,
    pub(super) passes: Passes,
    pub(super) steps: u64,
    /// The step before which weights go to another recipe.
    pub(super) switch: Option<(u64, [AnyRecipe; 2])>,
    /// Replicas; each has `world` over this many ranks.
    pub(super) replicas: usize,
    /// What the blocks are.
    pub(super) arch: Arch,
    /// The checkpoint that it goes on from.
    pub(super) from: Option<PathBuf>,
    /// Where the checkpoint after the last step goes.
    pub(super) to: Option<PathBuf>,
}

impl Setup {
    /// Rows of `world` ranks, three steps.
    pub(super) fn new(recipe: AnyRecipe, world: usize) -> Self {
        Self {
            recipe,
            world,
            sharding: Sharding::Fsdp,
            reshard: ReshardAfterForward::Yes,
            passes: Passes::default(),
            steps: 3,
            switch: None,
            replicas: 1,
            arch: Arch::Gpt,
            from: None,
            to: None,
        }
    }

    /// Losses of all steps, and the weights after them.
    pub(super) fn train(self) -> (Vec<f32>, Weights) {
        let Self {
            recipe,
            world,
            sharding,
            reshard,
            passes,
            steps,
            switch,
            replicas,
            arch,
            from,
            to,
        } = self;
        let config = GptConfig {
            dim: 64,
            layers: 1,
            heads: 2,
            seq: 32,
            vocab: 256,
            arch,
        };
        // Four sequences, or as many as there are parts of a batch.
        let sequences = 4.max(world * passes.micro_batches);
        let text = 0..33 * sequences as u32;
        let text: Vec<u32> = text.map(|i| i * i % 251).collect();
        let mut losses = run_ranks(&Cpu, world, TIMEOUT, |rank, comm| {
            let cpu = Cpu;
            let options = ModelOptions {
                sharding,
                reshard_after_forward: reshard,
                grads: GradBucketOptions::default(),
                seed: 7,
                group: Group {
                    lr: 0.01,
                    ..Group::default()
                },
                vars: VarPlace::Host,
                ..ModelOptions::default()
            };
            let mesh = Mesh {
                replicate: replicas,
                shard: world / replicas,
            };
            let mesh = MeshComm::new(mesh, comm.clone())?;
            let (linears, vars) = (config.linears(), config.vars());
            let mut first_step = 0;
            let mut sharded = match &from {
                None => ShardedModel::new(&cpu, &mesh, |_| recipe, &linears, &vars, options)?,
                Some(folder) => {
                    let checkpoint = Checkpoint::latest(folder)?;
                    first_step = checkpoint.step();
                    let about = checkpoint.about();
                    let saved = SavedModel {
                        checkpoint: &checkpoint,
                        weights: &about["weights"],
                        scales: &about["scales"],
                    };
                    ShardedModel::load(&cpu, &mesh, |_| recipe, &linears, &vars, options, saved)?
                }
            };
            let over = |sharded: &mut ShardedModel<Cpu, AnyRecipe>| {
                let vars = CandleVars::new(sharded)?;
                let gpt = Gpt::new(
                    config,
                    layers(sharded, 1),
                    vars.vars().to_vec(),
                    transients(sharded),
                    1,
                    passes.recompute,
                )?;
                Ok::<_, Error>((gpt, vars))
            };
            let (mut gpt, mut own) = over(&mut sharded)?;
            let micro_batches = passes.micro_batches;
            let mut losses = Vec::new();
            let mut since = first_step;
            for step in first_step..steps {
                if let Some((_, recipes)) = switch.filter(|(at, _)| *at == step) {
                    for recipe in recipes {
                        sharded = sharded.in_recipes(|_| recipe, &linears, &vars)?;
                    }
                    (gpt, own) = over(&mut sharded)?;
                    since = step;
                }
                // Dealt to ranks and micro-batches in order.
                let parts = world * micro_batches;
                let mut total = [0.0];
                for micro in 0..micro_batches {
                    let part = rank * micro_batches + micro;
                    let (first, last) = (sequences * part / parts, sequences * (part + 1) / parts);
                    let slice = |shift: usize| -> Vec<u32> {
                        let sequence = |s: usize| &text[33 * s + shift..33 * s + shift + 32];
                        (first..last).flat_map(sequence).copied().collect()
                    };
                    let batch = Batch::new(slice(0), slice(1));
                    sharded.begin(step, (first * 32) as u64, true)?;
                    let loss = gpt.loss(&batch, 32 * sequences)?;
                    own.add_gradients(&mut sharded, &loss.backward()?)?;
                    total[0] += f64::from(loss.value()?);
                }
                comm.control().sum(&mut total)?;
                losses.push(total[0] as f32);
                let step = StepOptions::default();
                assert!(own.finish_step(&mut sharded, &step)?.applied);
            }
            let bytes = sharded.weight_bytes(passes)?;
            assert_eq!(
                bytes.sent,
                (steps - since) * bytes.sent_per_step,
                "{}",
                recipe.name()
            );
            assert_eq!(sharded.audit()?, [], "{}", recipe.name());
            let mut weights = Weights::new();
            for layer in 0..linears.len() {
                for phase in Phase::ALL {
                    sharded
                        .weight(layer)
                        .expect("a layer")
                        .with_values(phase, |w| {
                            weights.push(w.iter().map(|x| x.to_bits()).collect());
                            Ok::<_, ModelError>(())
                        })?;
                }
            }
            let counts = sharded.optimizer().counts()?;
            assert_eq!([counts.applied, counts.skipped], [steps, 0]);
            if let Some(folder) = &to {
                let control = comm.control().split(0, rank)?;
                let mut saver = Saver::new(control, folder, None)?;
                let about = serde_json::json!({
                    "weights": sharded.about(),
                    "scales": sharded.about_scales()?,
                });
                saver.start(steps, sharded.pieces()?, about)?;
                saver.finish()?;
            }
            Ok::<_, Error>((losses, weights))
        })
        .unwrap_or_else(|e| panic!("{}: {e}", recipe.name()));
        losses.swap_remove(0)
    }
}

/// Whether long tests run whole.
pub(super) fn exhaustive() -> bool {
    std::env::var_os("LOWP_EXHAUSTIVE").is_some_and(|value| value == "1")
}

/// Of `settings` every other one for the recipe `index`, the rest for the next recipe; all for each with `LOWP_EXHAUSTIVE=1`.
pub(super) fn some_for<T, const N: usize>(index: usize, settings: [T; N]) -> Vec<T> {
    let settings = settings.into_iter().enumerate();
    let taken = settings.filter(|(n, _)| exhaustive() || (n + index).is_multiple_of(2));
    taken.map(|(_, setting)| setting).collect()
}
