//! [`RecipeName`]: the type of options that name a recipe, for help texts and completions.

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::error::Error;
use clap::{Arg, Command};
use lowp_format::{AnyRecipe, Recipe, RecipeWords};
use std::ffi::OsStr;

/// A parser that offers the names of all recipes and takes any text, without the spaces around it: modifiers and lists of names are parsed by the
/// command, whose error says more than that a name is unknown.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecipeName {
    /// A value that stands for several recipes, and what it means.
    pub(crate) all: Option<(&'static str, &'static str)>,
}

impl TypedValueParser for RecipeName {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, Error> {
        let text = StringValueParser::new().parse_ref(command, arg, value)?;
        Ok(text.trim().to_owned())
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let named = |recipe: AnyRecipe| {
            PossibleValue::new(recipe.name()).help(RecipeWords::of(&recipe).to_string())
        };
        let all = self
            .all
            .map(|(name, what)| PossibleValue::new(name).help(what));
        Some(Box::new(
            all.into_iter()
                .chain(AnyRecipe::all().into_iter().map(named)),
        ))
    }
}
