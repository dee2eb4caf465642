//! The model against its definition.

mod gradients;
mod sharding;
