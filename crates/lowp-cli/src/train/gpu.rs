//! [`Gpu`]: the model on one GPU for each rank.

use super::config::Config;
use super::model::{Arch, Batch, GptConfig};
use super::network::{DeviceMemory, Network, Place, Profile};
use crate::columns::Columns;
use crate::gpus;
use crate::output;
use crate::usage::UsageError;
use anyhow::Result;
use lowp_comm::{Communicator, Control};
use lowp_format::spelling::Variant;
use lowp_fsdp::{ShardedModel, VarPlace};
use lowp_gemm::table;
use lowp_kernels::{Backend, Cuda};
use lowp_nccl::{NcclComm, NcclOptions};
use lowp_optim::{StepOptions, StepReport};
use lowp_transformer::{Block, GATHERS, MicroBatch, Sizes, Spent, Tokens, Transformer};
use std::sync::{Arc, Once};
use std::time::Duration;

type Comm = Arc<dyn Communicator<Cuda>>;

/// The model as the GPU of this rank runs it.
#[derive(Debug)]
pub(super) struct Gpu {
    transformer: Transformer<Variant>,
}

impl Network<Cuda> for Gpu {
    const VARS: VarPlace = VarPlace::Backend;

    fn new(
        cuda: &Cuda,
        sharded: &mut ShardedModel<Cuda, Variant>,
        place: Place<'_>,
    ) -> Result<Self> {
        let Place { config, rank, .. } = place;
        let sequences = config.batch / config.mesh.world() / config.accumulate;
        let first = (rank * sequences * config.model.seq) as u64;
        let part = MicroBatch {
            sequences,
            first_token: first,
            cudnn: config.cudnn,
            agree_amaxes: config.agree_amaxes,
            prefetch: config.prefetch,
            recompute: config.recompute,
        };
        let transformer = Transformer::new(cuda, sharded, &sizes(config.model), part)?;
        if let (Some(why), true, 0) = (transformer.plain_attention(), config.cudnn, rank) {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| output::note(&format!("attention runs as plain products: {why}")));
        }
        Ok(Self { transformer })
    }

    /// The place of a rank's tokens in a micro-batch is the same in all of them.
    fn random_step(step: usize, micro: usize, accumulate: usize) -> u64 {
        (step * accumulate + micro) as u64
    }

    fn train(
        &mut self,
        sharded: &mut ShardedModel<Cuda, Variant>,
        batch: &Batch,
        divisor: usize,
    ) -> Result<()> {
        let (inputs, targets) = (ids(&batch.inputs), ids(&batch.targets));
        let tokens = Tokens {
            inputs: &inputs,
            targets: &targets,
        };
        self.transformer.train(sharded, tokens, divisor)?;
        Ok(sharded.finish_micro_batch()?)
    }

    fn finish_step(
        &mut self,
        sharded: &mut ShardedModel<Cuda, Variant>,
        options: &StepOptions,
    ) -> Result<StepReport> {
        Ok(sharded.finish_step(options)?)
    }

    fn evaluate(&mut self, batch: &Batch, divisor: usize) -> Result<()> {
        let (inputs, targets) = (ids(&batch.inputs), ids(&batch.targets));
        let at_once = self.transformer.tokens();
        for (inputs, targets) in inputs.chunks(at_once).zip(targets.chunks(at_once)) {
            self.transformer
                .evaluate(Tokens { inputs, targets }, divisor)?;
        }
        Ok(())
    }

    fn take_loss(&mut self) -> Result<f64> {
        Ok(self.transformer.take_loss()?)
    }

    fn measure_memory(cuda: &Cuda) -> Result<()> {
        Ok(cuda.reset_peak_memory()?)
    }

    fn memory(&self, cuda: &Cuda) -> Result<Option<DeviceMemory>> {
        Ok(Some(DeviceMemory {
            network: self.transformer.bytes(),
            peak: cuda.peak_memory()?,
        }))
    }

    fn ways(&self) -> String {
        match self.transformer.plain_attention() {
            Some(_) => "as products".to_owned(),
            None => "by cuDNN".to_owned(),
        }
    }

    fn start_profile(&self) -> Result<()> {
        Ok(self.transformer.start_profile()?)
    }

    fn take_profile(&self) -> Result<Option<Profile>> {
        let profile = self.transformer.take_profile()?;
        let (spent, timed) = (profile.spent, profile.gathers);
        let gathers = spent.iter().filter(|spent| spent.what == GATHERS);
        let waited = gathers.map(|spent| spent.milliseconds / 1e3).sum();
        let all: f64 = spent.iter().map(|spent| spent.milliseconds).sum();
        let mut table = Columns::new(&["work", "times", "ms", "%"], &[0]);
        for Spent {
            what,
            count,
            milliseconds,
        } in spent
        {
            let share = 100.0 * milliseconds / all;
            table.row([
                what,
                count.to_string(),
                format!("{milliseconds:.3}"),
                format!("{share:.1}"),
            ]);
        }
        table.row([
            "all".to_owned(),
            String::new(),
            format!("{all:.3}"),
            String::new(),
        ]);
        Ok(Some(Profile {
            table: table.render(),
            waited,
            gathered: timed.map(|of| [of.milliseconds / 1e3, of.hidden / 1e3]),
        }))
    }
}

