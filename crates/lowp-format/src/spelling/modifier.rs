//! [`Modifier`]: what follows a recipe's name, `NAME+MODIFIER+MODIFIER`. Options of recipes are read from what recipes say
//! of them; ablations are those of [`Ablation`].

use super::options::{expected_or_recipes, flag_name, is_switch, specs_of};
use crate::{AnyRecipe, FormatError, OptionSpec, Recipe, RecipeOptions};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Modifier {
    /// An option of the recipe, with its value and the modifier as it was written.
    Option {
        option: &'static str,
        value: String,
        text: String,
    },
    /// An ablation.
    Ablation(Ablation),
}

/// Declares the ablations, which no recipe has as an option.
macro_rules! ablations {
    ($($Ablation:ident = $name:literal, $what:literal;)*) => {
        /// One change of a recipe that shows what an ingredient is worth: it should train worse, or reads values in the place of codes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Ablation {
            $(#[doc = $what] $Ablation,)*
        }

        impl Ablation {
            /// Every ablation.
            pub const ALL: &[Self] = &[$(Self::$Ablation),*];

            /// The modifier.
            pub fn name(self) -> &'static str {
                match self { $(Self::$Ablation => $name,)* }
            }

            /// What the modifier does.
            pub fn what(self) -> &'static str {
                match self { $(Self::$Ablation => $what,)* }
            }
        }
    };
}

ablations! {
    TensorScale = "tensor-scale", "weights cast to one scale for the whole tensor, from its amax";
    OperandTensorScale = "operand-tensor-scale", "activations and gradients cast to one scale for the tensor";
    ExactActivationsForward = "exact-activations-forward", "activations not quantized in y = x W";
    ExactActivationsWgrad = "exact-activations-wgrad", "activations not quantized in the weight gradient";
    ExactGradientsDgrad = "exact-gradients-dgrad", "gradients not quantized in the input gradient";
    ExactGradientsWgrad = "exact-gradients-wgrad", "gradients not quantized in the weight gradient";
    ExactWeightsForward = "exact-weights-forward", "weights in f32, not quantized in y = x W";
    ExactWeightsDgrad = "exact-weights-dgrad", "weights in f32, not quantized in the input gradient";
    Bf16Forward = "bf16-forward", "weights and activations in bf16 in y = x W";
    Bf16Ends = "bf16-ends", "weights and operands of the first and the last block in bf16";
}

impl Modifier {
    /// That of recipe `name` which `text` is.
    fn of(name: &str, text: &str) -> Option<Self> {
        let ablation = Ablation::ALL
            .iter()
            .find(|ablation| ablation.name() == text);
        if let Some(ablation) = ablation {
            return Some(Self::Ablation(*ablation));
        }
        let set = |spec: &OptionSpec, value: &str| Self::Option {
            option: spec.name,
            value: value.to_owned(),
            text: text.to_owned(),
        };
        specs_of(name).iter().find_map(|spec| {
            let (long, names) = (flag_name(spec.name), (spec.names)());
            if let Some((option, value)) = text.split_once('=') {
                return (flag_name(option) == long).then(|| set(spec, value));
            }
            match is_switch(names) {
                true if text == long => Some(set(spec, "true")),
                true if text.strip_prefix("no-") == Some(&long) => Some(set(spec, "false")),
                false if names.contains(&text) => Some(set(spec, text)),
                _ => None,
            }
        })
    }

    fn text(&self) -> &str {
        match self {
            Self::Option { text, .. } => text,
            Self::Ablation(ablation) => ablation.name(),
        }
    }

    /// What only one modifier can set.
    fn target(&self) -> &str {
        match self {
            Self::Option { option, .. } => option,
            Self::Ablation(ablation) => ablation.name(),
        }
    }
}

