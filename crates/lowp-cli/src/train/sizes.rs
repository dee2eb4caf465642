//! The sizes of a model as options: a preset, and single ones.

use super::dependent;
use crate::usage::UsageError;
use clap::ValueEnum;
use lowp_transformer::{Arch, GptConfig, Llama};

// No doc comment: clap would print it in place of the command's own.
// The sizes of a model that trains, one by one.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(crate) struct SizeArgs {
    /// Width of the model [default: 128]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(crate) dim: Option<usize>,

    /// Transformer blocks [default: 4]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(crate) layers: Option<usize>,

    /// Attention heads; must divide the width [default: 4]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(crate) heads: Option<usize>,

    /// Tokens per sequence [default: 128; with --model 1024, or its number of positions if that is smaller]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(crate) seq: Option<usize>,

    /// Size of the vocabulary, of which bytes use 256 [default: 256]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(crate) vocab: Option<usize>,

    /// Blocks as in GPT-2, or as in Llama, whose parameters have the names that transformers gives them [default: gpt]
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub(crate) arch: Option<ArchName>,

    /// Heads of keys and values, each for several heads of queries (with --arch llama); must divide the heads
    /// [default: as many as heads]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(crate) kv_heads: Option<usize>,
}

impl SizeArgs {
    /// `preset` with the sizes that are given.
    pub(crate) fn of(&self, preset: GptConfig) -> GptConfig {
        let heads = self.heads.unwrap_or(preset.heads);
        GptConfig {
            dim: self.dim.unwrap_or(preset.dim),
            layers: self.layers.unwrap_or(preset.layers),
            heads,
            seq: self.seq.unwrap_or(preset.seq),
            vocab: self.vocab.unwrap_or(preset.vocab),
            arch: match self.arch {
                None | Some(ArchName::Gpt) => Arch::Gpt,
                Some(ArchName::Llama) => Arch::Llama(Llama::new(self.kv_heads.unwrap_or(heads))),
            },
        }
    }

    /// Checks what is said of blocks that have none of it.
    pub(crate) fn check(&self) -> Result<(), UsageError> {
        let arch = self.of(GptConfig::default()).arch.name();
        self.kv_heads.map_or(Ok(()), |kv_heads| {
            dependent::check(&format!("--kv-heads {kv_heads}"), arch)
        })
    }

    /// The options that are given, by name.
    pub(crate) fn given(&self) -> impl Iterator<Item = &'static str> {
        [
            ("--dim", self.dim),
            ("--layers", self.layers),
            ("--heads", self.heads),
            ("--seq", self.seq),
            ("--vocab", self.vocab),
            ("--arch", self.arch.map(|_| 0)),
            ("--kv-heads", self.kv_heads),
        ]
        .into_iter()
        .filter_map(|(option, value)| value.map(|_| option))
    }
}

/// An [`Arch`] by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArchName {
    /// Layer norms, learned positions, a fused projection of queries, keys and values, GELU
    Gpt,
    /// Norms by the root mean square, rotary positions, separate projections, a gated MLP
    Llama,
}

/// Sizes by the customary name of a model's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// Width 384, 6 blocks of 6 heads, sequences of 256
    #[value(name = "10m")]
    P10m,
    /// Width 768, 12 blocks of 12 heads, sequences of 512
    #[value(name = "125m")]
    P125m,
    /// Width 1024, 24 blocks of 16 heads, sequences of 512
    #[value(name = "350m")]
    P350m,
    /// Width 2048, 24 blocks of 16 heads, sequences of 512
    #[value(name = "1b")]
    P1b,
}

impl Preset {
    /// The sizes; the vocabulary is that of bytes.
    pub(crate) fn config(self) -> GptConfig {
        let [dim, layers, heads, seq] = match self {
            Self::P10m => [384, 6, 6, 256],
            Self::P125m => [768, 12, 12, 512],
            Self::P350m => [1024, 24, 16, 512],
            Self::P1b => [2048, 24, 16, 512],
        };
        GptConfig {
            dim,
            layers,
            heads,
            seq,
            ..GptConfig::default()
        }
    }
}
