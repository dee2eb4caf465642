//! Variables that are gathered for each use have the values of their masters, however the model is sharded, and give their memory back.

use std::sync::Arc;
use std::time::Duration;

use lowp_checkpoint::{Checkpoint, Saver};
use lowp_comm::{Communicator, Mesh, MeshComm, run_ranks};
use lowp_format::{AnyRecipe, Orientation, Phase, RecipeOptions, ReshardAfterForward};
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_fsdp::{
    LinearSpec, ModelError, ModelOptions, SavedModel, ShardedModel, Sharding, VarPlace, VarSpec,
    VarUse,
};
use lowp_kernels::Cpu;
use lowp_optim::StepOptions;
use lowp_shard::{GradBucketOptions, Init, dequantize};
use serde_json::json;

type Model = ShardedModel<Cpu, AnyRecipe>;
type Comm = Arc<dyn Communicator<Cpu>>;

const ROWS: usize = 48;
const COLS: usize = 32;

fn linears() -> Vec<LinearSpec> {
    let linear = |block| LinearSpec {
        block,
        ..LinearSpec::new(format!("{block}"), ROWS, COLS, Init::Normal(0.1))
    };
    (0..2).map(linear).collect()
}

/// A variable of each use, an embedding and a head of the shape of the weights.
fn vars() -> Vec<VarSpec> {
    let var = |name: &str, rows, used| VarSpec {
        name: name.to_owned(),
        shape: vec![rows, COLS],
        init: Init::Normal(1.0),
        decay: false,
        used,
    };
    vec![
        var("embedding", ROWS, VarUse::First),
        var("gain", 1, VarUse::Throughout),
        var("head", ROWS, VarUse::Last),
        var("tied", 7, VarUse::FirstAndLast),
    ]
}

const EMBEDDING: usize = 0;
const HEAD: usize = 2;

fn recipe(name: &str) -> AnyRecipe {
    AnyRecipe::from_name(name, &RecipeOptions::default()).expect("a recipe")
}

fn model(mesh: Mesh, comm: Comm, options: ModelOptions) -> Result<Model, ModelError> {
    let mesh = MeshComm::new(mesh, comm)?;
    ShardedModel::new(
        &Cpu,
        &mesh,
        |_| recipe("fp32"),
        &linears(),
        &vars(),
        options,
    )
}

/// The full values of variable `index`, as a use finds them.
fn read(model: &Model, index: usize) -> Result<Vec<f32>, ModelError> {
    let var = model.transient_var(index).expect("a transient variable");
    var.with_gathered(Phase::Forward, |tensor, _| {
        let values = dequantize(&Cpu, tensor, Orientation::Rowwise);
        Ok::<_, ModelError>(values?)
    })
}

/// What this rank has of the masters of variable `index`.
fn master(model: &mut Model, index: usize) -> Result<Vec<f32>, ModelError> {
    let name = format!("{}.master", vars()[index].name);
    let pieces = model.pieces()?.into_iter();
    let found = pieces.filter(|piece| piece.name == name);
    let mut values = Vec::new();
    for piece in found {
        let bytes = piece.bytes.wait().expect("bytes");
        let words = bytes.as_chunks().0.iter();
        values.extend(words.map(|&word| f32::from_le_bytes(word)));
    }
    Ok(values)
}

/// The variables that are read `at` one of these, and their values.
fn uses(model: &Model, at: [VarUse; 2]) -> Result<Vec<(usize, Vec<f32>)>, ModelError> {
    let vars = vars().into_iter().enumerate();
    let used = vars.filter(|(_, spec)| at.contains(&spec.used));
    used.map(|(index, _)| Ok((index, read(model, index)?)))
        .collect()
}

fn pass(model: &mut Model, step: u64) -> Result<Vec<(usize, Vec<f32>)>, ModelError> {
    model.begin(step, 0, true)?;
    let weights: Vec<_> = model.weights().cloned().collect();
    let mut found = uses(model, [VarUse::First, VarUse::FirstAndLast])?;
    for weight in &weights {
        weight.with_values(Phase::Forward, |_| Ok::<_, ModelError>(()))?;
    }
    found.extend(uses(model, [VarUse::Last, VarUse::FirstAndLast])?);
    let gradient = |len: usize| (0..len).map(|i| (i % 5) as f32 - 1.0).collect::<Vec<f32>>();
    model.add_var_gradient(HEAD, &gradient(ROWS * COLS))?;
    for weight in weights.iter().rev() {
        weight.with_values(Phase::Backward, |_| Ok::<_, ModelError>(()))?;
        weight.add_gradient(&gradient(ROWS * COLS))?;
    }
    for (index, var) in vars().iter().enumerate() {
        if index != HEAD {
            model.add_var_gradient(index, &gradient(var.shape.iter().product()))?;
        }
    }
    model.finish_micro_batch()?;
    Ok(found)
}

/// What variables were in every use of some steps, and the bytes that their gathers sent.
#[derive(Debug, PartialEq)]
struct Found {
    values: Vec<(usize, Vec<f32>)>,
    sent: u64,
}

