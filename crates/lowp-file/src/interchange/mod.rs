//! What exports and imports have in common: the files of other programs (docs/decisions/0017-interchange.md).

pub(crate) mod amax;
pub(crate) mod config;
pub(crate) mod forms;
pub mod hub;
pub(crate) mod record;
