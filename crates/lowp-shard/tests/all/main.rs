//! The integration tests of this crate, one file per subject, linked once.

mod accounts;
mod audits;
mod batches;
mod block_cuts;
mod buckets;
mod common;
mod counted;
mod cuda_handles;
mod first_use;
mod flat_places;
mod flat_shards;
mod flat_weights;
mod fsdp;
mod gather;
mod gather_disagreements;
mod grad_buckets;
mod grad_slabs;
mod growth;
mod many_ranks;
mod reductions;
mod reshard_groups;
mod scale_books;
mod sharder_hooks;
mod sharder_hooks_reuse;
mod small_tensors;
mod transposes;
