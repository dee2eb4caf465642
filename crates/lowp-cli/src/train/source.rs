//! [`Source`]: what is trained on: text as bytes, or tokens.

use super::args::Args;
use super::config::Setup;
use super::options::failed;
use crate::device::Device;
use crate::usage::input_error;
use anyhow::Result;
use lowp_train::tokens::Packing;
use lowp_train::{Batch, Data, Text, Tokens, TrainError};
use std::ops::Range;
use std::path::PathBuf;

/// The part of the sequences of tokens that is the validation split, unless --held-out is given.
const HELD_OUT: f64 = 0.1;

/// Text, or tokens.
#[derive(Debug)]
pub(crate) enum Source {
    Text(Text),
    Tokens(Tokens),
}

impl Source {
    /// What `--data` names, or `bundled`.
    pub(crate) fn open(args: &Args, setup: &Setup, bundled: &[u8]) -> Result<Self> {
        let (seq, model) = (setup.config.model.seq, setup.folder.is_some());
        let is_text = |path: &PathBuf| !Tokens::are_at(path);
        let of_tokens = [
            ("--mask-documents", args.mask_documents),
            ("--held-out", args.held_out.is_some()),
        ];
        let given = of_tokens.into_iter().find(|(_, given)| *given);
        if let (Some((option, _)), false) = (given, model)
            && args.data.as_ref().is_none_or(is_text)
        {
            return Err(input_error(format!(
                "{option} only applies to tokens, and this data is text; leave it out"
            )));
        }
        let Some(path) = &args.data else {
            if model {
                return Err(input_error(
                    "--model is trained on tokens: add --data DIR, a folder that `lowp tokenize` wrote",
                ));
            }
            let text = Text::new(bundled.to_vec(), seq).map_err(failed)?;
            return Ok(Self::Text(text));
        };
        if !Tokens::are_at(path) {
            if model {
                return Err(input_error(format!(
                    "--data {} holds no tokens, which --model is trained on: give a folder that `lowp tokenize` wrote, a .npy file, or \
                     the .bin and .idx files of Megatron-LM",
                    path.display()
                )));
            }
            return Ok(Self::Text(Text::read(path, seq).map_err(failed)?));
        }
        let packing = Packing {
            seq,
            batch: setup.config.batch,
            held_out: args.held_out.unwrap_or(HELD_OUT),
            mask_documents: args.mask_documents,
        };
        let tokens = Tokens::open(path, packing).map_err(failed)?;
        let most = setup.config.model.vocab;
        if let Some(id) = tokens.largest().filter(|&id| id as usize >= most) {
            return Err(input_error(format!(
                "--data {} has the id {id}, and the vocabulary of the model has {most}; tokenize with the model's own tokenizer",
                path.display()
            )));
        }
        if tokens.is_masked() && setup.device != Device::Cpu {
            return Err(input_error(
                "masks of tokens and --mask-documents only apply to a CPU; leave --device out, or train on tokens without masks",
            ));
        }
        Ok(Self::Tokens(tokens))
    }
}

impl Data for Source {
    type Batch = Batch;

    fn train(&self, seed: u64, step: usize, range: Range<usize>) -> Result<Batch, TrainError> {
        match self {
            Self::Text(text) => text.train(seed, step, range),
            Self::Tokens(tokens) => tokens.train(seed, step, range),
        }
    }

    fn validation(&self, total: usize, range: Range<usize>) -> Result<Batch, TrainError> {
        match self {
            Self::Text(text) => text.validation(total, range),
            Self::Tokens(tokens) => tokens.validation(total, range),
        }
    }

    fn targets(&self, seed: u64, step: usize, sequences: usize) -> Result<usize, TrainError> {
        match self {
            Self::Text(text) => text.targets(seed, step, sequences),
            Self::Tokens(tokens) => Data::targets(tokens, seed, step, sequences),
        }
    }

    fn validation_targets(&self, total: usize) -> Result<usize, TrainError> {
        match self {
            Self::Text(text) => text.validation_targets(total),
            Self::Tokens(tokens) => tokens.validation_targets(total),
        }
    }

    fn tokens(&self) -> usize {
        match self {
            Self::Text(text) => text.tokens(),
            Self::Tokens(tokens) => Data::tokens(tokens),
        }
    }

    fn digest(&self) -> String {
        match self {
            Self::Text(text) => text.digest(),
            Self::Tokens(tokens) => tokens.digest(),
        }
    }
}
