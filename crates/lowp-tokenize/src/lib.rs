//! Texts to the token ids that lowp-train reads ([`lowp_train::Tokens`]), by the `tokenizer.json` of a model.
//!
//! A crate of its own, so that what trains needs no tokenizer.
//!
//! ```
//! use lowp_tokenize::{Fields, Tokenizer, tokenize};
//! use lowp_train::tokens::TokenWriter;
//! # let folder = std::env::temp_dir().join(format!("lowp-tokenize-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder)?;
//! # let (json, texts) = (folder.join("tokenizer.json"), folder.join("texts.jsonl"));
//! # std::fs::write(&json, r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
//! #     "model": {"type": "WordLevel", "vocab": {"one": 0, "two": 1, "<end>": 2}, "unk_token": "<end>"}}"#)?;
//! # std::fs::write(&texts, "{\"text\": \"one two\"}\n{\"text\": \"two\"}\n")?;
//! let tokenizer = Tokenizer::open(&json, Some("<end>"))?;
//! let mut writer = TokenWriter::new(&folder.join("data"), tokenizer.ids(), false, tokenizer.digest())?;
//! tokenize(&texts, &tokenizer, &Fields::Text("text".to_owned()), &mut writer)?;
//! let index = writer.finish()?;
//! assert_eq!((index.documents, index.tokens), (2, 5));
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod error;
mod texts;
mod tokenizer;

pub use error::TokenizeError;
pub use texts::{Fields, tokenize};
pub use tokenizer::Tokenizer;
