//! The model against its definition.

mod controls;
mod gradients;
mod resuming;
mod setup;
mod sharding;
