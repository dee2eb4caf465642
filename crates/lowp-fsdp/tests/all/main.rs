//! The integration tests of this crate, one file per subject, linked once.

mod arguments;
mod blocks;
mod checkpoints;
mod costs;
