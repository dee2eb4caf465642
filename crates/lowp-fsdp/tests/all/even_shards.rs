//! Weights of which ranks own rows or tiles, as even as these allow: trained, saved and resumed on any number of ranks they are those of one
//! rank, bit for bit, and every rank has what the plan says.

use std::path::Path;
use std::time::Duration;

use lowp_checkpoint::{Checkpoint, Saver};
use lowp_comm::{Adder, GradWire, Mesh, MeshComm, ReduceStaging, StagedGrad, UnevenRun, run_ranks};
use lowp_format::spelling::Variant;
use lowp_format::{AnyRecipe, Phase, Recipe, RecipeOptions, ReshardAfterForward, Shape, Usage};
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_fsdp::{LinearSpec, ModelError, ModelOptions, ShardedModel, Sharding, VarPlace};
use lowp_kernels::{Cpu, FloatDtype};
use lowp_optim::{Group, Rule, StateDtypes, StepOptions};
use lowp_shard::{GradBucketOptions, Init, Reduction, check_flat};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);
const SHAPES: &[[usize; 2]] = &[[128, 384], [256, 128]];
/// Those of a network as wide as a block of `mxfp8`.
const NARROW: &[[usize; 2]] = &[[96, 32], [32, 32], [128, 32], [32, 128]];

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

/// On which ranks, and how, the same steps are made.
#[derive(Clone, Copy, Debug)]
struct Run {
    recipe: Variant,
    shapes: &'static [[usize; 2]],
    /// Weights of this shape stay in bf16.
    kept: Option<[usize; 2]>,
    mesh: Mesh,
    sharding: Sharding,
    reshard: ReshardAfterForward,
    /// What the backend writes gradients as; nothing where they come from the host.
    written: Option<FloatDtype>,
    wire: GradWire,
    micro_batches: usize,
    rule: Rule,
    state: StateDtypes,
}

impl Run {
    fn new(recipe: Variant, ranks: usize) -> Self {
        Self {
            recipe,
            shapes: SHAPES,
            kept: None,
            mesh: Mesh::sharded(ranks),
            sharding: Sharding::Fsdp,
            reshard: ReshardAfterForward::Yes,
            written: None,
            wire: GradWire::F32,
            micro_batches: 1,
            rule: Rule::AdamW,
            state: StateDtypes::default(),
        }
    }

    fn recipe_of(&self, spec: &LinearSpec) -> Variant {
        match self.kept == Some([spec.rows, spec.cols]) {
            true => self.recipe.in_bf16(),
            false => self.recipe,
        }
    }

    fn vars(&self) -> VarPlace {
        match self.written {
            Some(_) => VarPlace::Backend,
            None => VarPlace::Host,
        }
    }

    fn options(&self) -> ModelOptions {
        ModelOptions {
            sharding: self.sharding,
            reshard_after_forward: self.reshard,
            grads: GradBucketOptions {
                bytes: self.vars().grad_bucket(),
                dtype: self.written.unwrap_or(FloatDtype::F32),
                wire: self.wire,
            },
            vars: self.vars(),
            group: Group::of(self.rule),
            state: self.state,
            ..ModelOptions::default()
        }
    }

    fn costs(&self, linears: &[LinearSpec]) -> Costs {
        let mut shapes = ModelShapes::of_specs(linears, &[]).expect("shapes");
        shapes.vars.clear();
        let config = CostConfig {
            mesh: self.mesh,
            sharding: self.sharding,
            reshard: self.reshard,
            vars: self.vars(),
            grad_wire: self.wire,
            rule: self.rule,
            state: self.state,
            accumulate: self.micro_batches,
            ..CostConfig::default()
        };
        let recipes: Vec<_> = linears.iter().map(|spec| self.recipe_of(spec)).collect();
        Costs::new(&shapes, &recipes, self.recipe.name(), &config, None).expect("a plan")
    }
}

