//! The integration tests of this crate, one file per subject, linked once.

mod arguments;
mod checkpoints;
mod blocks;
mod costs;
