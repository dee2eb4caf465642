//! Prompts do not count in the loss, completions and ends do.

use lowp_tokenize::{Fields, Tokenizer, tokenize};
use lowp_train::tokens::{Packing, TokenWriter};
use lowp_train::{Batch, Data, Mixture, Tokens};
use std::error::Error;
use std::fs;

const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2, "<end>": 3}, "unk_token": "<end>"}}"#;

#[test]
fn completions_alone_count() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    fs::write(path("tokenizer.json"), TOKENIZER)?;
    fs::write(
        path("tokenizer_config.json"),
        r#"{"eos_token": {"content": "<end>"}}"#,
    )?;
    let line = "{\"prompt\": \"a b\", \"completion\": \" c\"}\n";
    fs::write(path("texts.jsonl"), line.repeat(3))?;
    let tokenizer = Tokenizer::open(folder.path(), None)?;
    let ids = tokenizer.ids();
    assert_eq!((ids.vocab, ids.end), (4, Some(3)));
    let data = path("data");
    let mut writer = TokenWriter::new(&data, tokenizer.ids(), true, tokenizer.digest())?;
    let fields = Fields::Completion(["prompt", "completion"].map(ToOwned::to_owned));
    let found = tokenize(&path("texts.jsonl"), &tokenizer, &fields, &mut writer)?;
    let index = writer.finish()?;
    assert_eq!((found, index.documents, index.tokens), (3, 3, 12));
    let packing = Packing {
        seq: 4,
        batch: 1,
        held_out: 0.1,
        mask_documents: false,
    };
    let batch = Mixture::from(Tokens::open(&data, packing)?).train(0, 0, 0..1)?;
    assert_eq!(*batch.inputs, [0, 1, 2, 3]);
    assert_eq!(*batch.targets, [Batch::IGNORED, 2, 3, Batch::IGNORED]);
    Ok(())
}

/// Writes a space before each text that it is given.
const METASPACE: &str = r#"{"version": "1.0", "added_tokens": [{"id": 4, "content": "<end>", "special": true, "single_word": false, "lstrip": false,
    "rstrip": false, "normalized": false}], "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": true},
    "model": {"type": "BPE", "vocab": {"\u2581": 0, "a": 1, "b": 2, "\u2581a": 3, "<end>": 4}, "merges": [["\u2581", "a"]]}}"#;

#[test]
fn a_completion_goes_on_where_its_prompt_ends() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    fs::write(path("tokenizer.json"), METASPACE)?;
    let line = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
    fs::write(path("texts.jsonl"), line.repeat(3))?;
    let tokenizer = Tokenizer::open(folder.path(), Some("<end>"))?;
    let data = path("data");
    let mut writer = TokenWriter::new(&data, tokenizer.ids(), true, tokenizer.digest())?;
    let fields = Fields::Completion(["prompt", "completion"].map(ToOwned::to_owned));
    tokenize(&path("texts.jsonl"), &tokenizer, &fields, &mut writer)?;
    writer.finish()?;
    let packing = Packing {
        seq: 3,
        batch: 1,
        held_out: 0.1,
        mask_documents: false,
    };
    let batch = Mixture::from(Tokens::open(&data, packing)?).train(0, 0, 0..1)?;
    assert_eq!(*batch.inputs, [3, 2, 4]);
    assert_eq!(*batch.targets, [2, 4, Batch::IGNORED]);
    Ok(())
}

#[test]
fn lines_without_texts_are_named() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    fs::write(path("tokenizer.json"), TOKENIZER)?;
    fs::write(
        path("texts.jsonl"),
        "{\"text\": \"a\"}\n\n{\"words\": \"b\"}\n",
    )?;
    let error = Tokenizer::open(folder.path(), Some("<start>")).expect_err("no such token");
    assert!(error.to_string().contains("<start>"), "{error}");
    let tokenizer = Tokenizer::open(folder.path(), None)?;
    let mut writer = TokenWriter::new(&path("data"), tokenizer.ids(), false, String::new())?;
    let fields = Fields::Text("text".to_owned());
    let error = tokenize(&path("texts.jsonl"), &tokenizer, &fields, &mut writer);
    let error = error.expect_err("a line").to_string();
    assert!(error.contains("texts.jsonl, line 3: "), "{error}");
    Ok(())
}
