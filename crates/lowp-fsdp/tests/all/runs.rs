//! The same steps of a model on any ranks, from exact gradients: the weights that come of them are compared. Every rank has what the plan says.

use std::path::Path;
use std::time::Duration;

use lowp_checkpoint::{Checkpoint, Saver};
use lowp_comm::{Adder, GradWire, Mesh, MeshComm, ReduceStaging, StagedGrad, UnevenRun, run_ranks};
use lowp_format::spelling::Variant;
use lowp_format::{AnyRecipe, Phase, Recipe, RecipeOptions, ReshardAfterForward};
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_fsdp::{
    LinearSpec, ModelError, ModelOptions, SavedModel, ShardedModel, Sharding, VarPlace,
};
use lowp_kernels::{Cpu, FloatDtype};
use lowp_optim::{Group, Rule, StateDtypes, StepOptions};
use lowp_shard::{GradBucketOptions, Init, Reduction};
use serde_json::json;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const SHAPES: &[[usize; 2]] = &[[128, 384], [256, 128]];
/// Those of a network as wide as a block of `mxfp8`.
pub(crate) const NARROW: &[[usize; 2]] = &[[96, 32], [32, 32], [128, 32], [32, 128]];

pub(crate) type Model = ShardedModel<Cpu, Variant>;

pub(crate) fn recipe(name: &str) -> Variant {
    let recipe = AnyRecipe::from_name(name, &RecipeOptions::default());
    recipe.expect("a recipe").into()
}

/// Two blocks of the same weights.
pub(crate) fn linears(shapes: &[[usize; 2]]) -> Vec<LinearSpec> {
    let layer = |(number, [rows, cols]): (usize, [usize; 2])| LinearSpec {
        block: number / shapes.len(),
        ..LinearSpec::new(format!("layer{number}"), rows, cols, Init::Normal(0.1))
    };
    let layers = [shapes, shapes].concat().into_iter().enumerate();
    layers.map(layer).collect()
}

/// On which ranks, and how, the same steps are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) recipe: Variant,
    pub(crate) shapes: &'static [[usize; 2]],
    /// Weights of this shape stay in bf16.
    pub(crate) kept: Option<[usize; 2]>,
    pub(crate) mesh: Mesh,
    pub(crate) sharding: Sharding,
    pub(crate) reshard: ReshardAfterForward,
    /// What the backend writes gradients as; nothing where they come from the host.
    pub(crate) written: Option<FloatDtype>,
    pub(crate) wire: GradWire,
    pub(crate) micro_batches: usize,
    pub(crate) rule: Rule,
    pub(crate) state: StateDtypes,
}

impl Run {
    pub(crate) fn new(recipe: Variant, ranks: usize) -> Self {
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

    pub(crate) fn recipe_of(&self, spec: &LinearSpec) -> Variant {
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

    pub(crate) fn options(&self) -> ModelOptions {
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
pub(crate) fn step(model: &mut Model, number: u64, run: &Run) -> Result<(), ModelError> {
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
pub(crate) fn values(model: &Model) -> Result<Vec<Vec<f32>>, ModelError> {
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
pub(crate) fn in_tiles(model: &Model) -> Vec<usize> {
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
    ReduceStaging::of_batch(&grads, &runs, adder, rank, world).bytes()
}

/// The weights after some steps.
#[derive(Debug)]
pub(crate) struct Trained {
    pub(crate) values: Vec<Vec<f32>>,
    pub(crate) in_tiles: Vec<usize>,
}

/// Two steps from the beginning, or from a checkpoint that is there; rank 0 saves what is there then to `save`.
pub(crate) fn train(run: &Run, (from, save): (Option<&Path>, Option<&Path>)) -> Trained {
    let linears = linears(run.shapes);
    let costs = run.costs(&linears);
    let ended = run_ranks(&Cpu, run.mesh.world(), PATIENCE, |_, comm| {
        let mesh = MeshComm::new(run.mesh, comm.clone())?;
        let (recipe, options) = (|spec: &LinearSpec| run.recipe_of(spec), run.options());
        let (mut model, first) = match from {
            Some(folder) => {
                let checkpoint = Checkpoint::latest(folder).expect("a checkpoint");
                let about = checkpoint.about();
                let saved = SavedModel {
                    checkpoint: &checkpoint,
                    weights: &about["weights"],
                    scales: &about["scales"],
                };
                let model = Model::load(&Cpu, &mesh, recipe, &linears, &[], options, saved)?;
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
        let matrices = [
            model.optimizer().matrix_bytes() as u64,
            comm.traffic().owned_bytes,
        ];
        let moved = (staged, u128::from(state), matrices.map(u128::from));
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
    let planned = memory.masters + memory.states + memory.matrices + memory.gradients;
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
    assert_eq!(replica[memory.rank].3.2[0], memory.matrices, "{run:?}");
    let mut operations = costs.step.operations.iter();
    let planned = operations.find(|operation| operation.key == "matrices");
    let sent: u128 = replica.iter().map(|rank| rank.3.2[1]).sum();
    let steps = 2;
    let planned = steps * planned.map_or(0, |operation| operation.sent);
    assert_eq!(sent, planned, "{run:?}");
    assert!(ended.iter().all(|rank| rank.0 == ended[0].0));
    let (values, _, in_tiles, _) = ended.swap_remove(0);
    Trained { values, in_tiles }
}