const STEPS: u64 = 3;

fn train(mut model: Model, micro_batches: usize) -> Result<Found, ModelError> {
    let MeshComm { world, shard, .. } = model.mesh().clone();
    let mut values = Vec::new();
    for step in 0..STEPS {
        let masters: Vec<_> = (0..vars().len())
            .map(|index| master(&mut model, index))
            .collect::<Result<_, _>>()?;
        for _ in 0..micro_batches {
            for (index, found) in pass(&mut model, step)? {
                let var = model.transient_var(index).expect("a transient variable");
                let own = var.element_ranges()[shard.rank()].clone();
                // The other replicas have the same.
                let has_pieces = world.rank() < shard.world_size();
                let same = !has_pieces || found[own] == masters[index];
                assert!(same, "step {step}, variable {index}");
                values.push((index, found));
            }
        }
        assert!(model.finish_step(&StepOptions::default())?.applied);
    }
    let mut sent = 0;
    for var in (0..vars().len()).filter_map(|index| model.transient_var(index)) {
        sent += var.account()?.counted_sent_bytes;
    }
    assert_eq!(model.audit()?, []);
    Ok(Found { values, sent })
}

#[test]
fn uses_find_the_values_of_masters() {
    let yes = ReshardAfterForward::Yes;
    for (mesh, sharding, reshard, micro_batches) in [
        (Mesh::sharded(1), Sharding::Fsdp, yes, 1),
        (Mesh::sharded(3), Sharding::Fsdp, yes, 2),
        (
            Mesh {
                replicate: 2,
                shard: 2,
            },
            Sharding::Fsdp,
            yes,
            1,
        ),
        (Mesh::sharded(2), Sharding::Fsdp, ReshardAfterForward::No, 2),
        (
            Mesh::sharded(4),
            Sharding::Fsdp,
            ReshardAfterForward::Group(2),
            1,
        ),
        (Mesh::sharded(2), Sharding::Zero1, yes, 2),
    ] {
        let what = format!("{mesh:?}, {sharding:?}, {reshard}, {micro_batches}");
        let options = ModelOptions {
            sharding,
            reshard_after_forward: reshard,
            ..ModelOptions::default()
        };
        let timeout = Duration::from_secs(60);
        let ranks = run_ranks(&Cpu, mesh.world(), timeout, |_, comm| {
            train(model(mesh, comm, options)?, micro_batches)
        });
        let ranks = ranks.unwrap_or_else(|error| panic!("{what}: {error}"));
        for rank in &ranks {
            assert!(rank.values == ranks[0].values, "{what}");
        }
        // The last use of a step and the first of the next one.
        let of_embedding = ranks[0].values.iter().filter(|(at, _)| *at == EMBEDDING);
        let mut of_embedding: Vec<_> = of_embedding.map(|(_, values)| values).collect();
        of_embedding.dedup();
        assert_eq!(of_embedding.len() as u64, STEPS, "{what}");
        let shapes = ModelShapes::of_specs(&linears(), &vars()).expect("shapes");
        let config = CostConfig {
            mesh,
            sharding,
            reshard,
            accumulate: micro_batches,
            ..CostConfig::default()
        };
        let recipes = vec![recipe("fp32"); shapes.layers.len()];
        let costs = Costs::new(&shapes, &recipes, "fp32", &config, None).expect("costs");
        let mut planned = costs.step.operations.iter();
        let planned = planned.find(|operation| operation.key == "transient_variables");
        let planned = planned.map_or(0, |operation| operation.sent);
        let sent: u64 = ranks[..mesh.shard].iter().map(|found| found.sent).sum();
        assert_eq!(u128::from(sent), u128::from(STEPS) * planned, "{what}");
    }
}

/// Checkpoints have masters, whichever variables are gathered for each use: other ranks go on with them.
#[test]
fn checkpoints_are_of_masters() {
    for used in [None, Some(VarUse::Throughout)] {
        let mut saved_vars = vars();
        for var in &mut saved_vars {
            var.used = used.unwrap_or(var.used);
        }
        let folder = tempfile::tempdir().expect("a folder");
        let timeout = Duration::from_secs(60);
        let options = ModelOptions::default();
        let saved = run_ranks(&Cpu, 3, timeout, |_, comm| {
            let mesh = MeshComm::new(Mesh::sharded(3), comm.clone())?;
            let recipe = |_: &LinearSpec| recipe("fp32");
            let mut model = Model::new(&Cpu, &mesh, recipe, &linears(), &saved_vars, options)?;
            let about = json!({ "weights": model.about(), "scales": model.about_scales()? });
            let control = comm.control().split(0, comm.rank())?;
            let mut saver = Saver::new(control, folder.path(), None).expect("a folder");
            saver.start(1, model.pieces()?, about).expect("a start");
            saver.finish().expect("a checkpoint");
            master(&mut model, EMBEDDING)
        });
        let saved = saved.unwrap_or_else(|error| panic!("{error}")).concat();
        let read = run_ranks(&Cpu, 2, timeout, |_, comm| {
            let mesh = MeshComm::new(Mesh::sharded(2), comm)?;
            let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
            let about = checkpoint.about();
            let saved = SavedModel {
                checkpoint: &checkpoint,
                weights: &about["weights"],
                scales: &about["scales"],
            };
            let recipe = |_: &LinearSpec| recipe("fp32");
            // Another seed: what is read is not what the model would begin with.
            let options = ModelOptions { seed: 1, ..options };
            let (linears, vars) = (linears(), vars());
            let model = ShardedModel::load(&Cpu, &mesh, recipe, &linears, &vars, options, saved)?;
            assert_eq!(model.audit()?, []);
            read(&model, EMBEDDING)
        });
        for read in read.unwrap_or_else(|error| panic!("{error}")) {
            assert!(read == saved, "{used:?}");
        }
    }
}

