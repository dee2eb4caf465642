//! [`Options`]: the options of a recipe as file metadata say them.

use lowp_format::{AnyRecipe, FormatError, Recipe, RecipeOptions};
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::fmt;

/// Names of options in older files, and what they are called now.
const RENAMED: [(&str, &str); 1] = [("mx_scale", "scale_mode")];

/// Options of a recipe by name, in the recipe's order: an object of strings, numbers and booleans.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options(Vec<(String, Value)>);

/// The value that `text` is the JSON of, if that is a number or a boolean; else the text.
fn value(text: &str) -> Value {
    match serde_json::from_str(text) {
        Ok(value @ (Value::Bool(_) | Value::Number(_))) => value,
        _ => Value::String(text.to_owned()),
    }
}

impl Options {
    /// Those of `recipe`, all of them.
    pub fn of(recipe: &impl Recipe) -> Self {
        let options = recipe.options();
        let each = options
            .iter()
            .map(|(name, text)| (name.to_owned(), value(text)));
        Self(each.collect())
    }

    /// Names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (&**name, value))
    }

    /// The recipe `name` with these options, and defaults for the others.
    pub(crate) fn recipe(&self, name: &str) -> Result<AnyRecipe, String> {
        let mut options = RecipeOptions::default();
        for (option, value) in self.iter() {
            let text = match value {
                Value::String(text) => text.clone(),
                value => value.to_string(),
            };
            let renamed = RENAMED.iter().find(|(old, _)| *old == option);
            let option = renamed.map_or(option, |(_, now)| now);
            if options.get(option).is_some() {
                return Err(format!("the option {option} is there twice"));
            }
            options.set(option, &text);
        }
        let has_names = |option: &str| {
            let mut specs = AnyRecipe::options_of(name).unwrap_or_default().iter();
            specs.any(|spec| spec.name == option && !(spec.names)().is_empty())
        };
        let recipe = AnyRecipe::from_name(name, &options).map_err(|e| match e {
            FormatError::OptionValue { option, value, .. } if has_names(option) => {
                format!("it has no {option} '{value}'")
            }
            e => e.to_string(),
        })?;
        self.check_kinds(&recipe)?;
        Ok(recipe)
    }

    /// Rejects strings of numbers and booleans.
    fn check_kinds(&self, recipe: &AnyRecipe) -> Result<(), String> {
        let kinds = Self::of(recipe);
        for (option, value) in self.iter() {
            let kind = kinds.iter().find(|(name, _)| *name == option);
            if let Some((_, kind)) = kind
                && std::mem::discriminant(kind) != std::mem::discriminant(value)
            {
                return Err(format!("it has no {option} {value}"));
            }
        }
        Ok(())
    }
}

impl Serialize for Options {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for Options {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Options;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of options")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Options, A::Error> {
                let mut options = Options::default();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if options.iter().any(|(known, _)| known == name) {
                        return Err(A::Error::custom(format!(
                            "the option {name} is there twice"
                        )));
                    }
                    options.0.push((name, value));
                }
                Ok(options)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_as_they_are_written() {
        for recipe in AnyRecipe::all() {
            let options = Options::of(&recipe);
            let text = serde_json::to_string(&options).expect("JSON");
            let read: Options = serde_json::from_str(&text).expect("options");
            assert_eq!(read, options, "{text}");
            assert_eq!(read.recipe(recipe.name()), Ok(recipe), "{text}");
        }
    }

    #[test]
    fn texts_of_files_that_are() {
        let text = |name| {
            let recipe = AnyRecipe::from_name(name, &RecipeOptions::default()).expect(name);
            serde_json::to_string(&Options::of(&recipe)).expect("JSON")
        };
        assert_eq!(
            text("fp8-current"),
            r#"{"format":"hybrid","pow2":false,"epsilon":0.0,"source_rounding":"f32"}"#
        );
        assert_eq!(
            text("fp8-delayed"),
            r#"{"format":"hybrid","margin":0,"history":1024,"amax_algorithm":"max","source_rounding":"f32"}"#
        );
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (name, text, expected) in [
            ("mxfp8", r#"{"format":"e9m9"}"#, "it has no format 'e9m9'"),
            (
                "mxfp8",
                r#"{"scale_mode":"even"}"#,
                "it has no scale_mode 'even'",
            ),
            ("mxfp8", r#"{"pow2":true}"#, "mxfp8 has no option pow2"),
            (
                "mxfp8",
                r#"{"mx_scale":"te","scale_mode":"te"}"#,
                "scale_mode is there twice",
            ),
            (
                "fp8-current",
                r#"{"pow2":"true"}"#,
                "it has no pow2 \"true\"",
            ),
            ("fp8-current", r#"{"pow2":1}"#, "it has no pow2 '1'"),
            (
                "fp8-current",
                r#"{"epsilon":-1.0}"#,
                "epsilon = -1.0 is out of range",
            ),
            (
                "fp8-current",
                r#"{"epsilon":null}"#,
                "epsilon = null is out of range",
            ),
            ("fp8-current", r#"{"epsilon":1e300}"#, "is out of range"),
            (
                "fp8-delayed",
                r#"{"history":0}"#,
                "history = 0 is out of range",
            ),
            ("fp8-delayed", r#"{"history":65537}"#, "1 to 65536"),
            (
                "fp8-delayed",
                r#"{"history":"16"}"#,
                "it has no history \"16\"",
            ),
            (
                "fp8-delayed",
                r#"{"margin":65}"#,
                "margin = 65 is out of range",
            ),
        ] {
            let options: Options = serde_json::from_str(text).expect(text);
            let error = options.recipe(name).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
        let twice = serde_json::from_str::<Options>(r#"{"pow2":true,"pow2":true}"#);
        assert!(
            twice
                .expect_err("twice")
                .to_string()
                .contains("pow2 is there twice")
        );
        let old: Options = serde_json::from_str(r#"{"mx_scale":"ocp-floor"}"#).expect("an object");
        let new: Options =
            serde_json::from_str(r#"{"scale_mode":"ocp-floor"}"#).expect("an object");
        assert_eq!(old.recipe("mxfp8"), new.recipe("mxfp8"));
        assert!(old.recipe("mxfp8").is_ok());
    }
}
