//! Rank files: a model in one file per rank, each with its own rows, as `lowp shard` writes it and `lowp unshard` gathers it.

mod shard;
mod unshard;

pub use crate::meta::MAX_WORLD;
pub use crate::rank_names::{is_folder, paths};
pub use shard::shard;
pub use unshard::RankFiles;
