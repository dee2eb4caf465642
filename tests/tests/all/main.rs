//! The tests across crates, one file per subject, linked once.

mod failures;
mod failures_of_backends;
mod failures_of_models;
mod failures_of_ranks;
mod golden_adam;
mod golden_flat;
mod golden_format;
mod golden_fsdp;
mod golden_te;
mod laws;
mod optimizer;
mod optimizer_flat;
mod optimizer_gathers;
mod optimizer_groups;
mod optimizer_mesh;
mod order_of_handles;
mod planted_defects;
mod state_is_an_argument;
mod steps_compare;