/// A gradient that was taken or sent belongs to a micro-batch that has to be finished or discarded, whichever variable it is of.
#[test]
fn a_gradient_of_one_variable_leaves_a_micro_batch_open() {
    let options = ModelOptions {
        vars: VarPlace::Backend,
        grads: GradBucketOptions {
            bytes: 0,
            ..GradBucketOptions::default()
        },
        ..ModelOptions::default()
    };
    let ranks = run_ranks(&Cpu, 1, Duration::from_secs(60), |_, comm| {
        let mut model = model(Mesh::sharded(1), comm, options)?;
        for index in 0..vars().len() {
            for pushed in [false, true] {
                model.begin(0, 0, true)?;
                let gradient = model.var_gradient(index)?;
                if pushed {
                    let len = vars()[index].shape.iter().product();
                    gradient.write(&Cpu, 0, &vec![1.0; len]).expect("room");
                    model.push_var_gradient(index)?;
                }
                let error = model.begin(0, 0, true).expect_err("half a micro-batch");
                let open = matches!(
                    error,
                    ModelError::UnfinishedMicroBatch { open: 1, total: 6 }
                );
                assert!(open, "variable {index}, {pushed}: {error}");
                model.discard_gradients()?;
            }
        }
        model.begin(0, 0, true)
    });
    ranks.unwrap_or_else(|error| panic!("{error}"));
}

/// A pass that stops after the gather of a head began leaves no memory in use.
#[test]
fn discarded_passes_give_memory_back() {
    let done = run_ranks(&Cpu, 2, Duration::from_secs(60), |_, comm| {
        let mut model = model(Mesh::sharded(2), comm, ModelOptions::default())?;
        let var =
            |model: &Model, index| Arc::clone(model.transient_var(index).expect("a variable"));
        read(&model, EMBEDDING)?;
        let held = model.parameter_bytes()?;
        var(&model, HEAD).prefetch(Phase::Forward)?;
        model.discard_gradients()?;
        read(&model, EMBEDDING)?;
        assert_eq!(model.parameter_bytes()?, held);
        // What it would be otherwise.
        var(&model, HEAD).prefetch(Phase::Forward)?;
        read(&model, EMBEDDING)?;
        assert_eq!(model.parameter_bytes()?, held + 4 * (ROWS * COLS) as u64);
        model.release()
    });
    done.unwrap_or_else(|error| panic!("{error}"));
}

/// An audit finds a byte of a variable that is not that of its master.
#[test]
fn an_audit_finds_a_variable_that_differs() {
    let done = run_ranks(&Cpu, 2, Duration::from_secs(60), |_, comm| {
        let model = model(Mesh::sharded(2), comm, ModelOptions::default())?;
        let head = Arc::clone(model.transient_var(HEAD).expect("a variable"));
        let memory = head.with_gathered(Phase::Forward, |tensor, _| {
            Ok::<_, ModelError>(tensor.buffers()[0].storage.clone())
        })?;
        // The audit reads what was gathered before.
        head.prefetch(Phase::Forward)?;
        assert_eq!(model.audit()?, []);
        head.prefetch(Phase::Forward)?;
        memory.write()?[5] ^= 1;
        let found = model.audit()?;
        let [found] = found.as_slice() else {
            panic!("{found:?}")
        };
        assert_eq!(found.phase, Phase::Forward);
        assert_eq!(found.layer, linears().len() + HEAD);
        assert_eq!(found.divergence.byte, 5);
        Ok::<_, ModelError>(())
    });
    done.unwrap_or_else(|error| panic!("{error}"));
}

/// Ranks find that one gathers a variable where another gathers a weight of as many bytes.
#[test]
fn ranks_that_gather_a_variable_and_a_weight_hear_of_it() {
    let done = run_ranks(&Cpu, 2, Duration::from_secs(60), |rank, comm| {
        let model = model(Mesh::sharded(2), comm, ModelOptions::default())?;
        match rank {
            0 => read(&model, EMBEDDING).map(drop),
            _ => {
                let weight = model.weight(0).expect("a weight");
                weight.with_gathered(Phase::Forward, |_, _| Ok::<_, ModelError>(()))
            }
        }
    });
    let error = done.expect_err("gathers that differ").to_string();
    for group in ["group 0 for forward", "group 2 for forward"] {
        assert!(error.contains(group), "{error}");
    }
}
