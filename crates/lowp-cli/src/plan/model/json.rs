//! The JSON form of a model's plan.

use super::made::Plan;
use crate::reshard;
use anyhow::Result;
use lowp_fsdp::cost::{
    self, Costs, LinkBytes, MovedBytes, OffloadCost, RankMemory, RankSpread, Rate, Spread,
};
use lowp_optim::{Rule, StateDtypes};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

#[derive(Serialize)]
struct Document<'a> {
    model: Model<'a>,
    config: Config<'a>,
    resident_weight_bytes: u128,
    master_weight_bytes: u128,
    wire_bytes_per_step: u128,
    parameter_bytes_per_rank: u128,
    memory: RankMemory,
    by_rank: ByRank,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<Device>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<OffloadCost>,
    left_out: Vec<LeftOut>,
    operations: Vec<Operation<'a>>,
    total: Total,
    bf16: Reference,
    ratio: Ratio,
    bandwidth: Option<Rates>,
    notes: &'a [String],
}

#[derive(Serialize)]
struct Model<'a> {
    name: &'a str,
    linear_layers: usize,
    linear_parameters: u128,
    variables: usize,
    variable_parameters: u128,
}

#[derive(Serialize)]
struct Config<'a> {
    recipe: &'a str,
    mesh: [usize; 2],
    ranks: usize,
    ranks_per_node: usize,
    nodes: usize,
    sharding: &'static str,
    reshard_after_forward: Value,
    grad_wire: &'static str,
    accumulate: usize,
    reduce_every_micro_batch: bool,
    recompute: bool,
    kept_in_bf16: &'a [&'a str],
    #[serde(skip_serializing_if = "Option::is_none")]
    optimizer: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    optimizer_state: Option<String>,
}

/// What ranks have and send of linear layers.
#[derive(Serialize)]
struct ByRank {
    masters: Spread,
    states: Spread,
    codes: Spread,
    scales: Spread,
    total: Spread,
    sent_of_a_block: BTreeMap<&'static str, Spread>,
}

/// What a GPU holds beside `memory`, and all that it holds.
#[derive(Serialize)]
struct Device {
    sequences: usize,
    scales: u128,
    variables_gathered: u128,
    staging: u128,
    activations: Option<u64>,
    in_turn: Option<u64>,
    workspaces: Option<u64>,
    total: u128,
}

#[derive(Serialize)]
struct LeftOut {
    what: &'static str,
    bytes: Option<u128>,
}

#[derive(Serialize)]
struct Operation<'a> {
    what: &'static str,
    code: &'a str,
    passes: usize,
    sent_bytes: u128,
    rank: LinkBytes,
    world: LinkBytes,
    seconds: Option<f64>,
}

#[derive(Serialize)]
struct Total {
    rank: LinkBytes,
    world: LinkBytes,
    seconds: Option<f64>,
}

#[derive(Serialize)]
struct Reference {
    memory_total: u128,
    wire_bytes_per_step: u128,
    rank: LinkBytes,
    world: LinkBytes,
    seconds: Option<f64>,
}

#[derive(Serialize)]
struct Ratio {
    memory: Option<f64>,
    wire: Option<f64>,
    within_node: Option<f64>,
    between_nodes: Option<f64>,
    seconds: Option<f64>,
}

#[derive(Serialize)]
struct Rates {
    within_node: String,
    between_nodes: Option<String>,
}

