//! The integration tests of this crate, one file per subject, linked once.

mod arguments;
mod blocks;
mod checkpoints;
mod balance;
mod costs;
mod even_shards;
