//! [`RecipeOptionArgs`]: a flag for every option that a recipe declares, made when the program starts.

use crate::usage::UsageError;
use clap::builder::{PossibleValuesParser, StringValueParser};
use clap::error::Error;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use lowp_format::spelling::{expected_or_recipes, flag_name, is_switch, recipes_with, specs_of};
use lowp_format::{AnyRecipe, FormatError, Recipe, RecipeOptions};
use std::ffi::OsString;
use std::sync::OnceLock;

/// An option of one recipe or several, as a flag.
struct Flag {
    name: &'static str,
    /// The name after the dashes.
    long: &'static str,
    /// What it is for, as the first recipe that has it says.
    help: &'static str,
    recipes: Vec<&'static str>,
    /// The texts of all values that some recipe may take; none of a number.
    values: Vec<&'static str>,
}

fn flags() -> &'static [Flag] {
    static FLAGS: OnceLock<Vec<Flag>> = OnceLock::new();
    FLAGS.get_or_init(|| {
        let mut flags: Vec<Flag> = Vec::new();
        for recipe in AnyRecipe::names() {
            for spec in specs_of(recipe) {
                let known = flags.iter().position(|flag| flag.name == spec.name);
                let index = known.unwrap_or_else(|| {
                    flags.push(Flag {
                        name: spec.name,
                        // Once for each option: clap keeps names as long as the program runs.
                        long: spec.name.replace('_', "-").leak(),
                        help: spec.help.trim(),
                        recipes: Vec::new(),
                        values: Vec::new(),
                    });
                    flags.len() - 1
                });
                let flag = &mut flags[index];
                flag.recipes.push(recipe);
                for value in (spec.names)() {
                    if !flag.values.contains(value) {
                        flag.values.push(value);
                    }
                }
            }
        }
        flags
    })
}

impl Flag {
    fn arg(&self) -> Arg {
        let all = AnyRecipe::low_precision();
        let of = if self
            .recipes
            .iter()
            .copied()
            .eq(all.iter().map(Recipe::name))
        {
            "every recipe below 16 bits".to_owned()
        } else {
            self.recipes.join(", ")
        };
        let arg = Arg::new(self.name)
            .long(self.long)
            // As `lowp recipes` and files call it.
            .aliases((self.name != self.long).then_some(self.name))
            .help(format!("{} (of {of})", self.help))
            .help_heading("Options of recipes");
        if self.values.is_empty() {
            return arg
                .value_name("NUMBER")
                .allow_negative_numbers(true)
                .value_parser(StringValueParser::new());
        }
        let arg = arg.value_parser(PossibleValuesParser::new(&self.values));
        match is_switch(&self.values) {
            // A word that follows is an argument of its own, unless it is one of the values: `join_switches`.
            true => arg
                .value_name("BOOL")
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true"),
            false => arg.value_name("NAME"),
        }
    }
}

/// Joins a switch of a recipe and the literal `true` or `false` that follows it: `--pow2 false` is `--pow2=false`, and
/// `--pow2 in.safetensors` a switch and an argument.
pub(crate) fn join_switches(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut joined: Vec<OsString> = Vec::new();
    let mut args = args.peekable();
    while let Some(mut arg) = args.next() {
        if arg == "--" {
            joined.push(arg);
            break;
        }
        let long = arg.to_str().and_then(|arg| arg.strip_prefix("--"));
        let switch = long.is_some_and(|long| {
            let mut flags = flags().iter();
            flags.any(|flag| [flag.long, flag.name].contains(&long) && is_switch(&flag.values))
        });
        if switch && let Some(value) = args.next_if(|next| next == "true" || next == "false") {
            arg.push("=");
            arg.push(value);
        }
        joined.push(arg);
    }
    joined.extend(args);
    joined
}

/// The options of a recipe that the command line sets.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecipeOptionArgs(RecipeOptions);

impl Args for RecipeOptionArgs {
    fn augment_args(command: Command) -> Command {
        flags()
            .iter()
            .fold(command, |command, flag| command.arg(flag.arg()))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for RecipeOptionArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut options = Self::default();
        options.update_from_arg_matches(matches)?;
        Ok(options)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for flag in flags() {
            if let Some(value) = matches.get_one::<String>(flag.name) {
                self.0.set(flag.name, value);
            }
        }
        Ok(())
    }
}

