//! One rank of a world of processes, which gathers weights, reduces gradients and steps, round after round. By hand it shows what
//! becomes of the others when one is killed; tests/failures has ranks fail in every other way, too.
//!
//! ```text
//! cargo build --release -p lowp-nccl --features cuda --example rank_loop
//! torchrun --no-python --nproc-per-node 2 target/release/examples/rank_loop --rounds 100000
//! ```

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lowp_comm::{CommError, Communicator, Control, HostComm, Launch, Mesh, MeshComm, join};
use lowp_format::{AnyRecipe, Phase, RecipeOptions, Shape};
use lowp_kernels::{Backend, Cpu, Source};
use lowp_optim::{Group, OptimizerBuilder, ParamSpec, StepOptions};
use lowp_shard::{
    GatherGroup, GatherPool, GradBucketOptions, GradBuckets, GradParam, ShardSpec, ShardedTensor,
};

const HELP: &str = "\
rank_loop [OPTION VALUE].. is one rank of a world that torchrun, mpirun or srun starts:
  --device cpu|cuda  where it works: cuda is the GPU LOCAL_RANK, and NCCL [default: cuda]
  --work WORK,..     what a round is: gather, reduce-scatter, step [default: all, in this order]
  --rounds N         number of rounds [default: 100]
  --recipe NAME      of the weights, of which there are 4 [default: mxfp8]
  --width N          rows and columns of each of them [default: 256]
  --limit SECONDS    how long a rank waits for others [default: 20]
  --nan RANK:ROUND   that rank steps with a gradient that is NaN in that round
  --swap RANK:ROUND  that rank gathers and reduces in the other order in that round
  --hold met|id      do not go on when all ranks have met, or have NCCL's id: wait until another rank fails
  --build TEXT       the build that it says it is";

/// Weights of the model.
const WEIGHTS: usize = 4;
/// Every gradient.
const GRAD: f32 = 1e-3;
/// The rounds that are announced: the first, and one in which all that can be a graph is one.
const ANNOUNCED: [u64; 2] = [1, 10];

type Failure = Box<dyn Error>;

/// What a round may be made of.
const WORK: [&str; 3] = ["gather", "reduce-scatter", "step"];

#[derive(Debug)]
struct Options {
    device: String,
    work: Vec<&'static str>,
    rounds: u64,
    recipe: AnyRecipe,
    width: usize,
    limit: Duration,
    /// Rank and round.
    nan: Option<(usize, u64)>,
    swap: Option<(usize, u64)>,
    hold: String,
    build: String,
}

impl Options {
    fn from_args(mut args: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let recipe = |name: &str| AnyRecipe::from_name(name, &RecipeOptions::default());
        let mut options = Self {
            device: "cuda".to_owned(),
            work: WORK.to_vec(),
            rounds: 100,
            recipe: recipe("mxfp8")?,
            width: 256,
            limit: Duration::from_secs(20),
            nan: None,
            swap: None,
            hold: String::new(),
            build: env!("CARGO_PKG_VERSION").to_owned(),
        };
        while let Some(name) = args.next() {
            let value = args.next().unwrap_or_default();
            let unknown = || format!("'{name} {value}' is no option\n\n{HELP}");
            match name.as_str() {
                "--device" if ["cpu", "cuda"].contains(&&*value) => options.device = value,
                "--work" => {
                    let known = |word| WORK.into_iter().find(|known| *known == word);
                    let work: Option<_> = value.split(',').map(known).collect();
                    options.work = work.ok_or_else(unknown)?;
                }
                "--rounds" => options.rounds = value.parse()?,
                "--recipe" => options.recipe = recipe(&value)?,
                "--width" => options.width = value.parse()?,
                "--limit" => options.limit = Duration::from_secs(value.parse()?),
                "--nan" | "--swap" => {
                    let (rank, round) = value.split_once(':').ok_or_else(unknown)?;
                    let at = Some((rank.parse()?, round.parse()?));
                    if name == "--nan" {
                        options.nan = at;
                    } else {
                        options.swap = at;
                    }
                }
                "--hold" if ["met", "id"].contains(&&*value) => options.hold = value,
                "--build" => options.build = value,
                _ => return Err(unknown().into()),
            }
        }
        Ok(options)
    }
}

