//! The model against its definition.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod bits;
mod controls;
mod dense;
mod gradients;
mod resuming;
mod setup;
mod sharding;
