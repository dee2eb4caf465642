//! What damaged input does to the file commands, run in this process.

mod counted;
pub(crate) mod hostile;
mod hostile_models;
