//! lowp-shard
