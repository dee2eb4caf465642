//! The integration tests of this crate, one file per subject, linked once.

mod failures;
mod logits;
mod memory;
mod micro_batches;
mod products;
mod sharded_model;