/// A step whose gradients, and the sums of their squares, are exact in any order, of parts that one rank has in one micro-batch.
fn step(model: &mut Model, number: u64, run: &Run) -> Result<(), ModelError> {
    let world = &model.mesh().world;
    let (rank, parts) = (world.rank(), world.world_size() * run.micro_batches);
    let weights: Vec<_> = model.weights().cloned().collect();
    for micro_batch in 0..run.micro_batches {
        model.reduce(match micro_batch + 1 == run.micro_batches {
            true => Reduction::Finish,
            false => Reduction::Keep,
        })?;
        model.begin(number, 0, true)?;
        for weight in &weights {
            weight.with_gathered(Phase::Forward, |_, _| Ok::<_, ModelError>(()))?;
        }
        for (layer, weight) in weights.iter().enumerate().rev() {
            weight.with_gathered(Phase::Backward, |_, _| Ok::<_, ModelError>(()))?;
            let value = |i: usize| {
                let odd = (i * 7 + layer * 13 + number as usize * 5) % 63;
                if i % parts == rank * run.micro_batches + micro_batch {
                    (odd as f32 - 31.0) / 64.0
                } else {
                    0.0
                }
            };
            let len = weight.full_shape().elements();
            let gradient: Vec<f32> = (0..len).map(value).collect();
            match run.written {
                Some(_) => {
                    weight.gradient()?.write(&Cpu, 0, &gradient).expect("room");
                    weight.push_gradient()?;
                }
                None => weight.add_gradient(&gradient)?,
            }
        }
        model.finish_micro_batch()?;
    }
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

/// Weights of which ranks own tiles.
fn in_tiles(model: &Model) -> Vec<usize> {
    let weights = model.weights().map(|weight| *weight.tiles()).enumerate();
    let tiles = weights.filter(|(_, tiles)| !tiles.are_rows());
    tiles.map(|(number, _)| number).collect()
}

/// Bytes in which a device stages the gradients of a step, all of which are one bucket, in the order of backward.
fn staged(model: &Model, wire: GradWire) -> usize {
    let shard = &model.mesh().shard;
    let (rank, world) = (shard.rank(), shard.world_size());
    let adder = match wire {
        GradWire::F32 => Adder::Library,
        GradWire::Bf16 => Adder::Receiver,
    };
    let (mut placed, mut grads, mut start) = (Vec::new(), Vec::new(), 0);
    let weights: Vec<_> = model.weights().collect();
    for weight in weights.into_iter().rev() {
        let (len, owned) = (weight.full_shape().elements(), weight.element_ranges());
        let owned = owned
            .iter()
            .map(|range| start + range.start..start + range.end);
        placed.push(owned.collect::<Vec<_>>());
        grads.push(StagedGrad {
            dtype: FloatDtype::F32,
            wire,
            len,
            own: weight.element_ranges()[rank].len(),
            accumulate: false,
        });
        start += len;
    }
    let batch: Vec<_> = placed.iter().map(|owned| ((), owned.as_slice())).collect();
    let runs = UnevenRun::find(&batch, world, adder);
    ReduceStaging::of_batch(&grads, &runs, adder, (rank, world)).bytes()
}

/// The weights behind some steps.
#[derive(Debug)]
struct Trained {
    values: Vec<Vec<f32>>,
    in_tiles: Vec<usize>,
}

/// Two steps from the beginning, or from a checkpoint that is there; rank 0 saves what is there then to `save`.
fn train(run: &Run, (from, save): (Option<&Path>, Option<&Path>)) -> Trained {
    let linears = linears(run.shapes);
    let costs = run.costs(&linears);
    let ended = run_ranks(&Cpu, run.mesh.world(), PATIENCE, |_, comm| {
        let mesh = MeshComm::new(run.mesh, comm.clone())?;
        let (recipe, options) = (|spec: &LinearSpec| run.recipe_of(spec), run.options());
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
            step(&mut model, number, run)?;
        }
        if let Some(folder) = save {
            let about = json!({ "weights": model.about(), "scales": model.about_scales()? });
            let control = comm.control().split(0, comm.rank())?;
            let mut saver = Saver::new(control, folder, None).expect("a folder");
            saver.start(2, model.pieces()?, about).expect("a start");
            saver.finish().expect("a checkpoint");
        }
        let bytes = model.weight_bytes(Default::default())?;
        let staged = staged(&model, run.wire);
        let state = model.parameter_bytes()? - bytes.peak + bytes.masters;
        let moved = (staged, u128::from(state));
        Ok::<_, ModelError>((values(&model)?, bytes, in_tiles(&model), moved))
    });
    let mut ended = ended.expect("ranks that work");
    let replica = &ended[..run.mesh.shard];
    if run.sharding == Sharding::Fsdp {
        let masters = replica.iter().map(|rank| u128::from(rank.1.masters));
        let spread = costs.spread.masters;
        assert_eq!(masters.clone().max(), Some(spread.max), "{run:?}");
        assert_eq!(masters.min(), Some(spread.min), "{run:?}");
    }
    let memory = &costs.memory;
    let planned = memory.masters + memory.states + memory.gradients;
    assert_eq!(replica[memory.rank].3.1, planned, "{run:?}");
    let resident = replica.iter().map(|rank| u128::from(rank.1.resident));
    assert_eq!(resident.sum::<u128>(), costs.resident, "{run:?}");
    if run.written == Some(FloatDtype::F32) {
        let planned = memory.weights + memory.masters + memory.gathered + memory.parts;
        let planned = planned + memory.decoded + memory.buckets;
        let peak = u128::from(replica[memory.rank].1.peak);
        assert_eq!(peak, planned, "{run:?}");
        let staged = replica.iter().map(|rank| rank.3.0 as u128);
        assert_eq!(staged.max(), Some(costs.staging), "{run:?}");
    }
    assert!(ended.iter().all(|rank| rank.0 == ended[0].0));
    let (values, _, in_tiles, _) = ended.swap_remove(0);
    Trained { values, in_tiles }
}

