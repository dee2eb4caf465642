//! The integration tests of this crate, one file per subject, linked once.

mod agreements;
mod arguments;
mod balance;
mod blocks;
mod checkpoints;
mod costs;
mod even_shards;
mod reductions;
mod runs;
mod state_dtypes;
mod transient_vars;
