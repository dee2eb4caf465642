//! Recipes as people write them: `NAME+MODIFIER+MODIFIER`.
//!
//! A modifier is a value of an option (`+hybrid`), the name of one that is on or off (`+pow2`, `+no-hadamard`), `OPTION=VALUE`,
//! or an [`Ablation`], which changes one ingredient to show what it is worth.
//!
//! ```
//! use lowp_format::{Recipe, Role, spelling::Variant};
//!
//! let variant: Variant = "mxfp8+hybrid".parse()?;
//! assert_eq!(variant.to_string(), "mxfp8+hybrid");
//! println!("{}", variant.operand(Role::Gradient).quantizers.rowwise.kernel.element);
//! # Ok::<(), lowp_format::FormatError>(())
//! ```

mod modifier;
mod options;
mod variant;

pub use modifier::{Ablation, ModifierWords, modifiers, options_of_files, problem};
pub use options::{expected_or_recipes, flag_name, is_switch, recipes_with, specs_of};
pub use variant::Variant;
