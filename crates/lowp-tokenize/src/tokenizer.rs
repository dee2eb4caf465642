//! [`Tokenizer`]: the `tokenizer.json` of a model, and the token that ends its documents.

use std::path::Path;

use lowp_train::tokens::TokenIds;
use serde_json::Value;

use crate::error::TokenizeError;

/// A tokenizer with the token that ends a document.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocab: usize,
    end: Option<u32>,
    digest: String,
}

impl Tokenizer {
    /// The tokenizer in the file `path`, or in the `tokenizer.json` of the folder `path`. The token that ends documents is `end`, or, where
    /// that is not given, the one that `tokenizer_config.json` or `config.json` next to it names; none where neither does.
    ///
    /// # Errors
    /// It cannot be read, or does not know the token.
    pub fn open(path: &Path, end: Option<&str>) -> Result<Self, TokenizeError> {
        let path = &match path.is_dir() {
            true => path.join("tokenizer.json"),
            false => path.to_owned(),
        };
        let bytes = std::fs::read(path).map_err(|e| TokenizeError::file(path, e))?;
        let inner = tokenizers::Tokenizer::from_bytes(&bytes);
        let mut inner = inner.map_err(|e| TokenizeError::file(path, e))?;
        // Training neither cuts texts nor fills them up.
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|e| TokenizeError::file(path, e))?;
        let largest = inner.get_vocab(true).into_values().max();
        let vocab = largest.map_or(0, |largest| largest as usize + 1);
        let end = match end {
            Some(token) => {
                let unknown = || {
                    let why = format!("it has no token {token:?}; name one of its vocabulary");
                    TokenizeError::file(path, why)
                };
                Some(inner.token_to_id(token).ok_or_else(unknown)?)
            }
            None => end_of(path, &inner)?,
        };
        Ok(Self {
            inner,
            vocab,
            end,
            digest: lowp_checkpoint::checksum(&bytes).to_string(),
        })
    }

    /// Its vocabulary, and the id that ends a document.
    pub fn ids(&self) -> TokenIds {
        TokenIds {
            vocab: self.vocab,
            end: self.end,
        }
    }

    /// A digest of its file.
    pub fn digest(&self) -> String {
        self.digest.clone()
    }

    /// The tokens of each of `texts`, with what the template of the tokenizer puts around a text, but without the id of the end, which the
    /// writer adds.
    pub(crate) fn encode(&self, texts: Vec<String>) -> Result<Vec<Vec<Token>>, String> {
        let encoded = self.inner.encode_batch_char_offsets(texts, true);
        let encoded = encoded.map_err(|error| error.to_string())?;
        let tokens = |text: &tokenizers::Encoding| {
            let ids = text.get_ids().iter().zip(text.get_offsets());
            let mut tokens: Vec<Token> = ids.map(|(&id, &(_, end))| Token { id, end }).collect();
            if self.end.is_some() && tokens.last().map(|token| token.id) == self.end {
                tokens.pop();
            }
            tokens
        };
        Ok(encoded.iter().map(tokens).collect())
    }
}

/// A token of a text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    pub(crate) id: u32,
    /// The number of characters of the text up to its end.
    pub(crate) end: usize,
}

/// The id that files next to `path` name as that of the end.
fn end_of(path: &Path, tokenizer: &tokenizers::Tokenizer) -> Result<Option<u32>, TokenizeError> {
    let beside = |name: &str| {
        let file = path.with_file_name(name);
        let Ok(bytes) = std::fs::read(&file) else {
            return Ok(Value::Null);
        };
        serde_json::from_slice::<Value>(&bytes).map_err(|e| TokenizeError::file(&file, e))
    };
    let config = beside("tokenizer_config.json")?;
    let token = match &config["eos_token"] {
        Value::Object(token) => token["content"].as_str(),
        token => token.as_str(),
    };
    if let Some(id) = token.and_then(|token| tokenizer.token_to_id(token)) {
        return Ok(Some(id));
    }
    let config = beside("config.json")?;
    let id = match &config["eos_token_id"] {
        Value::Array(ids) => ids.first().and_then(Value::as_u64),
        id => id.as_u64(),
    };
    Ok(id.and_then(|id| u32::try_from(id).ok()))
}
