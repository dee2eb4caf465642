//! What is trained on: text as bytes, or tokens.

use super::args::Args;
use super::checks::MAX_STEPS;
use super::config::Setup;
use super::data::DataArg;
use super::dependent;
use super::options::failed;
use crate::usage::input_error;
use anyhow::Result;
use lowp_train::tokens::Packing;
use lowp_train::{Batch, Data, Mixture, Text, Tokens};
use lowp_transformer::GptConfig;
use std::sync::Arc;

/// The batches of text or of tokens.
pub(crate) type Batches = dyn Data<Batch = Batch> + Send;

/// The part of the sequences of tokens that is the validation split, unless --held-out is given.
const HELD_OUT: f64 = 0.1;

/// What `--data` names, or `bundled`.
pub(crate) fn open(args: &Args, setup: &Setup, bundled: &[u8]) -> Result<Arc<Batches>> {
    let (seq, model) = (setup.config.model.seq, setup.folder.is_some());
    let of_tokens = [
        ("--mask-documents", args.mask_documents),
        ("--held-out", args.held_out.is_some()),
    ];
    let first = args
        .data
        .first()
        .map_or_else(String::new, DataArg::to_string);
    for (option, _) in of_tokens.into_iter().filter(|(_, given)| *given && !model) {
        // Several sources are of tokens, or `tokens` says that they are not.
        if args.data.len() < 2 {
            dependent::check(option, &first)?;
        }
    }
    if !is_text(args) {
        let tokens = match &setup.tokens {
            Some(tokens) => tokens.clone(),
            None => tokens(args, &setup.config.model)?.into(),
        };
        return Ok(tokens);
    }
    let Some(data @ DataArg { path, weight }) = args.data.first() else {
        if model {
            return Err(input_error(
                "--model is trained on tokens: add --data DIR, a folder that `lowp tokenize` wrote",
            ));
        }
        let text = Text::new(bundled.to_vec(), seq).map_err(failed)?;
        return Ok(Arc::new(text));
    };
    if model {
        return Err(input_error(format!(
            "--data {data} holds no tokens, which --model is trained on: give a folder that `lowp tokenize` wrote, a .npy file, or the .bin \
             and .idx files of Megatron-LM"
        )));
    }
    if weight.is_some() {
        return Err(input_error(format!(
            "--data {data}: weights are of several sources of tokens, and this is text; leave the weight out"
        )));
    }
    Ok(Arc::new(Text::read(path, seq).map_err(failed)?))
}

/// Whether the data are text: no `--data`, or one that has no tokens.
fn is_text(args: &Args) -> bool {
    match &args.data[..] {
        [] => true,
        [one] => !Tokens::are_at(&one.path),
        _ => false,
    }
}

/// The tokens of all sources.
fn tokens(args: &Args, model: &GptConfig) -> Result<Mixture> {
    let packing = Packing {
        seq: model.seq,
        batch: args.batch,
        held_out: args.held_out.unwrap_or(HELD_OUT),
        mask_documents: args.mask_documents,
    };
    let weighted = |given: bool| args.data.iter().find(|data| data.weight.is_some() == given);
    if let (Some(with), Some(without)) = (weighted(true), weighted(false)) {
        return Err(input_error(format!(
            "--data {with} has a weight and --data {without} has none; give each source a weight, or none"
        )));
    }
    let mut sources = Vec::new();
    for data @ DataArg { path, weight } in &args.data {
        if !Tokens::are_at(path) {
            return Err(input_error(format!(
                "--data {data} holds no tokens, and several sources are of tokens; tokenize it, or give one --data"
            )));
        }
        let tokens = Tokens::open(path, packing).map_err(failed)?;
        let most = model.vocab;
        if let Some(id) = tokens.largest().filter(|&id| id as usize >= most) {
            return Err(input_error(format!(
                "--data {data} has the id {id}, and the vocabulary of the model has {most}; tokenize with the model's own tokenizer"
            )));
        }
        sources.push((tokens, weight.unwrap_or(1.0)));
    }
    Mixture::new(sources).map_err(failed)
}

/// The steps in which a run sees as many sequences as `epochs` times the training splits of all sources have, and these sources.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the range is checked after it"
)]
pub(crate) fn steps(
    args: &Args,
    model: GptConfig,
    folder: bool,
    epochs: f64,
) -> Result<(usize, Option<Arc<Mixture>>)> {
    if is_text(args) && !folder {
        return Err(input_error(format!(
            "--epochs {epochs} only applies to tokens, and this data is text, whose sequences begin anywhere; give --steps or --tokens"
        )));
    }
    if !(epochs.is_finite() && epochs > 0.0) {
        return Err(input_error(format!(
            "--epochs {epochs}: expected a positive number"
        )));
    }
    let tokens = match is_text(args) {
        // `open` reports the error.
        true => None,
        false => Some(Arc::new(tokens(args, &model)?)),
    };
    let sequences = tokens.as_ref().map_or(Some(1), |tokens| tokens.sequences());
    let sequences = sequences.unwrap_or(0);
    let steps = (epochs * sequences as f64 / args.batch.max(1) as f64).ceil();
    match (1.0..=MAX_STEPS as f64).contains(&steps) {
        true => Ok((steps as usize, tokens)),
        false => Err(input_error(format!(
            "--epochs {epochs} of {sequences} sequences gives {steps} steps; a run has 1 to {MAX_STEPS} steps; change --epochs or --batch"
        ))),
    }
}