impl From<RecipeOptions> for RecipeOptionArgs {
    fn from(options: RecipeOptions) -> Self {
        Self(options)
    }
}

impl RecipeOptionArgs {
    /// Rejects flags beside the modifiers of a recipe.
    pub(crate) fn reject_beside_modifiers(&self) -> Result<(), UsageError> {
        match self.0.iter().next().map(|(option, _)| flag_name(option)) {
            None => Ok(()),
            Some(flag) => Err(UsageError::new(format!(
                "--{flag} cannot be combined with modifiers; write the option as a modifier: NAME+{flag}=VALUE"
            ))),
        }
    }

    /// The message of `error`, which recipe `name` with these options is: by the names of flags, with the recipes that
    /// take what is given. Nothing of errors that are not about an option.
    pub(crate) fn message(&self, name: &str, error: &FormatError) -> Option<String> {
        match error {
            FormatError::UnusedOption { option, .. } => {
                let flag = flag_name(option);
                let value = self.0.get(option).unwrap_or_default();
                let takers = recipes_with(option, value);
                let choice = if takers.is_empty() {
                    let has = |recipe: &&str| specs_of(recipe).iter().any(|s| s.name == option);
                    let owners: Vec<_> = AnyRecipe::names().into_iter().filter(has).collect();
                    format!("has it: {}", owners.join(", "))
                } else {
                    format!("takes --{flag} {value}: {}", takers.join(", "))
                };
                Some(format!(
                    "{name} has no option --{flag}; leave it out, or choose a recipe that {choice}"
                ))
            }
            FormatError::OptionValue {
                option,
                value,
                expected,
            } => Some(format!(
                "--{} {value} is out of range of {name}: {}",
                flag_name(option),
                expected_or_recipes(option, value, expected)
            )),
            _ => None,
        }
    }

    /// The recipe `name` with the options that are given, and `defaults` for those of them that it has.
    pub(crate) fn recipe(
        &self,
        name: &str,
        defaults: &[(&str, &str)],
    ) -> Result<AnyRecipe, FormatError> {
        let mut options = RecipeOptions::default();
        for (option, value) in defaults {
            if specs_of(name).iter().any(|spec| spec.name == *option) {
                options.set(option, value);
            }
        }
        for (option, value) in self.0.iter() {
            options.set(option, value);
        }
        AnyRecipe::from_name(name, &options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_of_every_recipe_is_a_flag() {
        let command = RecipeOptionArgs::augment_args(Command::new("lowp"));
        for recipe in AnyRecipe::all() {
            for (option, value) in recipe.options().iter() {
                let flag = format!("--{}={value}", flag_name(option));
                let matches = command.clone().try_get_matches_from(["lowp", &flag]);
                let found = RecipeOptionArgs::from_arg_matches(&matches.expect(&flag));
                let made = found.expect(&flag).recipe(recipe.name(), &[]);
                assert_eq!(made.expect(&flag), recipe, "{flag}");
            }
        }
    }

    #[test]
    fn a_switch_takes_a_value_and_no_other_word() {
        let joined = |text: &str| {
            let words = text.split(' ').map(OsString::from);
            let joined = join_switches(words);
            let words: Vec<_> = joined.iter().map(|word| word.to_string_lossy()).collect();
            words.join(" ")
        };
        for (given, expected) in [
            ("--pow2 false in", "--pow2=false in"),
            ("--pow2 true", "--pow2=true"),
            ("--pow2 in", "--pow2 in"),
            ("--pow2=false true", "--pow2=false true"),
            ("--pow2 --hadamard false", "--pow2 --hadamard=false"),
            ("-o true --pow2", "-o true --pow2"),
            ("--format true", "--format true"),
            ("-- --pow2 false", "-- --pow2 false"),
            ("--pow2", "--pow2"),
        ] {
            assert_eq!(joined(given), expected);
        }
    }
}
