//! [`CommError`]: every way in which ranks, collectives and meshes can go wrong.

use std::fmt;

use lowp_kernels::KernelError;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How a rank went that others wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
    /// It dropped its last handle.
    Dropped,
    /// It was unwinding from a panic then.
    Panicked,
    /// Its connection closed without a word: the process or its machine ended.
    Lost,
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Departure::Dropped => "dropped its communicator",
            Departure::Panicked => "panicked",
            Departure::Lost => {
                "lost its connection (its process was killed, or its machine failed)"
            }
        })
    }
}

/// Most ranks of a list in an error.
const RANKS: usize = 16;

/// Ranks in words: the first ones, and how many there are.
pub(crate) fn list_of_ranks(ranks: &[usize]) -> String {
    match ranks.get(..RANKS) {
        Some(first) if ranks.len() > RANKS => {
            let first = first.iter().map(|rank| format!("{rank}, "));
            format!("[{}.. of {}]", first.collect::<String>(), ranks.len())
        }
        _ => format!("{ranks:?}"),
    }
}

/// What is wrong, with the numbers and the remedy. Ranks are numbered in the world, also where
/// the operation ran in a group of a split.
// Those that travel between processes come first: their numbers count.
#[derive(Clone, Debug, Error, PartialEq, Serialize, Deserialize)]
pub enum CommError {
    /// A rank failed; every other rank stops with its message.
    #[error("rank {rank} failed: {message} (every rank stopped; fix the cause on rank {rank})")]
    Failed {
        /// The rank that failed first.
        rank: usize,
        /// What it said.
        message: String,
    },
    /// Some ranks did not come in time.
    #[error(
        "{op}: waited {waited_s:.1} s for ranks {}, which did not join ({}; or raise the time limit, `timeout`)",
        list_of_ranks(missing),
        if elsewhere.is_empty() { "see where they are stuck".to_owned() } else { elsewhere.join(", ") }
    )]
    Timeout {
        /// The collective.
        op: Box<str>,
        /// How long the first rank waited, in seconds.
        waited_s: f64,
        /// The ranks that did not arrive.
        missing: Vec<usize>,
        /// Collectives of other groups that missing ranks wait in, in words.
        elsewhere: Vec<String>,
    },
    /// Ranks do different things.
    #[error(
        "the ranks disagree on {what}: {}; all ranks must make the same calls with the same plans in the same order",
        descriptions.join("; ")
    )]
    Mismatch {
        /// What they disagree on.
        what: String,
        /// What each set of ranks has, as `ranks [0, 2]: ...`.
        descriptions: Vec<String>,
    },
    /// A rank is gone while others wait for it.
    #[error(
        "{op}: rank {rank} {how} and will not join (see the error of that rank{})",
        if *how == Departure::Dropped { "; every rank must make every collective call" } else { "" }
    )]
    Departed {
        /// The collective that others wait in.
        op: Box<str>,
        /// The rank that is gone.
        rank: usize,
        /// How it went.
        how: Departure,
    },
    /// Ranks that are processes did not find each other.
    #[error("rank {rank} of {world} at {address}: {why}")]
    Rendezvous {
        /// This rank.
        rank: usize,
        /// Number of ranks.
        world: usize,
        /// Where rank 0 listens.
        address: String,
        /// What went wrong, with the remedy.
        why: String,
    },
    /// The backend rejected or failed.
    #[error(transparent)]
    #[serde(skip)]
    Kernel(#[from] KernelError),
    /// What carries data between ranks failed here, and no rank has said why.
    #[error(
        "{op} failed on rank {rank}: {why} (if another rank ended, that rank has the cause: see the output of each rank)"
    )]
    #[serde(skip)]
    Transport {
        /// What was called.
        op: Box<str>,
        /// This rank.
        rank: usize,
        /// What the library says.
        why: String,
    },
    /// A variable of the launcher has a value that means no rank.
    #[error("{variable}{}{value}: {why}", if value.is_empty() { "" } else { "=" })]
    #[serde(skip)]
    Launch {
        /// The variable of the environment.
        variable: String,
        /// Its value; empty where it has none.
        value: String,
        /// What it must be.
        why: String,
    },
    /// The system has no thread for a rank.
    #[error(
        "the thread of rank {rank} of {world} could not be started: {why}; raise the limit of processes (ulimit -u), or use fewer ranks"
    )]
    #[serde(skip)]
    NoThread {
        /// The first rank that has none.
        rank: usize,
        /// Number of ranks.
        world: usize,
        /// What the system says.
        why: String,
    },
    /// A rank number outside its world.
    #[error("rank {rank} is outside a world of {world} ranks; ranks count from 0 to world - 1")]
    #[serde(skip)]
    NoSuchRank {
        /// The rank given.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },
    /// Two parts that must span the same ranks do not.
    #[error(
        "{what} is for {found} ranks, but the communicator has {world}; make it for {world} ranks"
    )]
    #[serde(skip)]
    World {
        /// Which part.
        what: String,
        /// Ranks it is made for.
        found: usize,
        /// Ranks of the communicator.
        world: usize,
    },
    /// A buffer of a collective has another length than its ranges say.
    #[error("{op}, item {item}: {what} holds {found} entries, but the ranges need {needed}")]
    #[serde(skip)]
    ItemLength {
        /// The collective.
        #[serde(skip)]
        op: &'static str,
        /// Which item of the batch.
        item: usize,
        /// Which buffer of the item.
        #[serde(skip)]
        what: &'static str,
        /// Entries needed.
        needed: usize,
        /// Entries found.
        found: usize,
    },
    /// Gradients of a batch that lie in other memory than their number says.
    #[error(
        "reduce_scatter, items {} and {}: both give {memory} as the number of their memory, but lie in other memory; give each memory of a batch a number of its own",
        items[0], items[1]
    )]
    #[serde(skip)]
    ItemMemory {
        /// Which of the batch.
        items: [usize; 2],
        /// The number of both.
        memory: usize,
    },
    /// A gradient that other GPUs were to read.
    #[error(
        "reduce_scatter, item {item}: the gradient lies in memory of the host or of another library, which other GPUs do not read; allocate it by `Backend::alloc`, or have NCCL send it (`Sums::Nccl`)"
    )]
    #[serde(skip)]
    NotShared {
        /// Which of the batch.
        item: usize,
    },
    /// Text that is no mesh.
    #[error(
        "'{text}' is not a mesh; write replicate x shard with both at least 1, for example 2x4 (1x4 shards over 4 ranks)"
    )]
    #[serde(skip)]
    BadMesh {
        /// The text given.
        text: String,
    },
    /// A mesh of another size than the world.
    #[error(
        "a {replicate}x{shard} mesh needs {} ranks and the world has {world}; choose replicate x shard = {world}",
        replicate * shard
    )]
    #[serde(skip)]
    MeshWorld {
        /// Number of replicas.
        replicate: usize,
        /// Number of shards.
        shard: usize,
        /// Number of ranks.
        world: usize,
    },
}

impl CommError {
    /// The error as it travels to other processes. One that only this rank, `rank`, can make sense of becomes its message.
    pub(crate) fn told(self, rank: usize) -> Self {
        match self {
            Self::Failed { .. }
            | Self::Timeout { .. }
            | Self::Mismatch { .. }
            | Self::Departed { .. }
            | Self::Rendezvous { .. } => self,
            other => Self::Failed {
                rank,
                message: other.to_string(),
            },
        }
    }
}
