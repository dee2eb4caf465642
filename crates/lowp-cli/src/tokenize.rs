//! `lowp tokenize`: texts as the token ids that `lowp train` reads.

use crate::usage::input_error;
use anyhow::Result;
use std::path::PathBuf;

/// Write texts as token ids, for `lowp train --data`
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp tokenize texts.jsonl --tokenizer my-llama -o tokens
  lowp tokenize chats.jsonl --tokenizer my-llama/tokenizer.json --completions -o tokens

Each line of a .jsonl file is a document; any other file is one document. Documents are written one
after the other, each followed by the token of its end. The folder has shards of u16 ids, or of u32
ids if the vocabulary is larger than 65536, and tokens.json, which lists them.")]
pub(crate) struct Args {
    /// Texts, in UTF-8
    #[arg(value_name = "TEXTS", required = true)]
    texts: Vec<PathBuf>,

    /// A tokenizer.json, or the folder of a model that has one
    #[arg(long, value_name = "FILE|DIR")]
    tokenizer: PathBuf,

    /// The folder to write
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,

    /// Key of the text in lines of JSON
    #[arg(long, value_name = "KEY", default_value = "text")]
    key: String,

    /// Lines have a `prompt` and a `completion`, of which the completion alone counts in the loss
    #[arg(long, conflicts_with = "key")]
    completions: bool,

    /// The token after each document [default: eos_token of tokenizer_config.json, or eos_token_id of config.json]
    #[arg(long, value_name = "TOKEN")]
    end: Option<String>,
}

/// Runs the command.
#[cfg(not(feature = "tokenize"))]
pub(crate) fn main(_: &Args) -> Result<()> {
    Err(input_error(
        "this lowp was built without tokenizers; build it with `cargo build --release --features tokenize`",
    ))
}

/// Runs the command.
#[cfg(feature = "tokenize")]
pub(crate) fn main(args: &Args) -> Result<()> {
    use crate::output::{self, note};
    use crate::usage::UsageError;
    use lowp_tokenize::{Fields, TokenizeError, Tokenizer, tokenize};
    use lowp_train::tokens::TokenWriter;

    let wrong = |error: TokenizeError| match error {
        TokenizeError::Write(error) => error.into(),
        error => input_error(error.to_string()),
    };
    let tokenizer = Tokenizer::open(&args.tokenizer, args.end.as_deref()).map_err(wrong)?;
    let ids = tokenizer.ids();
    if ids.end.is_none() {
        note(
            "note: no token ends the documents, since neither tokenizer_config.json nor config.json names one; --end adds it",
        );
    }
    let fields = match args.completions {
        true => Fields::Completion(["prompt", "completion"].map(ToOwned::to_owned)),
        false => Fields::Text(args.key.clone()),
    };
    let writer = TokenWriter::new(&args.output, ids, args.completions, tokenizer.digest());
    let mut writer = writer.map_err(UsageError::from)?;
    for texts in &args.texts {
        tokenize(texts, &tokenizer, &fields, &mut writer).map_err(wrong)?;
    }
    let index = writer.finish()?;
    output::print(&format!(
        "{}: {} documents, {} tokens of a vocabulary of {}, in {} shards of {}\n",
        output::shown(&args.output.display().to_string()),
        index.documents,
        index.tokens,
        index.vocab,
        index.shards.len(),
        index.dtype
    ))
}
