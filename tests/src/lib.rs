//! Shared parts of the cross-crate tests: golden vectors, value generators, a recipe of the
//! tests' own, models on several ranks, and references that share no code with what they check.

pub mod naive;
pub use lowp_golden as golden;
pub mod model;
pub mod queued;
pub mod spy;
pub mod toy;
pub mod values;
pub mod world;

/// Runs the programs of the tutorial.
#[cfg(doctest)]
#[doc = include_str!("../../docs/tutorial-rust.md")]
struct Tutorial;
