//! [`tokenize`]: the documents of a file, as token ids.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use lowp_train::tokens::TokenWriter;
use serde_json::Value;

use crate::error::TokenizeError;
use crate::tokenizer::Tokenizer;

/// Documents that are encoded at a time, on all cores.
const AT_ONCE: usize = 1024;

/// What a line of JSON has of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fields {
    /// Its text, under this key; all of it counts in the loss.
    Text(String),
    /// A prompt and a completion, under these keys, tokenized as one text; the completion alone counts.
    Completion([String; 2]),
}

/// Adds the documents of the file `texts` to `writer`, which is masked where `fields` are a completion: each line of a `.jsonl` file is one, and
/// any other file is one, of UTF-8. Returns how many there were.
///
/// # Errors
/// A file that cannot be read, a line without the fields, or tokens that cannot be written.
pub fn tokenize(
    texts: &Path,
    tokenizer: &Tokenizer,
    fields: &Fields,
    writer: &mut TokenWriter,
) -> Result<u64, TokenizeError> {
    let is_json = texts
        .extension()
        .is_some_and(|end| end == "jsonl" || end == "ndjson");
    if !is_json {
        let text = std::fs::read_to_string(texts).map_err(|e| TokenizeError::file(texts, e))?;
        let document = match fields {
            Fields::Text(_) => [text, String::new()],
            Fields::Completion(_) => {
                let why = "prompts and completions are lines of a .jsonl file";
                return Err(TokenizeError::file(texts, why));
            }
        };
        add(vec![document], (tokenizer, fields), writer, texts)?;
        return Ok(1);
    }
    let file = File::open(texts).map_err(|e| TokenizeError::file(texts, e))?;
    let (mut number, mut found) = (0, 0);
    let mut documents = Vec::with_capacity(AT_ONCE);
    for line in BufReader::with_capacity(1 << 20, file).lines() {
        number += 1;
        let line = line.map_err(|e| TokenizeError::file(texts, e))?;
        if line.trim().is_empty() {
            continue;
        }
        let document = document(&line, fields).map_err(|why| TokenizeError::Line {
            path: texts.to_owned(),
            line: number,
            why,
        })?;
        documents.push(document);
        found += 1;
        if documents.len() == AT_ONCE {
            add(
                std::mem::take(&mut documents),
                (tokenizer, fields),
                writer,
                texts,
            )?;
        }
    }
    add(documents, (tokenizer, fields), writer, texts)?;
    Ok(found)
}

/// The texts of a line: of the prompt, or of the whole document, and of the completion.
fn document(line: &str, fields: &Fields) -> Result<[String; 2], String> {
    let value: Value = serde_json::from_str(line).map_err(|e| format!("it is no JSON: {e}"))?;
    let text = |key: &str| {
        let text = value[key].as_str().map(ToOwned::to_owned);
        text.ok_or_else(|| format!("it is no object with a text under {key:?}"))
    };
    match fields {
        Fields::Text(key) => Ok([text(key)?, String::new()]),
        Fields::Completion([prompt, completion]) => Ok([text(prompt)?, text(completion)?]),
    }
}

fn add(
    documents: Vec<[String; 2]>,
    (tokenizer, fields): (&Tokenizer, &Fields),
    writer: &mut TokenWriter,
    texts: &Path,
) -> Result<(), TokenizeError> {
    // A completion goes on where its prompt ends: tokens are those of both as one text.
    let prompts: Vec<usize> = documents
        .iter()
        .map(|[prompt, _]| prompt.chars().count())
        .collect();
    let whole = documents.into_iter().map(|parts| parts.concat()).collect();
    let encoded = tokenizer
        .encode(whole)
        .map_err(|why| TokenizeError::file(texts, why))?;
    let masked = matches!(fields, Fields::Completion(_));
    for (tokens, prompt) in encoded.into_iter().zip(prompts) {
        let (ids, counted): (Vec<u32>, Vec<bool>) = tokens
            .into_iter()
            .map(|token| (token.id, !masked || token.end > prompt))
            .unzip();
        writer.document(&ids, &counted)?;
    }
    Ok(())
}