#[test]
fn any_number_of_ranks_trains_what_one_trains() {
    let recipe = recipe("mxfp8");
    let one = train(&Run::new(recipe, 1), (None, None));
    let mut tiles = Vec::new();
    for world in 2..10 {
        let many = train(&Run::new(recipe, world), (None, None));
        assert!(many.values == one.values, "{world} ranks");
        if !many.in_tiles.is_empty() {
            tiles.push(world);
        }
    }
    assert_eq!(tiles, [5, 6, 8, 9]);
}

#[test]
fn every_recipe_trains_on_many_ranks_what_it_trains_on_one() {
    let mut by_rows = Vec::new();
    for recipe in AnyRecipe::low_precision().into_iter().map(Variant::from) {
        let one = train(&Run::new(recipe, 1), (None, None));
        let many = train(&Run::new(recipe, 9), (None, None));
        assert!(many.values == one.values, "{}", recipe.name());
        if many.in_tiles.is_empty() {
            by_rows.push(recipe.name());
        }
    }
    assert_eq!(by_rows, ["fp8-delayed", "fp8-current", "fp8-rowwise"]);
}

/// Blocks of states in fp8 are whole on every rank, whatever the widths of weights are.
#[test]
fn states_in_fp8_are_the_same_on_any_number_of_ranks() {
    const WIDTHS: [&[[usize; 2]]; 3] = [
        &[[64, 33], [7, 5], [48, 96]],
        &[[64, 48], [32, 80], [48, 96]],
        &[[96, 32], [64, 96]],
    ];
    let state = "exp_avg=fp8,exp_avg_sq=fp8".parse().expect("dtypes");
    let mut odd = Vec::new();
    for recipe in AnyRecipe::all().into_iter().map(Variant::from) {
        let takes = |[rows, cols]: &[usize; 2]| recipe.check(Shape::new(*rows, *cols)).is_ok();
        let shapes = WIDTHS.into_iter().find(|shapes| shapes.iter().all(takes));
        let shapes = shapes.expect("shapes of the recipe");
        if shapes == WIDTHS[0] {
            odd.push(recipe.name());
        }
        let of = |ranks| Run {
            shapes,
            state,
            ..Run::new(recipe, ranks)
        };
        let one = train(&of(1), (None, None));
        let worlds = match recipe.name() {
            "nvfp4-2d" | "fp8-current" => Vec::from_iter(2..=12),
            _ => vec![3, 5, 8, 11],
        };
        for ranks in worlds {
            let many = train(&of(ranks), (None, None));
            assert!(
                many.values == one.values,
                "{} on {ranks} ranks",
                recipe.name()
            );
        }
        if check_flat(&recipe, Usage::BOTH).is_ok() {
            let slices = Run {
                sharding: Sharding::Zero1,
                ..of(5)
            };
            let sliced = train(&slices, (None, None));
            assert!(sliced.values == one.values, "{}, slices", recipe.name());
        }
    }
    let by_elements = ["fp32", "bf16", "fp8-delayed", "fp8-current", "fp8-rowwise"];
    assert_eq!(
        odd,
        [&by_elements[..], &["fp8-block", "fp8-block-1d"]].concat()
    );
}

