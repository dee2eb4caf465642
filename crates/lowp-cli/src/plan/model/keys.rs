//! [`Keys`]: the keys of a config.json, read with errors that name them.

use crate::files::read_regular;
use crate::json_object::without_words;
use crate::output::shown;
use crate::usage::UsageError;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;
use std::path::Path;

/// Most bytes of a file of settings or measurements.
const MAX_BYTES: u64 = 16 << 20;

/// A JSON object out of a file.
#[derive(Debug)]
pub(super) struct Keys {
    file: String,
    object: Map<String, Value>,
}

/// The value of a JSON file, with 0 for `NaN` and `Infinity` of Python.
///
/// # Errors
/// A file that cannot be read or is no JSON, with the option that named it.
pub(super) fn read_json(option: &str, path: &str) -> Result<Value, UsageError> {
    let file = shown(path);
    let bytes = read_regular(Path::new(path), MAX_BYTES);
    let bytes = bytes.map_err(|e| UsageError::new(format!("{option} {file}: {e}")))?;
    serde_json::from_slice(&without_words(bytes))
        .map_err(|e| UsageError::new(format!("{option} {file} is not JSON: {e}")))
}

impl Keys {
    /// The object that `file` holds.
    ///
    /// # Errors
    /// Another value.
    pub(super) fn new(file: &str, value: Value) -> Result<Self, UsageError> {
        let file = file.to_owned();
        match value {
            Value::Object(object) => Ok(Self { file, object }),
            _ => Err(UsageError::new(format!(
                "{} is no JSON object; give the config.json of a model",
                shown(&file)
            ))),
        }
    }

    /// The error that this file has `what`.
    pub(super) fn error(&self, what: impl AsRef<str>) -> UsageError {
        UsageError::new(format!("{}: {}", shown(&self.file), what.as_ref()))
    }

    /// The value of `key`; null is none.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` says something: null, `false`, 0 and empty lists do not.
    pub(super) fn is_set(&self, key: &str) -> bool {
        match self.get(key) {
            None | Some(Value::Bool(false)) => false,
            Some(Value::Array(items)) => !items.is_empty(),
            Some(Value::Object(items)) => !items.is_empty(),
            Some(value) => value.as_f64() != Some(0.0),
        }
    }

    /// A whole number, if `key` is there.
    ///
    /// # Errors
    /// Another value, or one out of `range`.
    pub(super) fn find(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, UsageError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
        match number.filter(|n| range.contains(n)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.error(format!(
                "{key} is {}; a plan needs a whole number from {} to {}",
                shown(&value.to_string()),
                range.start(),
                range.end()
            ))),
        }
    }

    /// A whole number.
    ///
    /// # Errors
    /// It is missing; as [`Keys::find`].
    pub(super) fn number(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<usize, UsageError> {
        self.find(key, range)?.ok_or_else(|| {
            self.error(format!(
                "the key {key} is missing; a plan needs it: add it to the file"
            ))
        })
    }

    /// `true` or `false`, or `default` if `key` is not there.
    ///
    /// # Errors
    /// Another value.
    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool, UsageError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.error(format!(
                "{key} is {}; a plan needs true or false",
                shown(&value.to_string())
            ))),
        }
    }

    /// A text, if `key` is there.
    ///
    /// # Errors
    /// Another value.
    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, UsageError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.error(format!(
                "{key} is {}; a plan needs a text",
                shown(&value.to_string())
            ))),
        }
    }
}
