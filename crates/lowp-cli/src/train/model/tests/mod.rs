//! The model against its definition.

mod gradients;
mod setup;
mod sharding;
