//! `lowp plan --model`: what a whole model costs, as `lowp train` accounts for it, before anything is allocated.

mod bandwidth;
mod device;
mod json;
mod layers;
mod made;
mod table;

use super::Args;
use crate::device::Device;
use crate::files::read_json;
use crate::output::shown;
use crate::sharding::none_in_bf16;
use crate::train::{self, Preset};
use crate::usage::{UsageError, input_error};
use anyhow::Result;
use clap::ValueEnum;
use layers::Model;
use lowp_comm::{GradWire, MAX_PEER_GPUS, Mesh};
use lowp_format::spelling::Variant;
use lowp_format::{AnyRecipe, Code, check_layer, layer_error};
use lowp_fsdp::VarPlace;
use lowp_fsdp::cost::{
    Bandwidth, CostConfig, CostError, Costs, LayerShape, MAX_MICRO_BATCHES, MAX_RANKS,
};
use lowp_optim::StateDtypes;
use lowp_train::Run;
use lowp_transformer::{GptConfig, HubModel};
use made::Plan;
use std::path::Path;

/// The plan of the model that `args` name, in `recipe`, as text.
pub(super) fn plan(args: &Args, recipe: Variant) -> Result<String> {
    let setup = setup(args)?;
    let model = model(args)?;
    let batch = device::batch(args, &setup, &model)?;
    let run = Run::new(args.recipe.clone(), recipe);
    run.and_then(|run| run.check_sharding(setup.sharding))
        .map_err(UsageError::from)?;
    let kept = model.matching(&args.sharded.keep_bf16)?;
    let variant = |(at, &kept): (usize, &bool)| match kept {
        true => recipe.in_bf16(),
        false => recipe.of_block(model.shapes.layers[at].block, model.blocks),
    };
    let variants: Vec<Variant> = kept.iter().enumerate().map(variant).collect();
    let bandwidth = args.bandwidth.as_deref();
    let bandwidth = bandwidth.map(bandwidth::bandwidth).transpose()?;
    let bandwidth = bandwidth.as_ref();
    let of =
        |variants: &[Variant], recipe: &str| costs(&model, variants, recipe, &setup, bandwidth);
    let in_bf16 = AnyRecipe::plain(Code::Bf16).map_or(recipe, Variant::from);
    let all_bf16 = vec![in_bf16; variants.len()];
    let bf16 = of(&all_bf16, "bf16")?;
    let costs = of(&variants, &args.recipe)?;
    let mut notes = model.notes.clone();
    let of = |variants: &[Variant]| device::network(&model, variants, batch.as_ref());
    let networks = [of(&variants)?, of(&all_bf16)?];
    if batch.is_some() {
        notes.push(device::note(&model));
    }
    let recipes = variants.iter().copied();
    notes.extend(none_in_bf16(setup.state, &args.recipe, recipes));
    notes.extend(uneven(&costs, &setup));
    notes.extend(direct(&costs, &setup));
    if let Some(bandwidth) = bandwidth {
        let Mesh { shard, .. } = setup.mesh;
        if let (Some(source), 2..) = (bandwidth.of_one_gpu(), shard) {
            return Err(input_error(format!(
                "--bandwidth: {source} has no rates for gathers of {shard} ranks; give a file of `lowp bench --ranks N` with N above 1, or GB/s",
            )));
        }
        if bandwidth.between_nodes.is_none() && costs.step.gathers_between_nodes() {
            return Err(input_error(format!(
                "--bandwidth has only the rate within a node, but groups of {shard} ranks span nodes of {} ranks; add the rate between \
                 nodes: --bandwidth {},GB/S",
                setup.per_node,
                shown(args.bandwidth.as_deref().unwrap_or_default())
            )));
        }
        let sizes = [&costs, &bf16].map(|costs| costs.step.sizes);
        let all = sizes.into_iter().flatten();
        let sizes = all.reduce(|a, b| [a[0].min(b[0]), a[1].max(b[1])]);
        if let Some(sizes) = sizes {
            notes.extend(bandwidth.notes(sizes, shard.min(setup.per_node)));
        }
        if !bandwidth.knows_batches() && costs.step.several {
            notes.push(
                "the time does not include scales that are sent after their codes: a file of `lowp bench --ranks` has that time"
                    .to_owned(),
            );
        }
        if !bandwidth.knows_copies() && costs.step.copies {
            notes.push(
                "the time does not include copies and transposes on a rank: a file of `lowp bench --ranks` has their rate"
                    .to_owned(),
            );
        }
    }
    let kept_in_bf16 = model
        .shapes
        .layers
        .iter()
        .zip(&kept)
        .filter(|(_, kept)| **kept);
    let plan = Plan {
        recipe: &args.recipe,
        model: &model,
        setup,
        kept_in_bf16: kept_in_bf16.map(|(layer, _)| layer.name.as_str()).collect(),
        costs,
        bf16,
        batch,
        networks,
        bandwidth,
        notes,
    };
    match args.json {
        true => json::render(&plan),
        false => Ok(table::render(&plan)),
    }
}

