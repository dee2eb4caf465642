//! What a world costs on the host, by its number of ranks: rendezvous, a mesh, plans, agreement, and the news of a failure. No data
//! moves. Every rank is a thread here, and speaks TCP as a process would.
//!
//! ```text
//! cargo run --release -p lowp-shard --example many_ranks -- 16 64 256 1024
//! ```

use std::error::Error;
use std::net::TcpListener;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use lowp_comm::{CommError, Communicator, HostComm, Launch, Mesh, MeshComm, join};
use lowp_format::{AnyRecipe, GatherPlan, Shape, Usage};
use lowp_kernels::Cpu;
use lowp_shard::{ShardError, ShardSpec};

const LIMIT: Duration = Duration::from_secs(120);
/// Weights that each rank plans.
const WEIGHTS: usize = 100;
const ROUNDS: usize = 5;

/// Seconds of each part, on one rank.
#[derive(Clone, Copy, Default)]
struct Times {
    rendezvous: f64,
    mesh: f64,
    plans: f64,
    agree: f64,
    failure: f64,
}

fn rank(launch: &Launch, failing: &Barrier) -> Result<Times, ShardError> {
    let mut times = Times::default();
    let begun = Instant::now();
    let control = join(launch)?;
    times.rendezvous = begun.elapsed().as_secs_f64();

    let begun = Instant::now();
    let shard = 8.min(launch.world);
    let mesh = Mesh {
        replicate: launch.world / shard,
        shard,
    };
    let world: Arc<dyn Communicator<Cpu>> = HostComm::new(control, &Cpu).into();
    let mesh = MeshComm::new(mesh, world)?;
    times.mesh = begun.elapsed().as_secs_f64();

    let begun = Instant::now();
    let mut text = String::new();
    for recipe in AnyRecipe::low_precision().into_iter().cycle().take(WEIGHTS) {
        let shape = Shape::new(16_384, 4096);
        let spec = ShardSpec::new(&recipe, shape, launch.world, launch.rank)?;
        let plan =
            GatherPlan::with_cuts(&recipe, shape, spec.cuts(), Usage::BOTH, Usage::BOTH, &[])?;
        text += &format!("{} {}; ", spec.rows().len().min(1), plan.wire_bytes());
    }
    times.plans = begun.elapsed().as_secs_f64();

    let control = mesh.world.control();
    control.barrier()?;
    let begun = Instant::now();
    for _ in 0..ROUNDS {
        control.all_equal("the plans", &text.len().to_string())?;
    }
    times.agree = begun.elapsed().as_secs_f64() / ROUNDS as f64;

    failing.wait();
    let begun = Instant::now();
    if launch.rank + 1 == launch.world {
        control.abort("planned");
    }
    let news = control.barrier();
    times.failure = begun.elapsed().as_secs_f64();
    match news {
        Err(CommError::Failed { .. }) => Ok(times),
        Err(other) => Err(other.into()),
        Ok(()) => Err(CommError::Failed {
            rank: launch.rank,
            message: "it did not hear of a failure".to_owned(),
        }
        .into()),
    }
}

/// Bytes of this process in memory.
fn resident() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(4096 * pages)
}

fn world(ranks: usize) -> Result<(), Box<dyn Error>> {
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let launch = |rank| Launch {
        rank,
        world: ranks,
        local_rank: rank,
        local_world: ranks,
        host: "127.0.0.1".to_owned(),
        port,
        limit: LIMIT,
        build: "many_ranks".to_owned(),
        run: String::new(),
        restart: 0,
    };
    let failing = Barrier::new(ranks);
    let before = resident();
    let (times, after) = thread::scope(|scope| {
        let start = |rank: usize| {
            let (launch, failing) = (launch(rank), &failing);
            let builder = thread::Builder::new().stack_size(512 << 10);
            builder.spawn_scoped(scope, move || self::rank(&launch, failing))
        };
        let started: Vec<_> = (0..ranks).map(start).collect::<Result<_, _>>()?;
        let mut times = Vec::new();
        let mut most = None;
        for rank in started {
            most = most.max(resident());
            times.push(rank.join().map_err(|_| "a rank panicked")??);
        }
        Ok::<_, Box<dyn Error>>((times, most))
    })?;
    let most = |of: fn(&Times) -> f64| times.iter().map(of).fold(0.0, f64::max);
    let memory = before
        .zip(after)
        .map_or(0, |(a, b)| b.saturating_sub(a) / ranks / 1024);
    println!(
        "| {ranks} | {:.3} | {:.3} | {:.3} | {:.1} | {:.1} | {memory} |",
        most(|t| t.rendezvous),
        most(|t| t.mesh),
        most(|t| t.plans),
        1e3 * most(|t| t.agree),
        1e3 * most(|t| t.failure),
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let sizes: Vec<usize> = std::env::args()
        .skip(1)
        .map(|n| n.parse())
        .collect::<Result<_, _>>()?;
    let sizes = if sizes.is_empty() {
        vec![16, 64, 256]
    } else {
        sizes
    };
    println!(
        "| ranks | rendezvous s | mesh s | {WEIGHTS} plans s | agreement ms | failure ms | KiB per rank |\n|---|---|---|---|---|---|---|"
    );
    sizes.into_iter().try_for_each(world)
}
