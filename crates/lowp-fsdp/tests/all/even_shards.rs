//! Weights of which ranks own rows or tiles, as even as these allow: trained, saved and resumed on any number of ranks they are those of one
//! rank, bit for bit, and every rank has what the plan says.

use std::path::Path;
use std::time::Duration;

use lowp_checkpoint::{Checkpoint, Saver};
use lowp_comm::{Mesh, MeshComm, run_ranks};
use lowp_format::spelling::Variant;
use lowp_format::{AnyRecipe, Phase, Recipe, RecipeOptions};
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_fsdp::{LinearSpec, ModelError, ModelOptions, ShardedModel};
use lowp_kernels::Cpu;
use lowp_optim::StepOptions;
use lowp_shard::Init;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);
const SHAPES: [[usize; 2]; 2] = [[128, 384], [256, 128]];
/// Those of a network as wide as a block of `mxfp8`.
const NARROW: [[usize; 2]; 4] = [[96, 32], [32, 32], [128, 32], [32, 128]];

type Model = ShardedModel<Cpu, Variant>;

fn recipe(name: &str) -> Variant {
    let recipe = AnyRecipe::from_name(name, &RecipeOptions::default());
    recipe.expect("a recipe").into()
}

/// Two blocks of the same weights.
fn linears(shapes: &[[usize; 2]]) -> Vec<LinearSpec> {
    let layer = |(number, [rows, cols]): (usize, [usize; 2])| LinearSpec {
        block: number / shapes.len(),
        ..LinearSpec::new(format!("layer{number}"), rows, cols, Init::Normal(0.1))
    };
    let layers = [shapes, shapes].concat().into_iter().enumerate();
    layers.map(layer).collect()
}

/// A step whose gradients, and the sums of their squares, are exact in any order.
fn step(model: &mut Model, number: u64) -> Result<(), ModelError> {
    let shard = &model.mesh().shard;
    let (rank, world) = (shard.rank(), shard.world_size());
    model.begin(number, 0, true)?;
    let weights: Vec<_> = model.weights().enumerate().collect();
    for (layer, weight) in weights.into_iter().rev() {
        let value = |i: usize| {
            let odd = (i * 7 + layer * 13 + number as usize * 5) % 63;
            if i % world == rank {
                (odd as f32 - 31.0) / 64.0
            } else {
                0.0
            }
        };
        let gradient: Vec<f32> = (0..weight.full_shape().elements()).map(value).collect();
        weight.add_gradient(&gradient)?;
    }
    model.finish_micro_batch()?;
    assert!(model.finish_step(&StepOptions::default())?.applied);
    Ok(())
}

/// What every weight decodes to in both phases. Its codes are those of its masters.
fn values(model: &Model) -> Result<Vec<Vec<f32>>, ModelError> {
    assert_eq!(model.audit()?, []);
    let mut all = Vec::new();
    for weight in model.weights() {
        for phase in Phase::ALL {
            let values = weight.with_values(phase, |values| Ok::<_, ModelError>(values.to_vec()));
            all.push(values?);
        }
    }
    Ok(all)
}

