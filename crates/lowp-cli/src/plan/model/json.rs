//! The JSON form of a model's plan.

use super::made::Plan;
use crate::{output, reshard};
use anyhow::Result;
use lowp_fsdp::cost::{CollectiveCost, MovedBytes, OffloadCost, RankMemory, RankSpread, Rate};
use lowp_optim::{Rule, StateDtypes};
use serde::Serialize;
use serde_json::Value;

#[derive(Serialize)]
struct Document<'a> {
    model: Model<'a>,
    config: Config<'a>,
    resident_weight_bytes: u128,
    master_weight_bytes: u128,
    wire_bytes_per_step: u128,
    parameter_bytes_per_rank: u128,
    memory: RankMemory,
    by_rank: &'a RankSpread,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<Device>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<OffloadCost>,
    left_out: Vec<LeftOut>,
    operations: &'a [CollectiveCost],
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
struct Total {
    #[serde(flatten)]
    moved: MovedBytes,
    seconds: Option<f64>,
}

#[derive(Serialize)]
struct Reference {
    memory_total: u128,
    wire_bytes_per_step: u128,
    #[serde(flatten)]
    total: Total,
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
    let [total, of_bf16] = [costs, bf16].map(|costs| Total {
        moved: costs.step.moved(),
        seconds: costs.step.seconds(),
    });
    let (world, reference) = (total.moved.world, of_bf16.moved.world);
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
        by_rank: &costs.spread,
        device: device(plan),
        host: setup.offload.then(|| costs.offloaded.clone()),
        left_out: plan
            .left_out()
            .into_iter()
            .map(|(what, bytes)| LeftOut { what, bytes })
            .collect(),
        operations: &costs.step.operations,
        ratio: Ratio {
            memory: ratio(bf16.memory.total, costs.memory.total),
            wire: ratio(bf16.step.wire_bytes(), costs.step.wire_bytes()),
            within_node: ratio(reference.within_node, world.within_node),
            between_nodes: ratio(reference.between_nodes, world.between_nodes),
            seconds: of_bf16
                .seconds
                .zip(total.seconds)
                .and_then(|(bf16, here)| (here > 0.0).then(|| bf16 / here)),
        },
        total,
        bf16: Reference {
            memory_total: bf16.memory.total,
            wire_bytes_per_step: bf16.step.wire_bytes(),
            total: of_bf16,
        },
        bandwidth: plan.bandwidth.map(|bandwidth| Rates {
            within_node: bandwidth.within_node.source(),
            between_nodes: bandwidth.between_nodes.as_ref().map(Rate::source),
        }),
        notes: &plan.notes,
    };
    output::json(&document)
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

fn ratio(bf16: u128, here: u128) -> Option<f64> {
    (here > 0).then(|| bf16 as f64 / here as f64)
}
