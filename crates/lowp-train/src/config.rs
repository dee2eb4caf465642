//! [`ConfigRecord`]: what result files say of a configuration.

use super::config::Config;
use lowp_fsdp::Sharding;
use serde::Serialize;
use serde_json::Value;

/// The configuration as it stands in the JSON file and the report.
#[derive(Debug, Serialize)]
pub(crate) struct ConfigRecord {
    dim: usize,
    layers: usize,
    heads: usize,
    seq: usize,
    vocab: usize,
    arch: &'static str,
    kv_heads: Option<usize>,
    batch: usize,
    accumulate: usize,
    recompute: bool,
    kept_in_bf16: Vec<String>,
    amax_groups: Vec<Vec<String>>,
    tail_steps: usize,
    steps: usize,
    seed: u64,
    seeds: usize,
    mesh: [usize; 2],
    sharding: &'static str,
    reshard_after_forward: Value,
    grad_wire: &'static str,
    lr: f32,
    warmup: u64,
    final_lr: f32,
    weight_decay: f32,
    clip: f32,
    eval_batches: usize,
}

impl Config {
    /// The part of it that goes into result files.
    pub(crate) fn record(&self) -> ConfigRecord {
        ConfigRecord {
            dim: self.model.dim,
            layers: self.model.layers,
            heads: self.model.heads,
            seq: self.model.seq,
            vocab: self.model.vocab,
            arch: self.model.arch.name(),
            kv_heads: self.model.arch.kv_heads(),
            batch: self.batch,
            accumulate: self.accumulate,
            recompute: self.recompute,
            kept_in_bf16: self.kept_in_bf16.clone(),
            amax_groups: self.amax_groups.clone(),
            tail_steps: self.tail_steps,
            steps: self.steps,
            seed: self.seed,
            seeds: self.seeds,
            mesh: [self.mesh.replicate, self.mesh.shard],
            sharding: match self.sharding {
                Sharding::Fsdp => "fsdp",
                Sharding::Zero1 => "zero1",
            },
            reshard_after_forward: crate::reshard::value(self.reshard_after_forward),
            grad_wire: self.grad_wire_name(),
            lr: self.group.lr,
            warmup: self.schedule.warmup,
            final_lr: self.schedule.floor,
            weight_decay: self.group.weight_decay,
            clip: self.clip,
            eval_batches: self.eval_batches,
        }
    }
}
