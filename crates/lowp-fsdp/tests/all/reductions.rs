//! What a plan says of reductions in even parts is what a run gives to devices: bytes that are scattered, summed on all ranks, and passed on.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lowp_comm::{
    Adder, Collective, CommError, Communicator, Control, GradWire, Mesh, MeshComm, Traffic,
    UnevenRun, run_ranks,
};
use lowp_format::{AnyRecipe, RecipeOptions};
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_fsdp::{LinearSpec, ModelError, ModelOptions, ShardedModel, VarPlace, VarSpec, VarUse};
use lowp_kernels::Cpu;
use lowp_optim::StepOptions;
use lowp_shard::{GradBucketOptions, Init};

const MICRO_BATCHES: usize = 2;

/// A rank that counts what NCCL would move for gradients.
#[derive(Debug)]
struct Counted {
    comm: Arc<dyn Communicator<Cpu>>,
    sent: Mutex<Traffic>,
}

impl Communicator<Cpu> for Counted {
    fn control(&self) -> &dyn Control {
        self.comm.control()
    }

    fn backend(&self) -> &Cpu {
        self.comm.backend()
    }

    fn is_enqueued(&self) -> bool {
        self.comm.is_enqueued()
    }

    fn enqueue(&self, label: &str, batch: Collective<'_, Cpu>) -> Result<(), CommError> {
        if let Collective::ReduceScatter(items, wire) = batch {
            let adder = match wire {
                GradWire::F32 => Adder::Library,
                GradWire::Bf16 => Adder::Receiver,
            };
            let places: Vec<_> = items
                .iter()
                .map(|item| (item.memory, item.ranges))
                .collect();
            let runs = UnevenRun::find(&places, self.world_size(), adder);
            let on_wire = items.iter();
            let on_wire = on_wire.map(|item| (item.ranges, item.wire(wire).bytes()));
            let on_wire: Vec<_> = on_wire.collect();
            let sent = Traffic::of_reduction(&on_wire, &runs, self.rank());
            let mut all = self.sent.lock().expect("no panic");
            all.reduce_scatter_bytes += sent.reduce_scatter_bytes;
            all.passed_on_bytes += sent.passed_on_bytes;
            all.all_reduce_bytes += sent.all_reduce_bytes;
        }
        self.comm.enqueue(label, batch)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<Cpu>>, CommError> {
        self.comm.split(color, key)
    }

    fn count(&self, sent: Traffic) {
        self.comm.count(sent);
    }

    fn traffic(&self) -> Traffic {
        self.comm.traffic()
    }
}

/// Two blocks whose weights have few rows for many ranks.
fn linears() -> Vec<LinearSpec> {
    let of_block = |block| {
        [(384, 256), (128, 256), (256, 384)].map(|(rows, cols)| LinearSpec {
            block,
            ..LinearSpec::new(format!("{block}.{rows}"), rows, cols, Init::Normal(0.1))
        })
    };
    (0..2).flat_map(of_block).collect()
}

fn vars() -> Vec<VarSpec> {
    let var = |name: &str, shape: &[usize], used| VarSpec {
        name: name.to_owned(),
        shape: shape.to_vec(),
        init: Init::Normal(1.0),
        decay: false,
        used,
    };
    vec![
        var("embedding", &[513, 64], VarUse::First),
        var("norm", &[256], VarUse::Throughout),
        var("head", &[512, 64], VarUse::Last),
    ]
}

fn train(
    recipe: AnyRecipe,
    comm: Arc<dyn Communicator<Cpu>>,
    wire: GradWire,
) -> Result<Traffic, ModelError> {
    let counted = Arc::new(Counted {
        comm,
        sent: Mutex::default(),
    });
    let comm: Arc<dyn Communicator<Cpu>> = counted.clone();
    let mesh = MeshComm::new(Mesh::sharded(comm.world_size()), comm)?;
    let options = ModelOptions {
        grads: GradBucketOptions {
            bytes: VarPlace::Backend.grad_bucket(),
            wire,
            ..GradBucketOptions::default()
        },
        vars: VarPlace::Backend,
        ..ModelOptions::default()
    };
    let (linears, vars) = (linears(), vars());
    let mut model = ShardedModel::new(&Cpu, &mesh, |_| recipe, &linears, &vars, options)?;
    for _ in 0..MICRO_BATCHES {
        model.begin(0, 0, true)?;
        for weight in model.weights().cloned().collect::<Vec<_>>() {
            weight.add_gradient(&vec![0.01; weight.full_shape().elements()])?;
        }
        for (index, var) in vars.iter().enumerate() {
            let gradient = vec![0.01; var.shape.iter().product()];
            model.var_gradient(index)?.write(&Cpu, 0, &gradient)?;
            model.push_var_gradient(index)?;
        }
        model.finish_micro_batch()?;
    }
    assert!(model.finish_step(&StepOptions::default())?.applied);
    let sent = *counted.sent.lock().expect("no panic");
    Ok(sent)
}

#[test]
fn gradients_are_reduced_as_planned() {
    let recipe = AnyRecipe::from_name("fp8-block", &RecipeOptions::default()).expect("a recipe");
    let mut passed_on = 0;
    for (world, wire) in [(2, GradWire::F32), (4, GradWire::F32), (4, GradWire::Bf16)] {
        let what = format!("{world} ranks, {}", wire.name());
        let ranks = run_ranks(&Cpu, world, Duration::from_secs(60), |_, comm| {
            train(recipe, comm, wire)
        });
        let ranks = ranks.unwrap_or_else(|error| panic!("{what}: {error}"));
        let shapes = ModelShapes::of_specs(&linears(), &vars()).expect("shapes");
        let config = CostConfig {
            mesh: Mesh::sharded(world),
            vars: VarPlace::Backend,
            grad_wire: wire,
            accumulate: MICRO_BATCHES,
            reduce_every_micro_batch: true,
            ..CostConfig::default()
        };
        let recipes = vec![recipe; shapes.layers.len()];
        let costs = Costs::new(&shapes, &recipes, "fp8-block", &config, None).expect("costs");
        let planned = |key: &str| {
            let mut found = costs.step.operations.iter();
            let found = found.find(|operation| operation.key == key);
            found.map_or(0, |operation| operation.sent)
        };
        let run = |of: fn(&Traffic) -> u64| ranks.iter().map(|sent| u128::from(of(sent))).sum();
        let scattered: u128 = run(|sent| sent.reduce_scatter_bytes);
        assert_eq!(planned("gradients"), scattered, "{what}");
        let on_all: u128 = run(|sent| sent.all_reduce_bytes);
        assert_eq!(planned("gradients_on_all"), on_all, "{what}");
        let sums: u128 = run(|sent| sent.passed_on_bytes);
        assert_eq!(planned("gradients_passed_on"), sums, "{what}");
        passed_on += sums;
    }
    assert!(passed_on > 0);
}
