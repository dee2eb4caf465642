//! [`Plan`]: what a model costs, as tables and JSON say it.

use super::layers::Model;
use lowp_fsdp::VarPlace;
use lowp_fsdp::cost::{Bandwidth, CostConfig, Costs};
use lowp_transformer::{MicroBatch, ModelMemory};

/// A plan.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) recipe: &'a str,
    pub(super) model: &'a Model,
    pub(super) setup: CostConfig,
    pub(super) kept_in_bf16: Vec<&'a str>,
    pub(super) costs: Costs,
    pub(super) bf16: Costs,
    /// What a GPU runs at a time.
    pub(super) batch: Option<MicroBatch>,
    /// What layers hold there beside their parameters, and in bf16.
    pub(super) networks: [Option<ModelMemory>; 2],
    pub(super) bandwidth: Option<&'a Bandwidth>,
    pub(super) notes: Vec<String>,
}

const VARS_GATHERED: &str = "f32 shards of the variables, and the memory to gather those that stay";
const SCALES: &str = "scale histories and agreed amaxes";
const CONTEXT: &str = "the CUDA context, and workspaces of libraries";
const SLACK: &str = "unused memory of allocators";

impl Plan<'_> {
    /// What the memory leaves out, with its bytes where they are known.
    pub(super) fn left_out(&self) -> Vec<(&'static str, Option<u128>)> {
        let unknown = |what: &[&'static str]| what.iter().map(|&what| (what, None)).collect();
        match (self.setup.vars, self.networks[0]) {
            (VarPlace::Host, _) => {
                let mut all = vec![(VARS_GATHERED, Some(self.costs.var_gather_bytes))];
                let others: Vec<_> = unknown(&[
                    "activations",
                    "casts of operands, and f32 gradients of a layer before they are in a bucket",
                    SCALES,
                    "staging of collectives",
                    CONTEXT,
                    SLACK,
                ]);
                all.extend(others);
                all
            }
            (VarPlace::Backend, Some(_)) => unknown(&["tables of plans", SCALES, CONTEXT, SLACK]),
            (VarPlace::Backend, None) => unknown(&[
                "activations, and what products and attention work in",
                "tables of plans",
                SCALES,
                CONTEXT,
                SLACK,
            ]),
        }
    }

    /// The parts of the memory of a rank with what they are, and their sum, here or with all layers in bf16.
    pub(super) fn rows(&self, in_bf16: bool) -> Vec<(&'static str, u128)> {
        let (costs, network) = match in_bf16 {
            true => (&self.bf16, &self.networks[1]),
            false => (&self.costs, &self.networks[0]),
        };
        let mut rows = costs.memory.rows().to_vec();
        if self.setup.vars == VarPlace::Backend {
            let [(_, weights), ..] = costs.memory.rows();
            rows.splice(
                ..1,
                [
                    ("weights, codes", weights - costs.scales),
                    ("weights, scales", costs.scales),
                ],
            );
            rows.push(("variables, as they are gathered", costs.var_gather_bytes));
            rows.push(("gradients that arrive and go on", costs.staging));
            if let Some(network) = network {
                let ModelMemory {
                    activations,
                    in_turn,
                    workspaces,
                } = *network;
                rows.push(("activations, kept for backward", activations.into()));
                rows.push(("activations and operands, reused", in_turn.into()));
                rows.push(("workspaces", workspaces.into()));
            }
        }
        let total = rows.iter().map(|(_, bytes)| bytes).sum();
        rows.push(("total", total));
        let host = costs.offloaded.bytes_per_rank;
        if host > 0 {
            rows.push(("  on the host, page-locked", host));
            rows.push(("  on the GPU", total - host));
        }
        rows
    }

    pub(super) fn nodes(&self) -> usize {
        self.setup.mesh.world().div_ceil(self.setup.per_node)
    }
}
