//! What every kernel costs on a GPU: [`cases`] are the rows of `lowp bench`, [`measure`] times one of them.

mod cases;
mod data;
mod measure;

pub use cases::{Case, cases};
pub use measure::{Timing, copy_rate, measure};

use crate::KernelError;

type Result<T> = std::result::Result<T, KernelError>;