/// What the options say of ranks and steps.
fn setup(args: &Args) -> Result<CostConfig, UsageError> {
    let mesh = match (args.sharded.mesh, args.world_size) {
        (Some(mesh), Some(world)) if mesh.world() != world => {
            return Err(UsageError::new(format!(
                "--mesh {mesh} is {} ranks and --world-size {world}; leave one of them out",
                mesh.world()
            )));
        }
        (Some(mesh), _) => mesh,
        (None, world) => Mesh::sharded(world.unwrap_or(0)),
    };
    let ranks = match args.sharded.mesh {
        Some(_) => "--mesh: its number of ranks",
        None => "--world-size",
    };
    train::check_ranges(&[
        (ranks, mesh.world(), MAX_RANKS),
        ("--ranks-per-node", args.ranks_per_node, MAX_RANKS),
        ("--accumulate", args.sharded.accumulate, MAX_MICRO_BATCHES),
    ])?;
    let sharding = args.sharded.sharding;
    let reshard = train::reshard(args.sharded.reshard_after_forward, sharding, mesh.shard)?;
    let on_devices = matches!(args.device, Device::Cuda(_));
    Ok(CostConfig {
        mesh,
        per_node: args.ranks_per_node,
        sharding,
        reshard: reshard.among(mesh.shard)?,
        grad_wire: args.sharded.grad_wire,
        rule: args.sharded.optimizer.rule(),
        state: state(args)?,
        offload: args.sharded.offload_optimizer,
        vars: match on_devices {
            true => VarPlace::Backend,
            false => VarPlace::Host,
        },
        prefetch: !args.sharded.no_prefetch,
        peer_reads: on_devices
            && mesh.world() <= args.ranks_per_node
            && mesh.shard <= MAX_PEER_GPUS,
        accumulate: args.sharded.accumulate,
        reduce_every_micro_batch: args.sharded.reduce_every_micro_batch,
        recompute: args.sharded.recompute,
    })
}

/// The dtypes of masters, and of the states that the optimizer has.
fn state(args: &Args) -> Result<StateDtypes, UsageError> {
    let state = args.sharded.optimizer_state();
    args.sharded.optimizer.check_states(state)?;
    Ok(state)
}

