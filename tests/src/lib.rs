//! Shared parts of the cross-crate tests: the golden vectors and the value generators.

pub mod golden;
pub mod toy;
pub mod values;
pub mod world;