/// An element of a master in bf16 rounds by random bits of its own.
#[test]
fn masters_in_bf16_are_the_same_on_any_number_of_ranks() {
    let adamw = "master=bf16,exp_avg=fp8,exp_avg_sq=fp8";
    for (name, shapes, rule, state) in [
        (
            "fp8-current",
            &[[64, 33], [7, 5], [48, 96]][..],
            Rule::AdamW,
            adamw,
        ),
        (
            "fp8-delayed",
            &[[64, 33], [7, 5]],
            Rule::Lion,
            "master=bf16",
        ),
        (
            "fp8-rowwise",
            &[[64, 48], [40, 80]],
            Rule::SgdNesterov,
            "master=bf16",
        ),
        (
            "nvfp4-2d",
            &[[64, 48], [32, 80]],
            Rule::AdamL2,
            "master=bf16,exp_avg=bf16",
        ),
        ("mxfp8-2d", SHAPES, Rule::AdamW, adamw),
        ("mxfp8", SHAPES, Rule::Muon, "master=bf16"),
        ("fp32", &[[64, 33], [7, 5]], Rule::Sgd, "master=bf16"),
    ] {
        let of = |ranks| Run {
            shapes,
            rule,
            state: state.parse().expect("dtypes"),
            ..Run::new(recipe(name), ranks)
        };
        let one = train(&of(1), (None, None));
        let in_f32 = Run {
            state: state
                .replace("master=bf16", "master=f32")
                .parse()
                .expect("dtypes"),
            ..of(1)
        };
        assert!(train(&in_f32, (None, None)).values != one.values, "{name}");
        for ranks in [2, 3, 5, 9] {
            let many = train(&of(ranks), (None, None));
            assert!(many.values == one.values, "{name} on {ranks} ranks");
        }
        let slices = Run {
            sharding: Sharding::Zero1,
            ..of(5)
        };
        let sliced = train(&slices, (None, None));
        assert!(sliced.values == one.values, "{name}, slices");
    }
}

/// A checkpoint of masters in f32 goes on with masters in bf16, of which the codes are made, and the other way round.
#[test]
fn masters_of_a_checkpoint_become_those_of_the_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let [wide, narrow] = ["f32", "master=bf16"].map(|state| Run {
        state: state.parse().expect("dtypes"),
        ..Run::new(recipe("mxfp8"), 2)
    });
    for (from, to, recast) in [(wide, narrow, 4), (narrow, wide, 0), (narrow, narrow, 0)] {
        train(&from, (None, Some(folder.path())));
        let linears = linears(to.shapes);
        let ended = run_ranks(&Cpu, 2, PATIENCE, |_, comm| {
            let mesh = MeshComm::new(to.mesh, comm)?;
            let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
            let about = checkpoint.about();
            let saved = (&checkpoint, [&about["weights"], &about["scales"]]);
            let recipe = |spec: &LinearSpec| to.recipe_of(spec);
            let options = to.options();
            let model = Model::load((&Cpu, &mesh), recipe, &linears, &[], options, saved)?;
            assert_eq!((model.recast(), model.rounded()), (recast, recast));
            // Codes are those of the masters.
            values(&model)
        });
        ended.expect("ranks that work");
    }
}