/// The modifiers that follow `name` in `text`.
pub(crate) fn parse<'t>(
    text: &str,
    name: &str,
    modifiers: impl Iterator<Item = &'t str>,
) -> Result<Vec<Modifier>, FormatError> {
    let mut found: Vec<Modifier> = Vec::new();
    for modifier in modifiers {
        if found.iter().any(|known| known.text() == modifier) {
            return Err(FormatError::spelling(format!(
                "{text}: +{modifier} is there twice; leave one of them out"
            )));
        }
        let Some(new) = Modifier::of(name, modifier) else {
            let mut others = AnyRecipe::names().into_iter();
            if others.any(|other| Modifier::of(other, modifier).is_some()) {
                return Err(changes_nothing(text, name, modifier));
            }
            return Err(unknown(text, modifier));
        };
        if let Some(other) = found.iter().find(|known| known.target() == new.target()) {
            return Err(FormatError::spelling(format!(
                "{text}: +{} and +{modifier} exclude each other; leave one of them out",
                other.text()
            )));
        }
        found.push(new);
    }
    // Whoever says `no` means a change.
    for modifier in &found {
        if let Modifier::Option {
            option,
            value,
            text: word,
        } = modifier
            && word.starts_with("no-")
            && default_of(name, option).as_ref() == Some(value)
        {
            return Err(changes_nothing(text, name, word));
        }
    }
    Ok(found)
}

/// The recipe's name in `text`, `NAME+MODIFIER+MODIFIER`, and the options that its modifiers set, for a file.
///
/// # Errors
/// An unknown name; a modifier that there is not, that is there twice, that contradicts another one, or that this recipe has not; or an
/// ablation, which the metadata of a file cannot say.
pub fn options_of_files(text: &str) -> Result<(&str, RecipeOptions), FormatError> {
    let mut parts = text.split('+').map(str::trim);
    let name = parts.next().unwrap_or_default();
    // The error of an unknown name comes before those of its modifiers.
    AnyRecipe::options_of(name)?;
    let mut options = RecipeOptions::default();
    for modifier in parse(text, name, parts)? {
        match modifier {
            Modifier::Option { option, value, .. } => options.set(option, &value),
            Modifier::Ablation(ablation) => {
                return Err(FormatError::spelling(format!(
                    "{text}: +{} is an ablation of training, which no file has; leave it out",
                    ablation.name()
                )));
            }
        }
    }
    Ok((name, options))
}

/// The shortest modifiers that set the options of `recipe` which are not its defaults, in the order in which it declares them.
pub(crate) fn spelled(recipe: &AnyRecipe) -> Vec<String> {
    let (name, options) = (recipe.name(), recipe.options());
    let mut modifiers = Vec::new();
    for spec in specs_of(name) {
        let Some(value) = options.get(spec.name) else {
            continue;
        };
        if default_of(name, spec.name).as_deref() == Some(value) {
            continue;
        }
        let long = flag_name(spec.name);
        let short = match value {
            "true" => long.clone(),
            "false" => format!("no-{long}"),
            value => value.to_owned(),
        };
        let sets = |text: &String| matches!(Modifier::of(name, text), Some(Modifier::Option { option, .. }) if option == spec.name);
        let named = format!("{long}={value}");
        modifiers.push(Some(short).filter(sets).unwrap_or(named));
    }
    modifiers
}

/// The text of `option` of recipe `name` by itself.
fn default_of(name: &str, option: &str) -> Option<String> {
    let recipe = AnyRecipe::from_name(name, &RecipeOptions::default()).ok()?;
    recipe.options().get(option).map(str::to_owned)
}

/// The error of a modifier that leaves a recipe as it is.
pub(crate) fn changes_nothing(text: &str, name: &str, modifier: &str) -> FormatError {
    FormatError::spelling(format!(
        "{text}: +{modifier} changes nothing of {name}; leave it out, or modify another recipe"
    ))
}

