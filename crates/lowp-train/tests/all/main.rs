//! The integration tests of this crate, one file per subject, linked once. `../model_memory.rs` counts what it allocates.

mod late_steps;
mod other_ranks;
mod own_network;
