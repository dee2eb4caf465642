//! Wrong arguments of a model's calls: an error with the numbers on the rank that gave them, and nobody waits for it.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use lowp_comm::{Communicator, LocalComm, Mesh, MeshComm};
use lowp_format::{AnyRecipe, QuantizedTensor, RecipeOptions, Shape, Usage};
use lowp_fsdp::{
    LayerMemory, LinearSpec, ModelError, ModelOptions, ShardedModel, ShardedWeight, VarPlace,
    VarSpec, VarUse,
};
use lowp_kernels::{Backend, Cpu};
use lowp_optim::{Group, Rule, StepOptions};
use lowp_shard::Init;

/// Longer than any call here takes.
const PATIENCE: Duration = Duration::from_secs(60);

type Model = ShardedModel<Cpu, AnyRecipe>;
type Comm = Arc<dyn Communicator<Cpu>>;

fn recipe() -> AnyRecipe {
    AnyRecipe::from_name("mxfp8", &RecipeOptions::default()).expect("a recipe")
}

fn var(name: &str, shape: &[usize]) -> VarSpec {
    VarSpec {
        name: name.to_owned(),
        shape: shape.to_vec(),
        init: Init::Constant(1.0),
        decay: false,
        used: VarUse::Throughout,
    }
}

/// A model with the variables `gain`, a vector of 8, and `table`, 4x6.
fn model(comm: &Comm, vars: VarPlace) -> Model {
    let mesh = MeshComm::new(Mesh::sharded(comm.world_size()), comm.clone()).expect("a mesh");
    let linears = [LinearSpec::new("layer", 32, 32, Init::Normal(0.1))];
    let specs = [var("gain", &[8]), var("table", &[4, 6])];
    let options = ModelOptions {
        vars,
        ..ModelOptions::default()
    };
    ShardedModel::new(&Cpu, &mesh, |_| recipe(), &linears, &specs, options).expect("a model")
}

fn solo() -> Comm {
    Arc::new(LocalComm::solo(&Cpu))
}

/// A rule of matrices updates layers, and variables have another one.
#[test]
fn variables_have_no_rule_of_matrices() {
    let mesh = MeshComm::new(Mesh::sharded(1), solo()).expect("a mesh");
    let linears = [LinearSpec::new("layer", 32, 32, Init::Normal(0.1))];
    let made = |vars: &[VarSpec], var_group| {
        let options = ModelOptions {
            group: Group::of(Rule::Muon),
            var_group,
            ..ModelOptions::default()
        };
        ShardedModel::new(&Cpu, &mesh, |_| recipe(), &linears, vars, options).map(drop)
    };
    let vars = [var("gain", &[8])];
    for (group, rule) in [
        (None, "muon"),
        (Some(Group::of(Rule::Moonlight)), "moonlight"),
    ] {
        let error = made(&vars, group).expect_err("a variable").to_string();
        for part in ["'gain'", rule, "`ModelOptions::var_group`"] {
            assert!(error.contains(part), "{error}");
        }
    }
    made(&vars, Some(Group::default())).expect("AdamW");
    made(&[], None).expect("no variables");
}

/// Calls `wrong` on the last of two ranks, which then keeps its model, and `right` on the first: how each ended.
fn ranks(
    vars: VarPlace,
    right: impl Fn(&mut Model) -> Result<(), ModelError> + Sync,
    wrong: impl Fn(&mut Model) -> Result<(), ModelError> + Sync,
) -> [String; 2] {
    let world = LocalComm::world(&Cpu, 2, PATIENCE).into_iter();
    let [first, last]: [Comm; 2] = world
        .map(|comm| Arc::new(comm) as Comm)
        .collect::<Vec<_>>()
        .try_into()
        .expect("two ranks");
    let (ended, waits) = channel::<()>();
    let (right, wrong) = (&right, &wrong);
    thread::scope(|scope| {
        let first = scope.spawn(move || {
            let error = right(&mut model(&first, vars)).expect_err("the other rank failed");
            drop(ended);
            error.to_string()
        });
        let last = scope.spawn(move || {
            let mut model = model(&last, vars);
            let error = wrong(&mut model).expect_err("a wrong argument");
            // Nobody hears of the error by the end of this rank.
            let waited = waits.recv_timeout(PATIENCE / 2);
            assert_eq!(waited, Err(RecvTimeoutError::Disconnected));
            error.to_string()
        });
        [first, last].map(|rank| rank.join().expect("no panic"))
    })
}

