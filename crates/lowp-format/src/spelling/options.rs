//! Options of recipes by name: how they are written, and which recipes take them.

use crate::{AnyRecipe, OptionSpec, OptionValue, RecipeOptions};

/// What `recipe` says of its options; nothing where there is no such recipe.
pub fn specs_of(recipe: &str) -> &'static [OptionSpec] {
    AnyRecipe::options_of(recipe).unwrap_or_default()
}

/// Whether an option with these values is on or off.
pub fn is_switch(values: &[&str]) -> bool {
    values == <bool as OptionValue>::names()
}

/// The name of an option as a flag, without the dashes.
pub fn flag_name(option: &str) -> String {
    option.replace('_', "-")
}

/// What is right in the place of `value` of `option`: the values that the recipe takes, or the recipes that take it.
pub fn expected_or_recipes(option: &str, value: &str, expected: &str) -> String {
    match &recipes_with(option, value)[..] {
        [] => expected.to_owned(),
        recipes => format!("{expected}; {value} is an option of {}", recipes.join(", ")),
    }
}

/// The recipes that take `value` of `option`.
pub fn recipes_with(option: &str, value: &str) -> Vec<&'static str> {
    let mut options = RecipeOptions::default();
    options.set(option, value);
    let takes = |name: &&str| AnyRecipe::from_name(name, &options).is_ok();
    AnyRecipe::names().into_iter().filter(takes).collect()
}
