//! What the integration tests share.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::net::TcpListener;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lowp_comm::{
    Communicator, Control, HostComm, Launch, LocalComm, RanksFailed, join, run_comms, run_ranks,
};
use lowp_format::{AnyRecipe, Axis, BufferSpec, Code, Orientation, Recipe, Role, ScaleRule, Shape};
use lowp_kernels::Cpu;
use lowp_shard::ShardError;

/// Long enough for a loaded machine; no test waits this long unless something hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) type Comm = Arc<dyn Communicator<Cpu>>;

/// Every recipe, and each with one option at another value: those that quantize weights in another way.
pub(crate) fn variants() -> Vec<AnyRecipe> {
    let weights = |r: &AnyRecipe| (r.name(), r.quantizers(Role::Weight), r.source_rounding());
    let mut found: Vec<AnyRecipe> = Vec::new();
    for default in AnyRecipe::all() {
        let options = AnyRecipe::options_of(default.name()).expect("a recipe");
        let mut values = vec![default.options()];
        for option in options {
            // Numbers have no names.
            for text in (option.names)().iter().chain(&["3", "2.5"]) {
                let mut changed = default.options();
                changed.set(option.name, text);
                values.push(changed);
            }
        }
        let made = values
            .iter()
            .filter_map(|values| AnyRecipe::from_name(default.name(), values).ok());
        for recipe in made {
            if !found.iter().any(|other| weights(other) == weights(&recipe)) {
                found.push(recipe);
            }
        }
    }
    found
}

/// Whether flat slices of masters can be cast: not with four over six, which compares whole blocks.
pub(crate) fn casts_flat(recipe: &AnyRecipe) -> bool {
    let chooses = |o| match recipe.kernel(o).scale {
        ScaleRule::TwoLevel { four_over_six, .. } => four_over_six.is_on(),
        _ => false,
    };
    !Orientation::ALL.into_iter().any(chooses)
}

/// What moves data between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Threads that share buffers.
    Threads,
    /// Processes, here as threads that share nothing but a port.
    Tcp,
}

impl Engine {
    pub(crate) const ALL: [Engine; 2] = [Engine::Threads, Engine::Tcp];

    /// A world of `n` ranks whose waits end after `limit`.
    pub(crate) fn world(self, n: usize, limit: Duration) -> Vec<Comm> {
        match self {
            Engine::Threads => {
                let world = LocalComm::world(&Cpu, n, limit);
                world.into_iter().map(Into::into).collect()
            }
            Engine::Tcp => {
                let host = |control| HostComm::new(control, &Cpu).into();
                joined(n, limit).into_iter().map(host).collect()
            }
        }
    }

    /// Runs `f` as every rank.
    #[expect(clippy::result_large_err, reason = "what the library returns")]
    pub(crate) fn run<T: Send>(
        self,
        world: usize,
        f: impl Fn(usize, Comm) -> Result<T, ShardError> + Sync,
    ) -> Result<Vec<T>, RanksFailed<T, ShardError>> {
        run_comms(self.world(world, PATIENCE), f)
    }
}

