//! The integration tests of this crate, one file per subject, linked once. `../failures` starts processes.

#[cfg(feature = "cuda")]
mod common;
#[cfg(feature = "cuda")]
mod flat;
mod grid;
#[cfg(feature = "cuda")]
mod owned;
#[cfg(feature = "cuda")]
mod ranks;
