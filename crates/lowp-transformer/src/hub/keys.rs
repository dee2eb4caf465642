//! [`Keys`]: the keys of a config.json, read with errors that name them.

use std::cell::RefCell;
use std::fmt::Display;
use std::ops::RangeInclusive;

use lowp_file::text::shown;
use serde_json::{Map, Value};

use super::HubError;
use super::types::SYNONYMS;

/// A JSON object out of a file, and what stands for keys that it lacks.
#[derive(Debug)]
pub(super) struct Keys {
    file: String,
    object: Map<String, Value>,
    defaults: Option<Map<String, Value>>,
    /// What was taken for keys that are not there, each with its key.
    assumed: RefCell<Vec<String>>,
}

impl Keys {
    /// The object that `file` holds.
    pub(super) fn new(file: &str, value: Value) -> Result<Self, HubError> {
        let file = file.to_owned();
        match value {
            Value::Object(object) => Ok(Self {
                file,
                object,
                defaults: None,
                assumed: RefCell::default(),
            }),
            _ => Err(HubError(format!(
                "{} is not a JSON object; give the config.json of a model",
                shown(&file)
            ))),
        }
    }

    /// The same, with the values of keys that the file lacks; keys that are neither there nor here say nothing then.
    pub(super) fn with_defaults(self, defaults: Option<Map<String, Value>>) -> Self {
        Self { defaults, ..self }
    }

    /// What was taken for keys that are not there, each with its key.
    pub(super) fn assumed(&self) -> Vec<String> {
        self.assumed.borrow().clone()
    }

    /// Says that `value` was taken for `key`, which the file lacks.
    pub(super) fn assume(&self, key: &str, value: impl Display) {
        self.assumed.borrow_mut().push(format!("{key} {value}"));
    }

    /// The error that this file has `what`.
    pub(super) fn error(&self, what: impl AsRef<str>) -> HubError {
        HubError(format!("{}: {}", shown(&self.file), what.as_ref()))
    }

    /// The value of `key` in the file; null is none.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether the file says that `key` is null.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.object.get(key).is_some_and(Value::is_null)
    }

    /// Whether the type of the model reads `key`, which others may have in their files all the same.
    fn is_read(&self, key: &str) -> bool {
        let defaults = self.defaults.as_ref();
        defaults.is_none_or(|defaults| defaults.contains_key(key))
    }

    /// The default of `key`, where the file has it under none of its names.
    fn default(&self, key: &str) -> Option<&Value> {
        let default = self.defaults.as_ref()?.get(key)?;
        let named = names(key).any(|name| self.object.contains_key(name));
        Some(default).filter(|default| !named && !default.is_null())
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

    /// A whole number, if `key` is there, under this name or another of it, or has a default.
    pub(super) fn find(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, HubError> {
        let mut found: Option<(&str, usize)> = None;
        for name in names(key).filter(|_| self.is_read(key)) {
            let Some(value) = self.get(name) else {
                continue;
            };
            let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
            let Some(number) = number.filter(|n| range.contains(n)) else {
                return Err(self.error(format!(
                    "{name} is {}; a plan needs a whole number from {} to {}",
                    shown(&value.to_string()),
                    range.start(),
                    range.end()
                )));
            };
            match found {
                Some((other, before)) if before != number => {
                    return Err(self.error(format!(
                        "{other} is {before} and {name} is {number}; leave one of them out"
                    )));
                }
                _ => found = Some((name, number)),
            }
        }
        let default = self.default(key).and_then(Value::as_u64);
        let default = default.and_then(|number| usize::try_from(number).ok());
        if let (None, Some(number)) = (found, default) {
            self.assume(key, number);
        }
        Ok(found.map(|(_, number)| number).or(default))
    }

    /// A whole number.
    pub(super) fn number(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<usize, HubError> {
        self.find(key, range)?.ok_or_else(|| self.missing(key))
    }

    /// `true` or `false`, if `key` is there or has a default.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, HubError> {
        let own = self.get(key).filter(|_| self.is_read(key));
        match own.or_else(|| self.default(key)) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(value) => Err(self.error(format!(
                "{key} is {}; a plan needs true or false",
                shown(&value.to_string())
            ))),
        }
    }

    /// The error that `key` is missing.
    pub(super) fn missing(&self, key: &str) -> HubError {
        self.error(format!(
            "the key {key} is missing; a plan needs it: add it to the file"
        ))
    }

    /// A text, if `key` is there.
    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, HubError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.error(format!(
                "{key} is {}; a plan needs a string",
                shown(&value.to_string())
            ))),
        }
    }
}

/// The names that `key` has, itself first.
pub(super) fn names(key: &str) -> impl Iterator<Item = &str> {
    let others = SYNONYMS.iter().find(|(name, _)| *name == key);
    let others = others.into_iter().flat_map(|(_, others)| *others).copied();
    std::iter::once(key).chain(others)
}