fn ids(bytes: &[u8]) -> Vec<u32> {
    bytes.iter().map(|&byte| u32::from(byte)).collect()
}

fn sizes(model: GptConfig) -> Sizes {
    let GptConfig {
        dim,
        layers,
        heads,
        seq,
        vocab,
        arch,
    } = model;
    Sizes {
        dim,
        layers,
        heads,
        seq,
        vocab,
        block: match arch {
            Arch::Gpt => Block::Gpt,
            Arch::Llama { kv_heads } => Block::Llama {
                kv_heads,
                gated: model.gated(),
                theta: 10_000.0,
            },
        },
    }
}

/// Checks what a GPU takes of a configuration.
///
/// # Errors
/// A [`UsageError`] with the option.
pub(super) fn check(config: &Config) -> Result<(), UsageError> {
    let parts = config.mesh.world() * config.accumulate;
    if !config.batch.is_multiple_of(parts) {
        let next = config.batch.next_multiple_of(parts);
        return Err(UsageError::new(format!(
            "--batch {} does not divide into {parts} equal micro-batches, as GPUs take them: {} ranks x --accumulate {}; take {next}",
            config.batch,
            config.mesh.world(),
            config.accumulate
        )));
    }
    let tokens = config.batch / parts * config.model.seq;
    if !tokens.is_multiple_of(128) {
        return Err(UsageError::new(format!(
            "{tokens} tokens at a time on each GPU: their number is a multiple of 128; change --batch or --seq"
        )));
    }
    for run in &config.runs {
        for linear in config.linears() {
            for tail in [false, true]
                .into_iter()
                .take(1 + usize::from(config.tail_steps > 0))
            {
                let recipe = config.recipe_of(run.recipe, &linear, tail);
                table::check(&recipe).map_err(|why| {
                    UsageError::new(format!("{}, {}: {why}", run.name, linear.name))
                })?;
            }
        }
    }
    sizes(config.model).check().map_err(UsageError::new)
}

/// The GPU and the communicator of a rank that is a process.
///
/// # Errors
/// No such GPU, no NCCL for several ranks, or a rank that failed.
pub(super) fn process(
    control: Arc<dyn Control>,
    (first, local): (usize, usize),
    limit: Duration,
) -> Result<(Cuda, Comm)> {
    let cuda = crate::device::open(first + local)?;
    let options = NcclOptions {
        limit,
        ..NcclOptions::default()
    };
    let comm = NcclComm::new(control, &cuda.fork()?, options)?;
    Ok((cuda, Arc::new(comm)))
}

/// The GPUs and communicators of ranks that are threads.
///
/// # Errors
/// Too few GPUs, no NCCL for several, or a rank that failed.
pub(super) fn world(first: usize, ranks: usize, limit: Duration) -> Result<(Vec<Cuda>, Vec<Comm>)> {
    let devices = gpus::open("--world-size", first, ranks)?;
    let options = NcclOptions {
        limit,
        ..NcclOptions::default()
    };
    let comms = gpus::join(&devices, limit, options)?;
    let comms = comms.into_iter().map(Comm::from).collect();
    Ok((devices, comms))
}

#[cfg(test)]
mod tests;
