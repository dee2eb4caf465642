//! The integration tests of this crate, one file per subject, linked once.

mod amax_groups;
mod cli;
mod continued;
mod dtypes;
mod empty_tensors;
mod export_checkpoint;
mod file_commands;
mod file_options;
mod flat_cuts;
mod fused_layers;
mod golden_files;
mod hostile_files;
mod hostile_inputs;
mod hub_folders;
mod interchange;
mod interchange_errors;
mod interrupted_files;
mod logs;
mod output_files;
mod products;
mod rank_files;
mod recipe_options;
mod support;
#[cfg(unix)]
mod tutorial;
mod verify_source;
