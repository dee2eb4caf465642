//! What a world costs on the host, by its number of ranks: start, the calls of a step, and the news of a failure. No data
//! moves. Every rank is a thread here, and speaks TCP as a process would; eight make a node, or with `flat` all are on one.
//!
//! ```text
//! cargo run --release -p lowp-shard --example many_ranks -- 16 64 256 1024
//! cargo run --release -p lowp-shard --example many_ranks -- flat 16 64 256 1024
//! ```
//!
//! Each figure is the time of the slowest rank, and in brackets the processor time of all ranks together: on two cores that are free
//! the first is half of the second or a little more.

use std::error::Error;
use std::net::TcpListener;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lowp_comm::{CommError, Communicator, Control, HostComm, Launch, Mesh, MeshComm, join};
use lowp_format::{AnyRecipe, GatherPlan, Recipe as _, Shape, Usage};
use lowp_kernels::Cpu;
use lowp_shard::{ShardError, ShardSpec};

const LIMIT: Duration = Duration::from_secs(120);
/// Weights that each rank plans.
const WEIGHTS: usize = 100;
const ROUNDS: usize = 20;
/// Ranks of a node.
const NODE: usize = 8;
/// Bytes of what a rank tells the first alone.
const LIST: usize = 1 << 10;

/// What is measured, one after the other.
const PARTS: [&str; 8] = [
    "rendezvous s",
    "mesh s",
    "100 plans s",
    "agreement ms",
    "8 bytes of each to all ms",
    "sum of 4 ms",
    "1 KiB of each to rank 0 ms",
    "failure ms",
];

const AGREEMENT: usize = 3;

/// Seconds of the slowest rank, and of all processors.
#[derive(Clone, Copy, Default)]
struct Cost {
    wall: f64,
    processors: f64,
    /// Of the thread of rank 0 that serves the others, and of all relays.
    server: f64,
    relays: f64,
}

/// Has the ranks begin and end each part together.
struct Parts {
    together: Barrier,
    costs: Mutex<[Cost; PARTS.len()]>,
}

impl Parts {
    /// Measures `part` of a rank, of which `rounds` make a figure.
    fn run<T>(&self, part: usize, rank: usize, rounds: usize, work: impl FnOnce() -> T) -> T {
        let used = || {
            let threads = ["lowp-control", "lowp-relay"].map(thread_seconds);
            [processor_seconds(), threads[0], threads[1]]
        };
        let own = || if rank == 0 { used() } else { [0.0; 3] };
        self.together.wait();
        let before = own();
        self.together.wait();
        let begun = Instant::now();
        let done = work();
        let wall = begun.elapsed().as_secs_f64() / rounds as f64;
        self.together.wait();
        let after = own();
        let mut costs = self.costs.lock().unwrap_or_else(PoisonError::into_inner);
        let cost = &mut costs[part];
        cost.wall = cost.wall.max(wall);
        if rank == 0 {
            let of = |at: usize| (after[at] - before[at]) / rounds as f64;
            [cost.processors, cost.server, cost.relays] = [of(0), of(1), of(2)];
        }
        done
    }
}

fn rank(launch: &Launch, parts: &Parts) -> Result<(), ShardError> {
    let own = launch.rank;
    let control = parts.run(0, own, 1, || join(launch))?;
    let mesh = parts.run(1, own, 1, || {
        let shard = NODE.min(launch.world);
        let mesh = Mesh {
            replicate: launch.world / shard,
            shard,
        };
        let world: Arc<dyn Communicator<Cpu>> = HostComm::new(control, &Cpu).into();
        MeshComm::new(mesh, world)
    })?;
    let control = mesh.world.control();
    parts.run(2, own, 1, || plan(launch, control))?;
    let many = |part, round: &dyn Fn() -> Result<(), CommError>| {
        parts.run(part, own, ROUNDS, || (0..ROUNDS).try_for_each(|_| round()))
    };
    many(AGREEMENT, &|| control.all_equal("the plans", "the same"))?;
    many(4, &|| {
        let bytes = own.to_le_bytes().to_vec();
        control.all_gather("8 bytes", bytes).map(drop)
    })?;
    many(5, &|| control.sum(&mut [1.0; 4]))?;
    many(6, &|| control.gather("a list", vec![0; LIST]).map(drop))?;
    let news = parts.run(7, own, 1, || {
        if own + 1 == launch.world {
            control.abort("planned");
        }
        control.barrier()
    });
    match news {
        Err(CommError::Failed { .. }) => Ok(()),
        Err(other) => Err(other.into()),
        Ok(()) => Err(CommError::Failed {
            rank: own,
            message: "it did not hear of a failure".to_owned(),
        }
        .into()),
    }
}

