//! Checks of the options of `lowp train` beside each other and of their numbers; `lowp plan` shares some of them.

use super::args::Args;
use super::dependent;
use crate::usage::UsageError;
use lowp_comm::Mesh;
use lowp_fsdp::cost::MAX_RANKS;
use lowp_train::{MAX_BATCH, TrainError};
use lowp_transformer::GptConfig;

/// Most steps of one run.
pub(super) const MAX_STEPS: usize = 10_000_000;
/// Most ranks that are threads of one process.
const MAX_THREADS: usize = 64;
/// Most tokens that a rank has at a time.
const MAX_TOKENS: usize = 1 << 24;

/// Options that mean something only beside some values of others.
pub(super) fn options(args: &Args) -> Result<(), UsageError> {
    args.sizes.check()?;
    let (sharded, own) = (&args.sharded, &args.optimizer);
    let optimizer = sharded.optimizer.name();
    let decay_steps = own.decay_steps.map(|n| format!("--decay-steps {n}"));
    let of_others = [
        (decay_steps.as_deref(), own.schedule.name()),
        (own.var_lr.map(|_| "--var-lr"), optimizer),
        (own.beta2.map(|_| "--beta2"), optimizer),
    ];
    let of_train = [
        ("--profile", args.profile),
        ("--agree-amaxes", args.agree_amaxes),
    ];
    let of_gpus = of_train.into_iter().chain(sharded.of_gpus());
    let of_gpus = of_gpus.map(|(option, given)| (given.then_some(option), args.device.kind()));
    for (given, value) in of_others.into_iter().chain(of_gpus) {
        given.map_or(Ok(()), |given| dependent::check(given, value))?;
    }
    Ok(())
}

/// The numbers of ranks and sequences, and the sizes of a model, which are fixed where a folder has them.
pub(super) fn sizes(
    args: &Args,
    mesh: Mesh,
    is_launched: bool,
    model: GptConfig,
    is_fixed: bool,
) -> Result<(), UsageError> {
    let ranks = match args.sharded.mesh {
        Some(_) => "--mesh: its number of ranks",
        None => "--world-size",
    };
    let most = if is_launched { MAX_RANKS } else { MAX_THREADS };
    check_ranges(&[
        (ranks, mesh.world(), most),
        ("--batch", args.batch, MAX_BATCH),
    ])?;
    model.check()?;
    if !is_fixed {
        model.check_bytes()?;
    }
    let parts = mesh.world().saturating_mul(args.sharded.accumulate);
    check_tokens(args.batch, parts, model.seq)?;
    if !is_fixed {
        model.check_parameters()?;
    }
    Ok(())
}

/// Numbers that only the log has.
pub(super) fn log(args: &Args, steps: usize) -> Result<(), UsageError> {
    if let Some(value) = args.log_codes.filter(|every| !(1..=steps).contains(every)) {
        let field = "log_codes";
        return Err(TrainError::OutsideOfSteps {
            field,
            value,
            steps,
        }
        .into());
    }
    let wrong = |peak: &f64| !(peak.is_finite() && *peak > 0.0);
    match args.peak_tflops.filter(wrong) {
        Some(peak) => Err(UsageError::new(format!(
            "--peak-tflops {peak}: expected a positive number"
        ))),
        None => Ok(()),
    }
}

/// Numbers of options that are from 1 to a most.
pub(crate) fn check_ranges(counts: &[(&str, usize, usize)]) -> Result<(), UsageError> {
    for &(option, value, most) in counts {
        if !(1..=most).contains(&value) {
            return Err(UsageError::new(format!(
                "{option} must be from 1 to {most}, not {value}"
            )));
        }
    }
    Ok(())
}

/// The tokens that each rank has at a time, of a batch in as many `parts` as ranks have micro-batches.
pub(crate) fn check_tokens(batch: usize, parts: usize, seq: usize) -> Result<(), UsageError> {
    let tokens = batch.div_ceil(parts.max(1)) * seq;
    match tokens > MAX_TOKENS {
        true => Err(UsageError::new(format!(
            "--batch {batch} with --seq {seq} gives a rank {tokens} tokens at a time; the maximum is {MAX_TOKENS}; choose a smaller --batch or --seq, or add --accumulate"
        ))),
        false => Ok(()),
    }
}

/// Sequences that a GPU has at a time: micro-batches are equal there.
pub(crate) fn sequences_at_once(
    batch: usize,
    ranks: usize,
    accumulate: usize,
) -> Result<usize, UsageError> {
    let parts = ranks * accumulate;
    match batch.is_multiple_of(parts) && batch > 0 {
        true => Ok(batch / parts),
        false => Err(UsageError::new(format!(
            "--batch {batch} cannot be divided into {parts} equal micro-batches, as GPUs need ({ranks} ranks x --accumulate {accumulate}); give --batch {}",
            batch.max(1).next_multiple_of(parts)
        ))),
    }
}
