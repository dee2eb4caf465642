//! The model against its definition.

mod gradients;
mod resuming;
mod setup;
mod sharding;