/// Plans weights, and agrees on all of them in one round.
fn plan(launch: &Launch, control: &dyn Control) -> Result<(), ShardError> {
    let mut text = String::new();
    for recipe in AnyRecipe::low_precision().into_iter().cycle().take(WEIGHTS) {
        let shape = Shape::new(16_384, 4096);
        let spec = ShardSpec::new(&recipe, shape, launch.world, launch.rank)?;
        let plan =
            GatherPlan::with_cuts(&recipe, shape, spec.cuts(), Usage::BOTH, Usage::BOTH, &[])?;
        text += &format!("{} {}; ", recipe.name(), plan.wire_bytes());
    }
    Ok(control.all_equal("the plans", &text)?)
}

/// Seconds that this process used of all processors.
fn processor_seconds() -> f64 {
    const TICKS: f64 = 100.0;
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let ticks = fields.split(' ').skip(11).take(2);
    ticks
        .filter_map(|ticks| ticks.parse::<f64>().ok())
        .sum::<f64>()
        / TICKS
}

/// Seconds that the threads of this name used.
fn thread_seconds(called: &str) -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let used = tasks.filter_map(|task| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let used = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        let used = used.split(' ').next()?.parse::<f64>().ok()?;
        (name.trim() == called).then_some(used / 1e9)
    });
    used.sum()
}

/// Bytes of this process in memory.
fn resident() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(4096 * pages)
}

fn world(ranks: usize, node: usize) -> Result<(), Box<dyn Error>> {
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let launch = |rank| Launch {
        rank,
        world: ranks,
        local_rank: rank % node,
        local_world: node.min(ranks),
        host: "127.0.0.1".to_owned(),
        port,
        limit: LIMIT,
        build: "many_ranks".to_owned(),
        run: "many_ranks".to_owned(),
        restart: 0,
    };
    let parts = Parts {
        together: Barrier::new(ranks),
        costs: Mutex::default(),
    };
    let before = resident();
    let after = thread::scope(|scope| {
        let start = |rank: usize| {
            let (launch, parts) = (launch(rank), &parts);
            let builder = thread::Builder::new().stack_size(512 << 10);
            builder.spawn_scoped(scope, move || self::rank(&launch, parts))
        };
        let started: Vec<_> = (0..ranks).map(start).collect::<Result<_, _>>()?;
        let mut most = None;
        for rank in started {
            most = most.max(resident());
            rank.join().map_err(|_| "a rank panicked")??;
        }
        Ok::<_, Box<dyn Error>>(most)
    })?;
    let memory = before
        .zip(after)
        .map_or(0, |(a, b)| b.saturating_sub(a) / ranks / 1024);
    let costs = parts.costs.into_inner();
    let costs = costs.unwrap_or_else(PoisonError::into_inner);
    let [wall, processors] = [|c: &Cost| c.wall, |c: &Cost| c.processors]
        .map(|of: fn(&Cost) -> f64| costs[..3].iter().map(of).sum::<f64>());
    print!("| {ranks} | {wall:.2} ({processors:.2}) ");
    for (part, cost) in PARTS.iter().zip(&costs) {
        let unit = if part.ends_with("ms") { 1e3 } else { 1.0 };
        print!("| {:.2} ({:.2}) ", unit * cost.wall, unit * cost.processors);
    }
    let Cost { server, relays, .. } = costs[AGREEMENT];
    let nodes = ranks.div_ceil(node).saturating_sub(1).max(1);
    let relay = 1e3 * relays / nodes as f64;
    println!("| {:.2} | {relay:.2} | {memory} |", 1e3 * server);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let (flat, sizes): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|arg| arg == "flat");
    let node = if flat.is_empty() { NODE } else { usize::MAX };
    let sizes: Vec<usize> = sizes.iter().map(|n| n.parse()).collect::<Result<_, _>>()?;
    let sizes = if sizes.is_empty() {
        vec![16, 64, 256]
    } else {
        sizes
    };
    println!(
        "| ranks | start s | {} | rank 0's thread in an agreement ms | a relay's ms | KiB per rank |\n|{}",
        PARTS.join(" | "),
        "---|".repeat(PARTS.len() + 5)
    );
    sizes.into_iter().try_for_each(|ranks| world(ranks, node))
}