/// Two steps on `world` ranks, from the beginning, or from a checkpoint that is there: the values then, which rank 0 saves to `save`.
fn train(
    recipe: Variant,
    world: usize,
    (from, save): (Option<&Path>, Option<&Path>),
) -> Vec<Vec<f32>> {
    let linears = linears(&SHAPES);
    let mut shapes = ModelShapes::of_specs(&linears, &[]).expect("shapes");
    shapes.vars.clear();
    let config = CostConfig {
        mesh: Mesh::sharded(world),
        ..CostConfig::default()
    };
    let recipes = vec![recipe; linears.len()];
    let costs = Costs::new(&shapes, &recipes, recipe.name(), &config, None).expect("a plan");
    let ended = run_ranks(&Cpu, world, PATIENCE, |_, comm| {
        let mesh = MeshComm::new(Mesh::sharded(world), comm.clone())?;
        let (recipe, options) = (|_: &LinearSpec| recipe, ModelOptions::default());
        let (mut model, first) = match from {
            Some(folder) => {
                let checkpoint = Checkpoint::latest(folder).expect("a checkpoint");
                let about = checkpoint.about();
                let saved = (&checkpoint, [&about["weights"], &about["scales"]]);
                let model = Model::load((&Cpu, &mesh), recipe, &linears, &[], options, saved)?;
                assert_eq!(model.recast(), 0);
                (model, 2)
            }
            None => (Model::new(&Cpu, &mesh, recipe, &linears, &[], options)?, 0),
        };
        for number in first..first + 2 {
            step(&mut model, number)?;
        }
        if let Some(folder) = save {
            let about = json!({ "weights": model.about(), "scales": model.about_scales()? });
            let control = comm.control().split(0, comm.rank())?;
            let mut saver = Saver::new(control, folder, None).expect("a folder");
            saver.start(2, model.pieces()?, about).expect("a start");
            saver.finish().expect("a checkpoint");
        }
        let bytes = model.weight_bytes(Default::default())?;
        Ok::<_, ModelError>((values(&model)?, bytes.masters, bytes.resident))
    });
    let mut ended = ended.expect("ranks that work");
    let masters: Vec<u128> = ended.iter().map(|rank| rank.1.into()).collect();
    let spread = costs.spread.masters;
    assert_eq!(masters.iter().max(), Some(&spread.max));
    assert_eq!(masters.iter().min(), Some(&spread.min));
    let resident: u128 = ended.iter().map(|rank| u128::from(rank.2)).sum();
    assert_eq!(resident, costs.resident);
    assert!(ended.iter().all(|rank| rank.0 == ended[0].0));
    ended.swap_remove(0).0
}

#[test]
fn any_number_of_ranks_trains_what_one_trains() {
    let recipe = recipe("mxfp8");
    let one = train(recipe, 1, (None, None));
    for world in 2..10 {
        assert!(train(recipe, world, (None, None)) == one, "{world} ranks");
    }
}

#[test]
fn every_recipe_trains_on_many_ranks_what_it_trains_on_one() {
    for recipe in AnyRecipe::low_precision().into_iter().map(Variant::from) {
        let one = train(recipe, 1, (None, None));
        let many = train(recipe, 9, (None, None));
        assert!(many == one, "{}", recipe.name());
    }
}

#[test]
fn any_number_of_ranks_goes_on_where_others_ended() {
    for name in ["fp8-block", "nvfp4-1d"] {
        let recipe = recipe(name);
        let [first, second] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        let [first, second] = [first.path(), second.path()];
        train(recipe, 1, (None, Some(first)));
        let one = train(recipe, 1, (Some(first), None));
        train(recipe, 9, (None, Some(second)));
        for (folder, worlds) in [(first, &[9][..]), (second, &[1, 5])] {
            for &world in worlds {
                let many = train(recipe, world, (Some(folder), None));
                assert!(many == one, "{name} on {world} ranks");
            }
        }
    }
}

/// A step in `recipe`, one in its precision tail, and one in it again.
fn there_and_back(recipe: Variant, world: usize) -> Vec<Vec<f32>> {
    let linears = linears(&NARROW);
    let ended = run_ranks(&Cpu, world, PATIENCE, |_, comm| {
        let mesh = MeshComm::new(Mesh::sharded(world), comm)?;
        let options = ModelOptions::default();
        let mut model = Model::new(&Cpu, &mesh, |_| recipe, &linears, &[], options)?;
        step(&mut model, 0)?;
        let tail = recipe.with_bf16_forward();
        let mut model = model.in_recipes(|_| tail, &linears, &[])?;
        step(&mut model, 1)?;
        let mut model = model.in_recipes(|_| recipe, &linears, &[])?;
        step(&mut model, 2)?;
        values(&model)
    });
    let mut ended = ended.expect("ranks that work");
    assert!(ended.iter().all(|rank| *rank == ended[0]));
    ended.swap_remove(0)
}

#[test]
fn a_precision_tail_goes_on_with_the_masters_on_any_number_of_ranks() {
    for recipe in ["mxfp8", "nvfp4-1d", "nvfp4-mxfp8"].map(recipe) {
        let one = there_and_back(recipe, 1);
        for world in [3, 9] {
            let many = there_and_back(recipe, world);
            assert!(many == one, "{} on {world} ranks", recipe.name());
        }
    }
}