/// The model of a preset or of a file.
fn model(args: &Args) -> Result<Model, UsageError> {
    let source = args.model.as_deref().unwrap_or_default();
    if let Ok(preset) = Preset::from_str(source, false) {
        args.sizes.check()?;
        let sizes = args.sizes.of(preset.config());
        sizes.check()?;
        sizes.check_bytes()?;
        return Model::of_sizes(source, sizes);
    }
    if !Path::new(source).exists() {
        let presets = Preset::value_variants().iter();
        let presets =
            presets.filter_map(|preset| Some(preset.to_possible_value()?.get_name().to_owned()));
        return Err(UsageError::new(format!(
            "--model {}: there is no such file, and the presets are {}",
            shown(source),
            presets.collect::<Vec<_>>().join(", ")
        )));
    }
    let file = match Path::new(source).is_dir() {
        true => format!("{source}/config.json"),
        false => source.to_owned(),
    };
    let on_gpus = args.device != Device::Cpu;
    let changed = args.sizes.given();
    if let Some(option) = changed
        .into_iter()
        .find(|option| !on_gpus || *option != "--seq")
    {
        return Err(UsageError::new(format!(
            "{option} changes a size of a preset, but {} defines its own sizes; leave the option out",
            shown(source)
        )));
    }
    let json = read_json("--model", &file)?;
    let network = on_gpus.then(|| {
        let network = GptConfig::of_hub(&file, &json, args.sizes.seq);
        let network = network.map_err(|error| error.to_string())?;
        network.sizes().check().map(|()| network)
    });
    let whole = |json| HubModel::new(source, json).map_err(|e| UsageError::new(e.to_string()));
    match network {
        Some(Ok(network)) => Model::of_sizes(source, network),
        Some(Err(error)) if args.sizes.seq.is_some() => Err(UsageError::new(error)),
        Some(Err(error)) => Ok(Model {
            unplanned: Some(error),
            ..whole(json)?.into()
        }),
        None => whole(json).map(Model::from),
    }
}

/// What the layers of `model` cost in these variants of `recipe`.
fn costs(
    model: &Model,
    variants: &[Variant],
    recipe: &str,
    setup: &CostConfig,
    bandwidth: Option<&Bandwidth>,
) -> Result<Costs, UsageError> {
    let remedy = |layer: &LayerShape| {
        // The same layer of every block.
        let stem = layer.name.trim_end_matches(".weight");
        let from = stem.rfind('.').unwrap_or(0);
        let pattern = format!("*{}", &layer.name[from..]);
        format!("keep it in bf16 (--keep-bf16 '{pattern}'), or choose another recipe")
    };
    for (layer, variant) in model.shapes.layers.iter().zip(variants) {
        if let Err(error) = check_layer(variant, layer.shape) {
            let cause = layer_error(&layer.name, layer.shape, recipe, &error);
            return Err(UsageError::new(format!("{cause}; {}", remedy(layer))));
        }
    }
    let costs = Costs::new(&model.shapes, variants, recipe, setup, bandwidth);
    costs.map_err(|error| match error {
        CostError::Layer { number, source } => {
            let layer = &model.shapes.layers[number];
            UsageError::new(format!("layer {}: {source}; {}", layer.name, remedy(layer)))
        }
        other => UsageError::new(other.to_string()),
    })
}

/// What to know where rows that are cut at whole blocks leave some ranks with much more than others.
fn uneven(costs: &Costs, setup: &CostConfig) -> Option<String> {
    let Costs {
        memory,
        masters,
        idle_ranks,
        ..
    } = costs;
    let shards = setup.mesh.shard;
    let mean = masters / shards as u128;
    let none = match idle_ranks {
        0 => String::new(),
        idle => format!(", and {idle} of {shards} ranks of a replica have none"),
    };
    (10 * memory.masters > 11 * mean.max(1)).then(|| {
        format!(
            "rows are cut at whole blocks: rank {} has {} bytes of masters, and the mean is {mean}{none}; fewer shards in more \
             replicas (--mesh), or --sharding zero1, distribute them more evenly",
            memory.rank, memory.masters
        )
    })
}

/// The note for plans in which gradients cross nodes unreduced: those in f32 do not.
fn direct(costs: &Costs, setup: &CostConfig) -> Option<String> {
    let [here, shared] = [costs.step.gradients_moved(), costs.step.gradients_shared]
        .map(|moved| moved.rank.between_nodes);
    (setup.grad_wire == GradWire::Bf16 && here > shared).then(|| {
        format!(
            "gradients that are sent in bf16 are added by the rank that receives them, not within a node before they leave it: {here} \
             bytes between nodes per rank, and {shared} if f32 sums were; choose --grad-wire f32, or --mesh with replicas of fewer nodes"
        )
    })
}