/// A matrix is made orthogonal as a whole, whoever has its elements: rows, shard tiles or slices.
#[test]
fn muon_trains_on_many_ranks_what_it_trains_on_one() {
    for (name, rule) in [("mxfp8", Rule::Muon), ("fp8-block", Rule::Moonlight)] {
        let of = |ranks| Run {
            rule,
            ..Run::new(recipe(name), ranks)
        };
        let one = train(&of(1), (None, None));
        for ranks in [2, 5] {
            let many = train(&of(ranks), (None, None));
            assert!(many.values == one.values, "{name}, {ranks} ranks");
        }
        let slices = Run {
            sharding: Sharding::Zero1,
            ..of(3)
        };
        let sliced = train(&slices, (None, None));
        assert!(sliced.values == one.values, "{name}, slices");
        let adamw = Run {
            rule: Rule::AdamW,
            ..of(1)
        };
        assert!(train(&adamw, (None, None)).values != one.values);
    }
}

#[test]
fn gradients_of_the_backend_are_those_of_the_host() {
    for recipe in ["mxfp8", "fp8-block"].map(recipe) {
        let one = train(&Run::new(recipe, 1), (None, None));
        for (dtype, wire) in [
            (FloatDtype::F32, GradWire::F32),
            (FloatDtype::F32, GradWire::Bf16),
            (FloatDtype::Bf16, GradWire::F32),
        ] {
            for micro_batches in [1, 3] {
                let run = Run {
                    written: Some(dtype),
                    wire,
                    micro_batches,
                    ..Run::new(recipe, 9)
                };
                let many = train(&run, (None, None));
                assert!(many.values == one.values, "{run:?}");
                assert!(!many.in_tiles.is_empty(), "{run:?}");
            }
        }
    }
}

#[test]
fn replicas_and_groups_of_ranks_train_what_one_trains() {
    let recipe = recipe("fp8-block");
    let one = train(&Run::new(recipe, 1), (None, None));
    for (replicate, shard, reshard) in [
        (2, 5, ReshardAfterForward::Yes),
        (1, 10, ReshardAfterForward::Group(2)),
        (1, 10, ReshardAfterForward::Group(5)),
        (2, 5, ReshardAfterForward::No),
    ] {
        for written in [None, Some(FloatDtype::F32)] {
            let run = Run {
                mesh: Mesh { replicate, shard },
                reshard,
                written,
                ..Run::new(recipe, 1)
            };
            let many = train(&run, (None, None));
            assert!(many.values == one.values, "{run:?}");
            assert!(!many.in_tiles.is_empty(), "{run:?}");
        }
    }
}

/// A layer that stays in bf16 is cut into tiles with its block. They are in order: nothing is rearranged, and its masters are saved as a row.
#[test]
fn a_layer_in_bf16_has_tiles_of_one_row() {
    let of = |ranks, written| Run {
        shapes: &[[128, 1024], [64, 1024]],
        kept: Some([64, 1024]),
        written,
        ..Run::new(recipe("fp8-block"), ranks)
    };
    let folder = tempfile::tempdir().expect("a folder");
    let one = train(&of(1, None), (None, None));
    for written in [None, Some(FloatDtype::F32), Some(FloatDtype::Bf16)] {
        let many = train(&of(9, written), (None, Some(folder.path())));
        assert!(many.values == one.values, "{written:?}");
        assert_eq!(many.in_tiles, [0, 1, 2, 3]);
    }
    let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
    let shape = |name: &str| checkpoint.info(name).expect(name).shape;
    assert_eq!(shape("layer0.master"), [128, 1024]);
    assert_eq!(shape("layer1.master"), [1, 64 * 1024]);
}