/// The whole document as text.
pub(super) fn render(plan: &Plan<'_>) -> Result<String> {
    let Plan {
        model,
        setup,
        costs,
        bf16,
        ..
    } = plan;
    let [linear_parameters, variable_parameters] = model.shapes.parameters();
    let MovedBytes { rank, world } = costs.step.moved();
    let reference = reference(bf16);
    let total = Total {
        rank,
        world,
        seconds: costs.step.seconds(),
    };
    let document = Document {
        model: Model {
            name: &model.name,
            linear_layers: model.shapes.layers.len(),
            linear_parameters,
            variables: model.shapes.vars.len(),
            variable_parameters,
        },
        config: Config {
            recipe: plan.recipe,
            mesh: [setup.mesh.replicate, setup.mesh.shard],
            ranks: setup.mesh.world(),
            ranks_per_node: setup.per_node,
            nodes: plan.nodes(),
            sharding: setup.sharding.name(),
            reshard_after_forward: reshard::value(setup.reshard),
            grad_wire: setup.grad_wire.name(),
            accumulate: setup.accumulate,
            reduce_every_micro_batch: setup.reduce_every_micro_batch,
            recompute: setup.recompute,
            kept_in_bf16: &plan.kept_in_bf16,
            optimizer: (setup.rule != Rule::default()).then(|| setup.rule.name()),
            optimizer_state: (setup.state != StateDtypes::default())
                .then(|| setup.state.to_string()),
        },
        resident_weight_bytes: costs.resident,
        master_weight_bytes: costs.masters,
        wire_bytes_per_step: costs.step.wire_bytes(),
        parameter_bytes_per_rank: costs.memory.total,
        memory: costs.memory,
        by_rank: by_rank(&costs.spread),
        device: device(plan),
        host: setup.offload.then(|| costs.offloaded.clone()),
        left_out: plan
            .left_out()
            .into_iter()
            .map(|(what, bytes)| LeftOut { what, bytes })
            .collect(),
        operations: costs.step.operations.iter().map(operation).collect(),
        ratio: Ratio {
            memory: ratio(reference.memory_total, costs.memory.total),
            wire: ratio(reference.wire_bytes_per_step, costs.step.wire_bytes()),
            within_node: ratio(reference.world.within_node, world.within_node),
            between_nodes: ratio(reference.world.between_nodes, world.between_nodes),
            seconds: reference
                .seconds
                .zip(total.seconds)
                .and_then(|(bf16, here)| (here > 0.0).then(|| bf16 / here)),
        },
        total,
        bf16: reference,
        bandwidth: plan.bandwidth.map(|bandwidth| Rates {
            within_node: bandwidth.within_node.source(),
            between_nodes: bandwidth.between_nodes.as_ref().map(Rate::source),
        }),
        notes: &plan.notes,
    };
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

fn by_rank(spread: &RankSpread) -> ByRank {
    ByRank {
        masters: spread.masters,
        states: spread.states,
        codes: spread.codes,
        scales: spread.scales,
        total: spread.total,
        sent_of_a_block: spread.sent.iter().map(|(key, _, of)| (*key, *of)).collect(),
    }
}

fn device(plan: &Plan<'_>) -> Option<Device> {
    let (costs, [network, _]) = (&plan.costs, &plan.networks);
    Some(Device {
        sequences: plan.batch?.sequences,
        scales: costs.scales,
        variables_gathered: costs.var_gather_bytes,
        staging: costs.staging,
        activations: network.map(|network| network.activations),
        in_turn: network.map(|network| network.in_turn),
        workspaces: network.map(|network| network.workspaces),
        total: costs.on_device() + network.map_or(0, |network| network.total().into()),
    })
}

fn operation(operation: &cost::CollectiveCost) -> Operation<'_> {
    Operation {
        what: operation.key,
        code: &operation.code,
        passes: operation.passes,
        sent_bytes: operation.sent,
        rank: operation.moved.rank,
        world: operation.moved.world,
        seconds: operation.seconds,
    }
}

fn reference(costs: &Costs) -> Reference {
    let MovedBytes { rank, world } = costs.step.moved();
    Reference {
        memory_total: costs.memory.total,
        wire_bytes_per_step: costs.step.wire_bytes(),
        rank,
        world,
        seconds: costs.step.seconds(),
    }
}

fn ratio(bf16: u128, here: u128) -> Option<f64> {
    (here > 0).then(|| bf16 as f64 / here as f64)
}