fn main() -> ExitCode {
    let options = Options::from_args(std::env::args().skip(1));
    match options.and_then(|options| run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Joins the world, and fails with it: an error of this rank ends all.
fn run(options: &Options) -> Result<(), Failure> {
    let launch = Launch::from_env(options.limit, &options.build)?;
    let launch = launch.ok_or("start it with torchrun, mpirun or srun")?;
    let control = join(&launch)?;
    say(&*control, "met");
    let done = if options.hold == "met" {
        hold(&*control)
    } else if options.device == "cpu" {
        let comm = HostComm::new(Arc::clone(&control), &Cpu);
        rounds(&Cpu, &comm.into(), options)
    } else {
        on_gpu(&launch, &control, options)
    };
    done.map_err(|error| {
        let (rank, message) = (launch.rank, error.to_string());
        // What another rank failed with, if that was first.
        control.fail(CommError::Failed { rank, message }).into()
    })
}

fn say(control: &dyn Control, what: &str) {
    let (rank, world) = (control.rank(), control.world_size());
    println!("rank {rank} of {world}: {what}");
}

/// Waits until another rank fails.
fn hold(control: &dyn Control) -> Result<(), Failure> {
    say(control, "holds");
    loop {
        control.failure().map_or(Ok(()), Err)?;
        thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(feature = "cuda")]
fn on_gpu(launch: &Launch, control: &Arc<dyn Control>, options: &Options) -> Result<(), Failure> {
    use lowp_nccl::{NcclComm, NcclOptions};
    let cuda = lowp_kernels::Cuda::new(launch.local_rank)?;
    if options.hold == "id" {
        // As NcclComm asks for it; the others join with it, and wait for this rank.
        control.broadcast("NCCL's id", Vec::new())?;
        return hold(&**control);
    }
    let nccl = NcclOptions {
        limit: options.limit,
        ..NcclOptions::default()
    };
    let comm = NcclComm::new(Arc::clone(control), &cuda, nccl)?;
    rounds(&cuda, &comm.into(), options)
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &Launch, _: &Arc<dyn Control>, _: &Options) -> Result<(), Failure> {
    Err("this program was built without CUDA; build it with --features cuda".into())
}

/// All rounds of one rank.
fn rounds<B: Backend>(
    backend: &B,
    comm: &Arc<dyn Communicator<B>>,
    options: &Options,
) -> Result<(), Failure> {
    let (rank, control) = (comm.rank(), comm.control());
    let shape = Shape::new(options.width, options.width);
    let spec = ShardSpec::new(&options.recipe, shape, comm.world_size(), rank)?;
    let rows = spec.elements();
    let mut builder = OptimizerBuilder::new(Arc::clone(comm)).on(backend);
    let group = builder.group(Group::default());
    let (mut shards, mut ids) = (Vec::new(), Vec::new());
    for number in 0..WEIGHTS {
        let shard = ShardedTensor::new(backend, options.recipe, spec.clone())?;
        let values = rows.clone().map(|i| ((i % 251) as f32 - 125.0) * GRAD);
        let master = ParamSpec::new(number.to_string(), group, values.collect());
        ids.push(builder.param(shard.local(), master)?);
        shards.push(shard);
    }
    let mut optimizer = builder.build()?;
    let pool = GatherPool::new(backend);
    let halves = [shards.split_off(WEIGHTS / 2), shards];
    let half = |half| GatherGroup::new(backend, Arc::clone(comm), &pool, half, true);
    let mut weights = halves
        .into_iter()
        .map(half)
        .collect::<Result<Vec<_>, _>>()?;

    let full = backend.upload(&vec![GRAD; shape.elements()])?;
    let mut grads = Vec::new();
    for &id in &ids {
        optimizer.set_grad(id, &vec![GRAD; rows.len()])?;
        if let Source::F32(own) = optimizer.grad(id) {
            grads.push(own.clone());
        }
    }
    let param = |(number, out): (usize, &B::Buffer<f32>)| GradParam {
        block: None,
        name: number.to_string(),
        ranges: spec.all_elements(),
        out: out.clone(),
    };
    let params = grads.iter().enumerate().map(param).collect();
    let mesh = MeshComm::new(Mesh::sharded(comm.world_size()), Arc::clone(comm))?;
    // Each by itself.
    let bucket = GradBucketOptions {
        bytes: 0,
        ..GradBucketOptions::default()
    };
    let mut buckets = GradBuckets::new(backend, &mesh, params, bucket)?;
    let mut reduced = None;

    for round in 1..=options.rounds {
        let swapped = options.swap == Some((rank, round));
        let in_order = |len: usize| (0..len).map(move |at| if swapped { len - 1 - at } else { at });
        for &work in &options.work {
            if ANNOUNCED.contains(&round) {
                say(control, &format!("{work} {round}"));
            }
            match work {
                "gather" => {
                    for phase in Phase::ALL {
                        for half in in_order(weights.len()) {
                            weights[half].unshard(phase)?;
                            weights[half].reshard();
                        }
                    }
                }
                "reduce-scatter" => {
                    for number in in_order(WEIGHTS) {
                        if let Source::F32(grad) = buckets.grad(number)? {
                            backend.copy(&full, 0..shape.elements(), &grad, 0)?;
                        }
                        buckets.push(number)?;
                    }
                    reduced = Some(buckets.finish()?.done);
                }
                _ => {
                    if let Some((_, at)) = options.nan.filter(|&(bad, _)| bad == rank) {
                        let first = if at == round { f32::NAN } else { GRAD };
                        backend.write(&grads[0], 0, &[first])?;
                    }
                    ids.iter().for_each(|&id| optimizer.mark_ready(id));
                    optimizer.compare(pool.gathered(&**comm));
                    if let Some(done) = reduced.take() {
                        optimizer.compare(done);
                    }
                    let report = optimizer.step(&StepOptions::default())?.wait()?;
                    if !report.applied {
                        let bad = report.grad.non_finite;
                        let text = format!("round {round} is skipped, gradients not finite: {bad}");
                        say(control, &text);
                    }
                }
            }
            backend.synchronize()?;
        }
    }
    control.barrier()?;
    let counts = optimizer.counts()?;
    let text = format!("done, {} steps, {} skipped", counts.applied, counts.skipped);
    say(control, &text);
    Ok(())
}
