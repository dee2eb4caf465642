//! Options of recipes as text: [`RecipeOptions`], the values by name, and [`OptionSpec`], what a recipe says of each.
//! A recipe declares its options with its fields, by [`recipe!`](super), and nothing else lists them.

use std::fmt::Write;

use crate::{AmaxAlgorithm, FormatError, FourOverSix, MxScale, Rounding, SourceRounding};

/// A value of an option, as text.
pub trait OptionValue: Copy + PartialEq + 'static {
    /// The value that `text` names.
    fn parse(text: &str) -> Option<Self>;

    /// Its text: `parse` gives the same value again.
    fn text(&self) -> String;

    /// The texts of all values, where they are few.
    fn names() -> &'static [&'static str] {
        &[]
    }
}

/// What a recipe says of one of its options.
#[derive(Clone, Copy, Debug)]
pub struct OptionSpec {
    /// Name of the field.
    pub name: &'static str,
    /// What it is for, from the documentation of the field.
    pub help: &'static str,
    /// The texts of all values, where they are few.
    pub names: fn() -> &'static [&'static str],
}

/// Values of options by name, in the order in which they were set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecipeOptions(Vec<(String, String)>);

impl RecipeOptions {
    /// The options with `name` set to `value`.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl OptionValue) -> Self {
        self.set(name, &value.text());
        self
    }

    /// Sets `name` to the value that `text` names.
    pub fn set(&mut self, name: &str, text: &str) {
        self.0.retain(|(known, _)| known != name);
        self.0.push((name.to_owned(), text.to_owned()));
    }

    /// The text of `name`, if it is set.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter()
            .find(|(known, _)| *known == name)
            .map(|(_, text)| text)
    }

    /// Names and texts.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, text)| (&**name, &**text))
    }
}

/// The value of option `option` that `text` names, if `allowed` holds of it; `expected` says what is allowed.
pub(super) fn read<T: OptionValue>(
    option: &'static str,
    text: &str,
    allowed: impl Fn(&T) -> bool,
    expected: Option<&str>,
) -> Result<T, FormatError> {
    T::parse(text).filter(allowed).ok_or_else(|| {
        let names = T::names();
        let mut list = String::new();
        for (i, name) in names.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            let _ = write!(list, "{comma}{name}");
        }
        FormatError::OptionValue {
            option,
            value: text.to_owned(),
            expected: match (expected, names.is_empty()) {
                (Some(expected), _) => expected.to_owned(),
                (None, false) => format!("one of {list}"),
                (None, true) => "a number".to_owned(),
            },
        }
    })
}

/// Values with names.
macro_rules! named {
    ($Type:ty { $($value:path = $name:literal),+ $(,)? }) => {
        impl OptionValue for $Type {
            fn parse(text: &str) -> Option<Self> {
                match text {
                    $($name => Some($value),)+
                    _ => None,
                }
            }
            fn text(&self) -> String {
                match self { $($value => $name,)+ }.to_owned()
            }
            fn names() -> &'static [&'static str] {
                &[$($name),+]
            }
        }
    };
}

/// Whole numbers, in their shortest text.
macro_rules! numbers {
    ($($Type:ty),+) => {$(
        impl OptionValue for $Type {
            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }
            fn text(&self) -> String {
                self.to_string()
            }
        }
    )+};
}

numbers!(i32, usize);

impl OptionValue for f32 {
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    /// With a point or an exponent, as files have it.
    fn text(&self) -> String {
        format!("{self:?}")
    }
}

impl OptionValue for bool {
    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn text(&self) -> String {
        self.to_string()
    }
    fn names() -> &'static [&'static str] {
        &["true", "false"]
    }
}

named!(super::Fp8Format {
    super::Fp8Format::E4M3 = "e4m3",
    super::Fp8Format::E5M2 = "e5m2",
    super::Fp8Format::Hybrid = "hybrid",
});
named!(MxScale {
    MxScale::Te = "te",
    MxScale::OcpFloor = "ocp-floor",
    MxScale::Even = "even",
});
named!(AmaxAlgorithm {
    AmaxAlgorithm::Max = "max",
    AmaxAlgorithm::MostRecent = "most-recent",
});
named!(SourceRounding {
    SourceRounding::F32 = "f32",
    SourceRounding::ViaBf16 = "via-bf16",
});
named!(Rounding {
    Rounding::Nearest = "nearest",
    Rounding::Stochastic = "stochastic",
});
named!(FourOverSix {
    FourOverSix::Off = "off",
    FourOverSix::Mae = "mae",
    FourOverSix::Mse = "mse",
    FourOverSix::Mae448 = "mae-448",
    FourOverSix::Mse448 = "mse-448",
});

/// Declares a recipe: its type, its name, its options with their defaults, and how text becomes a value of it. A field
/// may say which values it takes: `field: Type = default => pattern, "what is allowed"`.
macro_rules! recipe {
    (
        $(#[$meta:meta])*
        pub struct $Recipe:ident = $name:literal {
            $(
                #[doc = $help:literal]
                pub $field:ident: $Type:ty = $default:expr $(=> $allowed:pat, $expected:literal)?;
            )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $Recipe {
            $(
                #[doc = $help]
                pub $field: $Type,
            )*
        }

        impl Default for $Recipe {
            fn default() -> Self {
                Self { $($field: $default),* }
            }
        }

        impl $Recipe {
            /// The name of the recipe.
            pub const NAME: &'static str = $name;

            /// What it says of its options.
            pub const OPTIONS: &'static [$crate::OptionSpec] = &[$(
                $crate::OptionSpec {
                    name: stringify!($field),
                    help: $help,
                    names: <$Type as $crate::OptionValue>::names,
                }
            ),*];

            /// The recipe with `options`, and defaults for the others.
            ///
            /// # Errors
            /// An option that it does not have, or a value that the option does not take.
            pub fn from_options(
                options: &$crate::RecipeOptions,
            ) -> Result<Self, $crate::FormatError> {
                #[allow(unused_mut, reason = "not every recipe has options")]
                let mut recipe = Self::default();
                for (name, text) in options.iter() {
                    let _ = text;
                    match name {
                        $(
                            stringify!($field) => {
                                let allowed = |value: &$Type| {
                                    let _ = value;
                                    true $(&& matches!(*value, $allowed))?
                                };
                                let expected: Option<&str> = None$(.or(Some($expected)))?;
                                let option = stringify!($field);
                                recipe.$field = $crate::recipe::options::read(option, text, allowed, expected)?;
                            }
                        )*
                        _ => {
                            return Err($crate::FormatError::UnusedOption {
                                recipe: Self::NAME,
                                option: name.to_owned(),
                            });
                        }
                    }
                }
                Ok(recipe)
            }

            /// The options that make this value again.
            fn set_options(&self) -> $crate::RecipeOptions {
                $crate::RecipeOptions::default()$(.with(stringify!($field), self.$field))*
            }
        }
    };
}
pub(super) use recipe;

/// The answers of a recipe that follow from its declaration by [`recipe!`]: its name, its options, and the rounding of the source
/// where that is one of them.
macro_rules! declared {
    ($($source_rounding:ident)?) => {
        fn name(&self) -> &'static str {
            Self::NAME
        }

        fn options(&self) -> $crate::RecipeOptions {
            self.set_options()
        }

        $(
            fn source_rounding(&self) -> $crate::SourceRounding {
                self.$source_rounding
            }
        )?
    };
}
pub(super) use declared;
