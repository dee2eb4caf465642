//! What the conformance suite (`lowp-conformance`) sees besides the API. Not part of the API.

pub use crate::check::reads::Reads;
#[cfg(feature = "cuda")]
pub use crate::cuda::WIDE_TILES;
pub use crate::ingredients::{RuleKind, TABLE, is_stochastic, known, rounded_axis};
pub use crate::lanes::Isa;
