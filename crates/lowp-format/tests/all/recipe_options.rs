//! Name and options make a recipe again, and a recipe rejects options that it does not have.

use std::collections::HashSet;

use lowp_format::{
    AnyRecipe, FormatError, FourOverSix, Fp8Format, MxScale, OptionSpec, OptionValue, Recipe,
    RecipeOptions, Rounding, SourceRounding,
};
use proptest::prelude::*;

/// Numbers, some of them out of range. Values of f32 have a point where they are written again.
const NUMBERS: [&str; 9] = ["0", "1", "2", "-1", "-64", "65", "0.25", "inf", "NaN"];

fn options_of(recipe: &AnyRecipe) -> &'static [OptionSpec] {
    AnyRecipe::options_of(recipe.name()).unwrap()
}

/// Every option of every recipe, by name, each once.
fn all_options() -> Vec<OptionSpec> {
    let mut seen = HashSet::new();
    let all = AnyRecipe::all();
    let all = all.iter().flat_map(options_of).copied();
    all.filter(|spec| seen.insert(spec.name)).collect()
}

/// Texts of an option, some of them out of range.
fn texts(spec: &OptionSpec) -> &'static [&'static str] {
    match (spec.names)() {
        [] => &NUMBERS,
        names => names,
    }
}

/// Some options of `specs`, at some of their texts.
fn some_of(specs: &[OptionSpec], picks: &[usize]) -> RecipeOptions {
    let mut options = RecipeOptions::default();
    for (spec, pick) in specs.iter().zip(picks) {
        let texts = texts(spec);
        // Half of them are left out.
        if let Some(text) = texts.get(pick % (2 * texts.len())) {
            options.set(spec.name, text);
        }
    }
    options
}