/// A gradient that is not as long as its variable would train with values of an earlier step.
#[test]
fn gradients_of_variables_have_their_lengths() {
    let mut model = model(&solo(), VarPlace::Host);
    model.begin(0, 0, true).expect("a pass");
    for (index, len, message) in [
        (0, 7, "the gradient of a 1x8 parameter has 7 values"),
        (0, 9, "the gradient of a 1x8 parameter has 9 values"),
        (0, 0, "the gradient of a 1x8 parameter has 0 values"),
        (1, 25, "the gradient of a 4x6 parameter has 25 values"),
        (2, 8, "no variable 2: the model has 2, counted from 0"),
        (
            usize::MAX,
            8,
            "no variable 18446744073709551615: the model has 2, counted from 0",
        ),
    ] {
        let error = model.add_var_gradient(index, &vec![1.0; len]);
        assert_eq!(error.expect_err(message).to_string(), message);
    }
    let weight = model.weight(0).expect("a layer");
    weight.add_gradient(&[1.0; 32 * 32]).expect("a gradient");
    for (index, len) in [(0, 8), (1, 24)] {
        model
            .add_var_gradient(index, &vec![1.0; len])
            .expect("a gradient");
    }
    model.finish_micro_batch().expect("a micro-batch");
    let report = model.finish_step(&StepOptions::default());
    assert!(report.expect("a step").applied);
}

#[test]
fn a_wrong_gradient_wakes_the_other_ranks() {
    let message = "the gradient of a 1x8 parameter has 7 values";
    let give = |len: usize| {
        move |model: &mut Model| {
            model.add_var_gradient(0, &vec![1.0; len])?;
            model.finish_micro_batch()
        }
    };
    let [first, last] = ranks(VarPlace::Host, give(8), give(7));
    assert_eq!(last, message);
    assert!(
        first.contains("rank 1 failed: ") && first.contains(message),
        "{first}"
    );
}

#[test]
fn a_wrong_number_wakes_the_other_ranks() {
    let message = "no variable 2: the model has 2, counted from 0";
    let take = |index: usize| move |model: &mut Model| model.var_gradient(index).map(drop);
    let right = |model: &mut Model| {
        let gradient = model.var_gradient(0)?;
        gradient.write(&Cpu, 0, &[1.0; 8])?;
        model.push_var_gradient(0)?;
        model.finish_micro_batch()
    };
    for wrong in [take(2), take(usize::MAX)] {
        let [first, last] = ranks(VarPlace::Backend, right, wrong);
        assert!(
            last.starts_with("no variable ") && last.ends_with("the model has 2, counted from 0"),
            "{last}"
        );
        assert!(first.contains("rank 1 failed: no variable "), "{first}");
    }
    let [first, last] = ranks(VarPlace::Backend, right, |model| model.push_var_gradient(2));
    assert_eq!(last, message);
    assert!(first.contains(message), "{first}");
}

/// Variables have one axis or two, in a model as in its plan.
#[test]
fn variables_of_other_axes_are_refused() {
    let comm = solo();
    let mesh = MeshComm::new(Mesh::sharded(1), comm).expect("a mesh");
    for (shape, message) in [
        (
            &[2usize, 3, 4][..],
            "variable 'odd' has shape [2, 3, 4]; give one or two axes",
        ),
        (&[], "variable 'odd' has shape []; give one or two axes"),
        (
            &[usize::MAX, 2],
            "variable 'odd': shape [18446744073709551615, 2] has more elements than",
        ),
    ] {
        let specs = [var("odd", shape)];
        let recipe = |_: &LinearSpec| recipe();
        let made = ShardedModel::new(&Cpu, &mesh, recipe, &[], &specs, ModelOptions::default());
        let error = made.expect_err(message).to_string();
        assert!(error.starts_with(message), "{error}");
    }
}

/// A weight by itself says what it lacks.
#[test]
fn a_weight_without_an_optimizer_says_so() {
    let mesh = MeshComm::new(Mesh::sharded(1), solo()).expect("a mesh");
    let shape = Shape::new(32, 32);
    let tensor = QuantizedTensor::new(recipe(), shape, Usage::BOTH, |_, bytes| {
        Cpu.alloc::<u8>(bytes)
    });
    let tensor = tensor.expect("a tensor");
    let memory = LayerMemory::new(&Cpu);
    let ranges = std::iter::once(0..shape.elements()).collect();
    let weight = ShardedWeight::whole(&Cpu, &mesh, &memory, tensor, ranges);
    let message = "no optimizer is connected to this weight";
    let errors = [
        weight.gradient().map(drop).expect_err(message).to_string(),
        weight.push_gradient().expect_err(message).to_string(),
        weight.add_gradient(&[]).expect_err(message).to_string(),
    ];
    assert_eq!(errors, [message; 3]);
}