/// The error of `name` with options that it does not take.
pub fn problem(name: &str, error: &FormatError) -> FormatError {
    match error {
        FormatError::OptionValue {
            option,
            value,
            expected,
        } => FormatError::spelling(format!(
            "{option} = {value} is out of range of {name}: {}",
            expected_or_recipes(option, value, expected)
        )),
        other => other.clone(),
    }
}

fn unknown(text: &str, modifier: &str) -> FormatError {
    let known: Vec<String> = modifiers().into_iter().map(|known| known.name).collect();
    FormatError::spelling(format!(
        "{text}: no modifier is called '{modifier}'; the modifiers are {}, OPTION=VALUE",
        known.join(", ")
    ))
}

/// A modifier as lists tell it.
#[derive(Clone, Debug)]
pub struct ModifierWords {
    /// Without the plus.
    pub name: String,
    /// What the modifier does.
    pub what: String,
}

/// Every modifier that changes some recipe: values of options with names, then ablations.
pub fn modifiers() -> Vec<ModifierWords> {
    let mut all: Vec<ModifierWords> = Vec::new();
    for recipe in AnyRecipe::names() {
        for spec in specs_of(recipe) {
            let default = default_of(recipe, spec.name);
            let names = (spec.names)();
            for value in names
                .iter()
                .filter(|value| default.as_deref() != Some(**value))
            {
                let mut options = RecipeOptions::default();
                options.set(spec.name, value);
                if AnyRecipe::from_name(recipe, &options).is_err() {
                    continue;
                }
                let (long, help) = (flag_name(spec.name), spec.help.trim());
                let known = match (is_switch(names), *value) {
                    (true, "true") => (long, help.to_owned()),
                    (true, _) => (format!("no-{long}"), format!("Off: {help}")),
                    (false, value) => (value.to_owned(), format!("{help}: {value}")),
                };
                if !all.iter().any(|other| other.name == known.0) {
                    let (name, what) = known;
                    all.push(ModifierWords { name, what });
                }
            }
        }
    }
    all.extend(Ablation::ALL.iter().map(|ablation| ModifierWords {
        name: ablation.name().to_owned(),
        what: ablation.what().to_owned(),
    }));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spelling::Variant;

    /// Every option and ablation, by every spelling, and all pairs of them in either order.
    #[test]
    fn spellings_of_one_variant_have_one_text() {
        for recipe in AnyRecipe::all() {
            let name = recipe.name();
            let mut modifiers: Vec<String> =
                Ablation::ALL.iter().map(|c| c.name().to_owned()).collect();
            for spec in AnyRecipe::options_of(name).expect("a recipe") {
                for value in (spec.names)() {
                    let long = spec.name.replace('_', "-");
                    modifiers.extend([format!("{long}={value}"), format!("{}={value}", spec.name)]);
                    modifiers.push(match *value {
                        "true" => long,
                        "false" => format!("no-{long}"),
                        value => value.to_owned(),
                    });
                }
                if (spec.names)().is_empty() {
                    modifiers.extend(["1", "3"].map(|value| format!("{}={value}", spec.name)));
                }
            }
            let mut texts: Vec<(Variant, String)> = Vec::new();
            for a in &modifiers {
                for b in &modifiers {
                    for text in [format!("{name}+{a}"), format!("{name}+{a}+ {b}")] {
                        let Ok(variant) = text.parse::<Variant>() else {
                            continue;
                        };
                        let said = variant.to_string();
                        let read: Variant = said
                            .parse()
                            .unwrap_or_else(|e| panic!("{text}: {said}: {e}"));
                        assert_eq!(read, variant, "{text}: {said}");
                        match texts.iter().find(|(known, _)| *known == variant) {
                            Some((_, known)) => assert_eq!(*known, said, "{text}"),
                            None => texts.push((variant, said)),
                        }
                    }
                }
            }
        }
        let plain: Variant = "mxfp8+e4m3".parse().expect("the default");
        assert_eq!(plain.to_string(), "mxfp8");
    }
}