#[test]
fn any_number_of_ranks_goes_on_where_others_ended() {
    for name in ["fp8-block", "nvfp4-1d"] {
        let of = |ranks| Run::new(recipe(name), ranks);
        let whole = |ranks| Run {
            sharding: Sharding::Zero1,
            ..of(ranks)
        };
        let [first, second, third] = [(); 3].map(|()| tempfile::tempdir().expect("a folder"));
        let [first, second, third] = [first.path(), second.path(), third.path()];
        train(&of(1), (None, Some(first)));
        let one = train(&of(1), (Some(first), None));
        assert!(!train(&of(9), (None, Some(second))).in_tiles.is_empty());
        train(&whole(3), (None, Some(third)));
        for (folder, runs) in [
            (first, &[of(9)][..]),
            (second, &[of(1), of(5), whole(3)]),
            (third, &[of(9), of(1)]),
        ] {
            for run in runs {
                let many = train(run, (Some(folder), None));
                assert!(many.values == one.values, "{run:?}");
            }
        }
    }
}

/// A step in `recipe`, one in its precision tail, and one in it again.
fn there_and_back(recipe: Variant, ranks: usize) -> Trained {
    let run = Run {
        shapes: NARROW,
        ..Run::new(recipe, ranks)
    };
    let linears = linears(run.shapes);
    let ended = run_ranks(&Cpu, ranks, PATIENCE, |_, comm| {
        let mesh = MeshComm::new(run.mesh, comm)?;
        let options = run.options();
        let mut model = Model::new(&Cpu, &mesh, |_| recipe, &linears, &[], options)?;
        step(&mut model, 0, &run)?;
        let in_tiles = in_tiles(&model);
        let tail = recipe.with_bf16_forward();
        let mut model = model.in_recipes(|_| tail, &linears, &[])?;
        step(&mut model, 1, &run)?;
        let mut model = model.in_recipes(|_| recipe, &linears, &[])?;
        step(&mut model, 2, &run)?;
        let values = values(&model)?;
        Ok::<_, ModelError>(Trained { values, in_tiles })
    });
    let mut ended = ended.expect("ranks that work");
    assert!(ended.iter().all(|rank| rank.values == ended[0].values));
    ended.swap_remove(0)
}

#[test]
fn a_precision_tail_goes_on_with_the_masters_on_any_number_of_ranks() {
    for recipe in ["mxfp8", "nvfp4-1d", "nvfp4-mxfp8"].map(recipe) {
        let one = there_and_back(recipe, 1);
        for world in [3, 9] {
            let many = there_and_back(recipe, world);
            assert!(
                many.values == one.values,
                "{} on {world} ranks",
                recipe.name()
            );
            assert_eq!(many.in_tiles.is_empty(), world == 3, "{}", recipe.name());
        }
    }
}

/// A gradient that was not written is an error, of rows as of tiles.
#[test]
fn gradients_are_pushed_once() {
    for (ranks, again) in [(1, false), (1, true), (9, false), (9, true)] {
        let run = Run {
            written: Some(FloatDtype::F32),
            ..Run::new(recipe("fp8-block"), ranks)
        };
        let ended = run_ranks(&Cpu, ranks, PATIENCE, |_, comm| {
            let mesh = MeshComm::new(run.mesh, comm)?;
            let (linears, options) = (linears(run.shapes), run.options());
            let model = Model::new(&Cpu, &mesh, |_| run.recipe, &linears, &[], options)?;
            assert_eq!(in_tiles(&model).is_empty(), ranks == 1);
            let weight = model.weights().next().expect("a weight");
            if again {
                weight.gradient()?;
                weight.push_gradient()?;
            }
            let error = weight.push_gradient().expect_err("no gradient");
            Ok::<_, ModelError>(error.to_string())
        });
        for error in ended.expect("errors") {
            let expected = "the gradient of 'layer0' has no memory";
            assert!(error.contains(expected), "{error}");
        }
    }
}