/// A world of ranks that speak TCP, at a port that nobody has.
fn joined(n: usize, limit: Duration) -> Vec<Arc<dyn Control>> {
    let free = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = free.local_addr().expect("its number").port();
    let rank = |rank| Launch {
        rank,
        world: n,
        local_rank: rank,
        local_world: n,
        host: "127.0.0.1".to_owned(),
        port,
        limit,
        build: "tests".to_owned(),
    };
    let launches: Vec<_> = (0..n).map(rank).collect();
    drop(free);
    thread::scope(|scope| {
        let join = |launch: Launch| scope.spawn(move || join(&launch).expect("a world"));
        let ranks: Vec<_> = launches.into_iter().map(join).collect();
        let ranks = ranks.into_iter();
        ranks.map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// Runs `f` as every rank and expects success.
pub(crate) fn ranks<T: Send>(
    world: usize,
    f: impl Fn(usize, Comm) -> Result<T, ShardError> + Sync,
) -> Vec<T> {
    match run_ranks(&Cpu, world, PATIENCE, f) {
        Ok(results) => results,
        Err(failed) => panic!("{failed}"),
    }
}

/// Runs `f` as every rank of `engine` and expects a failure.
pub(crate) fn failing_on<T: Send>(
    engine: Engine,
    world: usize,
    f: impl Fn(usize, Comm) -> Result<T, ShardError> + Sync,
) -> RanksFailed<T, ShardError> {
    match engine.run(world, f) {
        Ok(_) => panic!("{engine:?}: every rank succeeded"),
        Err(failed) => failed,
    }
}

/// Runs `f` as every rank and expects a failure.
pub(crate) fn failing<T: Send>(
    world: usize,
    f: impl Fn(usize, Comm) -> Result<T, ShardError> + Sync,
) -> RanksFailed<T, ShardError> {
    failing_on(Engine::Threads, world, f)
}

/// A deterministic stream of bytes (splitmix64).
pub(crate) fn bytes(seed: u64, n: usize) -> Vec<u8> {
    (0..n as u64).map(|i| mix(seed, i) as u8).collect()
}

/// Deterministic values in -2..2 with full significands.
pub(crate) fn values(seed: u64, n: usize) -> Vec<f32> {
    let unit = |i: u64| (mix(seed, i) >> 40) as f32 / (1u64 << 24) as f32;
    (0..n as u64).map(|i| unit(i) * 4.0 - 2.0).collect()
}

fn mix(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(i);
    z = (z ^ (z >> 30))
        .wrapping_add(0x9E37_79B9_7F4A_7C15)
        .wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Ranges of `lens`, one after another.
pub(crate) fn tiling(lens: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let next = |&len: &usize| {
        end += len;
        end - len..end
    };
    lens.iter().map(next).collect()
}

/// The entries of `rows` cut out of a full Compact buffer, bit by bit from the definition.
pub(crate) fn cut_rows(
    spec: &BufferSpec,
    full: Shape,
    bytes: &[u8],
    rows: Range<usize>,
) -> Vec<u8> {
    let local = full.with_rows(rows.len());
    let [outer, inner] = spec.entries(local);
    let at_full = |i: usize, j: usize| match spec.axes[0] {
        Axis::Rows => (rows.start / spec.tile[0] + i, j),
        Axis::Cols => (i, rows.start / spec.tile[1] + j),
    };
    let mut out = vec![0; spec.bytes(local)];
    for i in 0..outer {
        for j in 0..inner {
            let (fi, fj) = at_full(i, j);
            let from = (fi * spec.row_bytes(full), fj);
            move_entry(
                spec.code,
                bytes,
                from,
                &mut out,
                (i * spec.row_bytes(local), j),
            );
        }
    }
    out
}

/// The transpose of a buffer of `entries`, entry by entry.
pub(crate) fn transposed(code: Code, entries: [usize; 2], bytes: &[u8]) -> Vec<u8> {
    let [outer, inner] = entries;
    let mut out = vec![0; inner * code.bytes(outer)];
    for i in 0..outer {
        for j in 0..inner {
            let to = (j * code.bytes(outer), i);
            move_entry(code, bytes, (i * code.bytes(inner), j), &mut out, to);
        }
    }
    out
}

/// Copies one entry; positions are (byte of the row's start, entry in the row).
fn move_entry(code: Code, from: &[u8], at: (usize, usize), to: &mut [u8], dest: (usize, usize)) {
    if code.bits() == 4 {
        let nibble = from[at.0 + at.1 / 2] >> (4 * (at.1 % 2)) & 15;
        let byte = &mut to[dest.0 + dest.1 / 2];
        let shift = 4 * (dest.1 % 2);
        *byte = *byte & !(15 << shift) | nibble << shift;
    } else {
        let n = code.bytes(1);
        for b in 0..n {
            to[dest.0 + dest.1 * n + b] = from[at.0 + at.1 * n + b];
        }
    }
}
