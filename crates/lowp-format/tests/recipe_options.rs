//! Name and options make a recipe again, and a recipe rejects options that it does not have.

use lowp_format::{
    AmaxAlgorithm, AnyRecipe, FormatError, Fp8Format, MxScale, Recipe, RecipeOptions,
    SourceRounding,
};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

/// Every combination of options that no recipe finds out of range.
fn options() -> impl Strategy<Value = RecipeOptions> {
    (
        option::of(select(vec![
            Fp8Format::E4M3,
            Fp8Format::E5M2,
            Fp8Format::Hybrid,
        ])),
        option::of(-8..8i32),
        option::of(1..64usize),
        option::of(select(vec![AmaxAlgorithm::Max, AmaxAlgorithm::MostRecent])),
        option::of(any::<bool>()),
        option::of(0f32..1.0),
        option::of(select(vec![MxScale::Te, MxScale::OcpFloor])),
        option::of(select(vec![SourceRounding::F32, SourceRounding::ViaBf16])),
    )
        .prop_map(
            |(
                format,
                margin,
                history,
                amax_algorithm,
                pow2,
                epsilon,
                mx_scale,
                source_rounding,
            )| {
                RecipeOptions {
                    format,
                    margin,
                    history,
                    amax_algorithm,
                    pow2,
                    epsilon,
                    mx_scale,
                    source_rounding,
                }
            },
        )
}

/// Each option of `all` alone, with its name.
fn singles(all: &RecipeOptions) -> [(&'static str, RecipeOptions); 8] {
    let none = RecipeOptions::default();
    [
        (
            "format",
            RecipeOptions {
                format: all.format,
                ..none
            },
        ),
        (
            "margin",
            RecipeOptions {
                margin: all.margin,
                ..none
            },
        ),
        (
            "history",
            RecipeOptions {
                history: all.history,
                ..none
            },
        ),
        (
            "amax_algorithm",
            RecipeOptions {
                amax_algorithm: all.amax_algorithm,
                ..none
            },
        ),
        (
            "pow2",
            RecipeOptions {
                pow2: all.pow2,
                ..none
            },
        ),
        (
            "epsilon",
            RecipeOptions {
                epsilon: all.epsilon,
                ..none
            },
        ),
        (
            "mx_scale",
            RecipeOptions {
                mx_scale: all.mx_scale,
                ..none
            },
        ),
        (
            "source_rounding",
            RecipeOptions {
                source_rounding: all.source_rounding,
                ..none
            },
        ),
    ]
}

/// The names of the options that are set.
fn names(options: &RecipeOptions) -> Vec<&'static str> {
    let set = singles(options)
        .into_iter()
        .filter(|(_, one)| *one != RecipeOptions::default());
    set.map(|(name, _)| name).collect()
}

proptest! {
    #[test]
    fn name_and_options_make_the_same_value(given in options()) {
        for default in AnyRecipe::all() {
            let owned = names(&default.options());
            match AnyRecipe::from_name(default.name(), &given) {
                Ok(recipe) => {
                    prop_assert!(names(&given).iter().all(|name| owned.contains(name)));
                    prop_assert_eq!(names(&recipe.options()), owned);
                    let again = AnyRecipe::from_name(recipe.name(), &recipe.options());
                    prop_assert_eq!(again, Ok(recipe));
                    // What was given is what it has.
                    for (name, one) in singles(&given) {
                        if names(&given).contains(&name) {
                            prop_assert!(singles(&recipe.options()).contains(&(name, one)));
                        }
                    }
                }
                Err(FormatError::UnusedOption { recipe, option }) => {
                    prop_assert_eq!(recipe, default.name());
                    prop_assert!(names(&given).contains(&option) && !owned.contains(&option));
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }
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
    let text = error.to_string();
    assert!(
        text.contains("'fp9'") && AnyRecipe::names().iter().all(|n| text.contains(n)),
        "{text}"
    );
}

#[test]
fn values_out_of_range_are_rejected_where_the_option_exists() {
    let none = RecipeOptions::default();
    let bad = [
        RecipeOptions {
            history: Some(0),
            ..none
        },
        RecipeOptions {
            margin: Some(65),
            ..none
        },
        RecipeOptions {
            margin: Some(-65),
            ..none
        },
        RecipeOptions {
            epsilon: Some(-1.0),
            ..none
        },
        RecipeOptions {
            epsilon: Some(f32::NAN),
            ..none
        },
        RecipeOptions {
            epsilon: Some(f32::INFINITY),
            ..none
        },
    ];
    for options in bad {
        // NaN is not equal to itself, so the name comes from what is set.
        let name = match options {
            RecipeOptions {
                history: Some(_), ..
            } => "history",
            RecipeOptions {
                margin: Some(_), ..
            } => "margin",
            _ => "epsilon",
        };
        let mut rejected = 0;
        for recipe in AnyRecipe::all() {
            let error = AnyRecipe::from_name(recipe.name(), &options).unwrap_err();
            match error {
                FormatError::OptionValue { option, .. } => {
                    assert_eq!(option, name);
                    rejected += 1;
                }
                FormatError::UnusedOption { option, .. } => assert_eq!(option, name),
                other => panic!("{other}"),
            }
        }
        assert!(rejected > 0, "no recipe has {name}");
    }
}
