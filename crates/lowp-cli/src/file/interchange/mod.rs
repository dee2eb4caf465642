//! What `lowp export` and `lowp import` have in common: the files of other programs (docs/decisions/0017-interchange.md).

pub(super) mod amax;
pub(super) mod config;
pub(super) mod forms;
pub(super) mod hub;
pub(super) mod record;
pub(super) mod shards;
pub(super) mod size;
