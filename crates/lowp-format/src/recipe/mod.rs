//! [`AnyRecipe`]: the list of recipes. A new recipe is one file in this folder, which implements [`Recipe`], and one line in
//! the list below.

use enum_dispatch::enum_dispatch;

use crate::{
    BufferList, Code, FormatError, KernelKey, Orientation, Quantizers, Shape, SourceRounding, Usage,
};

mod definition;
mod fp8_format;
mod operand;
mod options;

pub use definition::Recipe;
pub use fp8_format::Fp8Format;
pub use operand::{Operand, Role, Rounding};
pub use options::{OptionSpec, OptionValue, RecipeOptions};

/// Declares the modules, the enum and the list of all recipes.
macro_rules! recipes {
    ($($module:ident :: $Recipe:ident),* $(,)?) => {
        $(mod $module; pub use $module::$Recipe;)*

        /// Any recipe of this crate, as one `Copy` value.
        #[enum_dispatch(Recipe)]
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum AnyRecipe {
            $(
                #[doc = concat!("See [`", stringify!($Recipe), "`].")]
                $Recipe($Recipe),
            )*
        }

        /// A name, the options, and what makes the recipe from them.
        type Declared = (
            &'static str,
            &'static [OptionSpec],
            fn(&RecipeOptions) -> Result<AnyRecipe, FormatError>,
        );

        /// Every recipe, in the order of the list.
        const DECLARED: &[Declared] = &[
            $((
                $Recipe::NAME,
                $Recipe::OPTIONS,
                |options| Ok($Recipe::from_options(options)?.into()),
            )),*
        ];

        impl AnyRecipe {
            /// Every recipe with its default options, in the order of the list.
            pub fn all() -> Vec<Self> {
                vec![$($Recipe::default().into()),*]
            }
        }
    };
}

recipes! {
    plain_f32::PlainF32,
    plain_bf16::PlainBf16,
    fp8_delayed::Fp8Delayed,
    fp8_current::Fp8Current,
    fp8_rowwise::Fp8Rowwise,
    fp8_block::Fp8Block,
    fp8_block_1d::Fp8BlockOneD,
    mxfp8::Mxfp8,
    mxfp8_2d::Mxfp8TwoD,
    mxfp4::Mxfp4,
    nvfp4_1d::Nvfp4OneD,
    nvfp4_2d::Nvfp4TwoD,
    nvfp4_mxfp8::Nvfp4Mxfp8,
    mxfp4_mxfp8::Mxfp4Mxfp8,
}

impl AnyRecipe {
    /// The recipe called `name`, with `options`.
    ///
    /// # Errors
    /// An unknown name, an option that the recipe does not have, or a value out of range.
    pub fn from_name(name: &str, options: &RecipeOptions) -> Result<Self, FormatError> {
        let (_, _, make) = Self::declared(name)?;
        make(options)
    }

    /// What the recipe called `name` says of its options.
    ///
    /// # Errors
    /// An unknown name.
    pub fn options_of(name: &str) -> Result<&'static [OptionSpec], FormatError> {
        Self::declared(name).map(|(_, options, _)| *options)
    }

    fn declared(name: &str) -> Result<&'static Declared, FormatError> {
        let found = DECLARED.iter().find(|(known, ..)| *known == name);
        found.ok_or_else(|| FormatError::UnknownRecipe {
            name: name.to_owned(),
            known: Self::names().join(", "),
        })
    }

    /// The recipe that stores values of `code` as they are, where there is one.
    pub fn plain(code: Code) -> Option<Self> {
        let plain = |recipe: &Self| recipe.kernel(Orientation::Rowwise).element == code;
        Self::all().into_iter().find(plain)
    }

    /// The names of all recipes, in the order of the list.
    pub fn names() -> Vec<&'static str> {
        DECLARED.iter().map(|(name, ..)| *name).collect()
    }

    /// Every recipe whose elements are narrower than 16 bits.
    pub fn low_precision() -> Vec<Self> {
        let narrow = |recipe: &Self| recipe.quantizers(Role::Weight).is_low_precision();
        Self::all().into_iter().filter(narrow).collect()
    }
}