proptest! {
    #[test]
    fn name_and_options_make_the_same_value(picks in prop::collection::vec(any::<usize>(), 16)) {
        for default in AnyRecipe::all() {
            let given = some_of(options_of(&default), &picks);
            let owned: Vec<_> = options_of(&default).iter().map(|spec| spec.name).collect();
            match AnyRecipe::from_name(default.name(), &given) {
                Ok(recipe) => {
                    let options = recipe.options();
                    let names: Vec<_> = options.iter().map(|(name, _)| name).collect();
                    prop_assert_eq!(names, owned);
                    prop_assert_eq!(AnyRecipe::from_name(recipe.name(), &options), Ok(recipe));
                    // What was given is what it has, and the rest are defaults.
                    for (name, text) in options.iter() {
                        let expected = given.get(name).or(default.options().get(name).map(|_| "")).unwrap();
                        let unset = default.options();
                        let expected = if expected.is_empty() { unset.get(name).unwrap() } else { expected };
                        let number = |text: &str| text.parse::<f64>().ok();
                        let same = text == expected || number(text).is_some() && number(text) == number(expected);
                        prop_assert!(same, "{}: {} of {}", name, text, expected);
                    }
                }
                Err(FormatError::OptionValue { option, value, .. }) => {
                    prop_assert_eq!(given.get(option), Some(&*value));
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }
}

#[test]
fn an_option_of_another_recipe_is_named() {
    let mut refused = 0;
    for recipe in AnyRecipe::all() {
        let owned = |name| options_of(&recipe).iter().any(|spec| spec.name == name);
        for spec in all_options() {
            let mut options = RecipeOptions::default();
            options.set(spec.name, texts(&spec)[0]);
            let made = AnyRecipe::from_name(recipe.name(), &options);
            let unused = FormatError::UnusedOption {
                recipe: recipe.name(),
                option: spec.name.to_owned(),
            };
            assert_eq!(made == Err(unused), !owned(spec.name));
            refused += usize::from(made.is_err());
        }
    }
    assert!(refused > 0);
    let error = AnyRecipe::from_name("fp32", &RecipeOptions::default().with("pow2", true));
    let text = error.unwrap_err().to_string();
    assert!(text.starts_with("fp32 has no option pow2"), "{text}");
}

#[test]
fn names_are_unique_and_the_default_is_the_list() {
    let names = AnyRecipe::names();
    let all = AnyRecipe::all();
    assert_eq!(names, all.iter().map(Recipe::name).collect::<Vec<_>>());
    for (i, recipe) in all.iter().enumerate() {
        assert!(!names[..i].contains(&recipe.name()));
        assert_eq!(
            AnyRecipe::from_name(recipe.name(), &RecipeOptions::default()),
            Ok(*recipe)
        );
    }
}

#[test]
fn unknown_names_list_the_known_ones() {
    let error = AnyRecipe::from_name("fp9", &RecipeOptions::default()).unwrap_err();
    assert_eq!(AnyRecipe::options_of("fp9").unwrap_err(), error);
    let text = error.to_string();
    assert!(
        text.contains("'fp9'") && AnyRecipe::names().iter().all(|n| text.contains(n)),
        "{text}"
    );
}

#[test]
fn values_out_of_range_are_rejected_where_the_option_exists() {
    for (name, texts) in [
        ("history", &["0", "-1", "many", ""][..]),
        ("margin", &["65", "-65", "0.5"]),
        ("epsilon", &["-1", "NaN", "inf", "-inf", "e"]),
        ("pow2", &["", "1", "yes"]),
        ("format", &["e2m1", "E4M3"]),
        ("scale_mode", &["TE", "floor"]),
        ("four_over_six", &["true", "mae448"]),
        ("source_rounding", &["bf16"]),
    ] {
        let mut rejected = 0;
        for (recipe, text) in AnyRecipe::all()
            .into_iter()
            .flat_map(|recipe| texts.iter().map(move |text| (recipe, *text)))
        {
            let mut options = RecipeOptions::default();
            options.set(name, text);
            let error = AnyRecipe::from_name(recipe.name(), &options).unwrap_err();
            match &error {
                FormatError::OptionValue { option, value, .. } => {
                    assert_eq!((*option, &**value), (name, text));
                    let words = error.to_string();
                    let spec = options_of(&recipe).iter().find(|spec| spec.name == name);
                    // The remedy names what may be written, but for modes that this recipe does not have.
                    let names = (spec.unwrap().names)().iter();
                    let named = names.filter(|name| words.contains(**name)).count();
                    assert!(named >= (spec.unwrap().names)().len().min(2), "{words}");
                    rejected += 1;
                }
                FormatError::UnusedOption { option, .. } => assert_eq!(option, name),
                other => panic!("{other}"),
            }
        }
        assert!(rejected > 0, "no recipe has {name}");
    }
}

/// Every text of an option gives its value, and the value that text.
#[test]
fn texts_and_values_are_one_to_one() {
    fn check<T: OptionValue + std::fmt::Debug>(values: &[T]) {
        let texts: Vec<String> = values.iter().map(OptionValue::text).collect();
        for (value, text) in values.iter().zip(&texts) {
            assert_eq!(T::parse(text), Some(*value));
        }
        let mut names = T::names().to_vec();
        names.sort_unstable();
        let mut sorted: Vec<&str> = texts.iter().map(|text| &**text).collect();
        sorted.sort_unstable();
        if !names.is_empty() {
            assert_eq!(names, sorted);
        }
        for text in ["", " ", "x", "TRUE"] {
            assert_eq!(T::parse(text), None);
        }
    }
    check(&[Fp8Format::E4M3, Fp8Format::E5M2, Fp8Format::Hybrid]);
    check(&[MxScale::Te, MxScale::OcpFloor, MxScale::Even]);
    check(&[SourceRounding::F32, SourceRounding::ViaBf16]);
    check(&[Rounding::Nearest, Rounding::Stochastic]);
    check(&[
        FourOverSix::Off,
        FourOverSix::Mae,
        FourOverSix::Mse,
        FourOverSix::Mae448,
        FourOverSix::Mse448,
    ]);
    check(&[true, false]);
    check(&[0f32, -0.0, 1e-45, 0.1, f32::MAX]);
    check(&[i32::MIN, -1, 0, i32::MAX]);
    check(&[0, 1, usize::MAX]);
}

/// The last value of a name counts, and the order of names is that of setting them.
#[test]
fn an_option_is_set_once() {
    let options = RecipeOptions::default()
        .with("pow2", true)
        .with("margin", 3)
        .with("pow2", false);
    let all: Vec<_> = options.iter().collect();
    assert_eq!(all, [("margin", "3"), ("pow2", "false")]);
    assert_eq!(options.get("pow2"), Some("false"));
    assert_eq!(options.get("history"), None);
}

/// Options say what they are for.
#[test]
fn options_are_documented() {
    for spec in all_options() {
        assert!(spec.help.trim().len() > 5, "{}", spec.name);
    }
}

/// Every recipe with FP8 codes takes a format, and none else (docs/numerics.md 1.5).
#[test]
fn what_has_fp8_codes_takes_a_format() {
    use lowp_format::{Code, Orientation, Role};
    for recipe in AnyRecipe::all() {
        let fp8 = Orientation::ALL.into_iter().any(|orientation| {
            let element = recipe
                .quantizers(Role::Weight)
                .of(orientation)
                .kernel
                .element;
            [Code::E4M3, Code::E5M2].contains(&element)
        });
        let takes = options_of(&recipe).iter().any(|spec| spec.name == "format");
        assert_eq!(fp8, takes, "{}", recipe.name());
    }
}
