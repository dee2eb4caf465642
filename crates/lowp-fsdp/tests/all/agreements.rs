//! How often the ranks of a model meet on the host before the first step: as often for many blocks as for a few.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lowp_comm::{Collective, CommError, Communicator, Control, Mesh, MeshComm, Traffic, run_ranks};
use lowp_format::{AnyRecipe, RecipeOptions};
use lowp_fsdp::{LinearSpec, ModelOptions, ShardedModel, VarSpec, VarUse};
use lowp_kernels::Cpu;
use lowp_shard::Init;

/// A rank whose rounds are counted.
#[derive(Debug)]
struct Counted {
    comm: Arc<dyn Communicator<Cpu>>,
    rounds: Arc<AtomicUsize>,
}

impl Control for Counted {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn members(&self) -> &[usize] {
        self.comm.control().members()
    }

    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.rounds.fetch_add(1, Ordering::Relaxed);
        self.comm.control().all_gather(tag, bytes)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        self.comm.control().split(color, key)
    }

    fn fail(&self, cause: CommError) -> CommError {
        self.comm.control().fail(cause)
    }

    fn failure(&self) -> Option<CommError> {
        self.comm.control().failure()
    }
}

impl Communicator<Cpu> for Counted {
    fn control(&self) -> &dyn Control {
        self
    }

    fn backend(&self) -> &Cpu {
        self.comm.backend()
    }

    fn is_enqueued(&self) -> bool {
        self.comm.is_enqueued()
    }

    fn enqueue(&self, label: &str, batch: Collective<'_, Cpu>) -> Result<(), CommError> {
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

/// Blocks of two weights, of which the last has this many rows.
fn linears(blocks: usize, rows: usize) -> Vec<LinearSpec> {
    let of_block = |block| {
        let rows = if block + 1 == blocks { rows } else { 128 };
        [("up", rows, 64), ("down", 64, 128)].map(|(name, rows, cols)| LinearSpec {
            block,
            ..LinearSpec::new(format!("{block}.{name}"), rows, cols, Init::Normal(0.1))
        })
    };
    (0..blocks).flat_map(of_block).collect()
}

/// Embeddings, or vectors that stay.
fn vars(count: usize, used: VarUse) -> Vec<VarSpec> {
    let var = |number| VarSpec {
        name: format!("var {number}"),
        shape: match used {
            VarUse::Throughout => vec![64],
            _ => vec![64 + number, 32],
        },
        init: Init::Normal(1.0),
        decay: false,
        used,
    };
    (0..count).map(var).collect()
}

/// Rounds of the making of a model, or the error of a rank; the last block has as many rows as `rows` says.
fn made(
    blocks: usize,
    rows: fn(usize) -> usize,
    vars: fn(usize) -> Vec<VarSpec>,
) -> Result<Vec<usize>, String> {
    let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default()).expect("a recipe");
    let ranks = run_ranks(&Cpu, 2, Duration::from_secs(60), |rank, comm| {
        let rounds = Arc::new(AtomicUsize::new(0));
        let comm: Arc<dyn Communicator<Cpu>> = Arc::new(Counted {
            comm,
            rounds: Arc::clone(&rounds),
        });
        let mesh = MeshComm::new(Mesh::sharded(2), comm)?;
        let before = rounds.load(Ordering::Relaxed);
        let linears = linears(blocks, rows(rank));
        let options = ModelOptions::default();
        ShardedModel::new(&Cpu, &mesh, |_| recipe, &linears, &vars(rank), options)?;
        Ok::<_, lowp_fsdp::ModelError>(rounds.load(Ordering::Relaxed) - before)
    });
    ranks.map_err(|failed| failed.cause.to_string())
}

#[test]
fn blocks_are_compared_in_one_round() {
    let none = |_| Vec::new();
    let of_two = made(2, |_| 128, none).expect("a model");
    assert_eq!(made(9, |_| 128, none).expect("a model"), of_two);
    assert!(of_two[0] > 0);
    let error = made(9, |rank| 128 + 64 * rank, none).expect_err("the last block differs");
    insta::assert_snapshot!(error);
}

/// Variables are compared with the blocks.
#[test]
fn variables_take_no_round_of_their_own() {
    let with = |vars| made(2, |_| 128, vars).expect("a model");
    let stays = with(|_| vars(1, VarUse::Throughout));
    assert_eq!(stays, with(|_| Vec::new()));
    assert_eq!(stays, with(|_| vars(3, VarUse::First)));
    let differs = |rank| vars(2 + rank, VarUse::First);
    let error = made(2, |_| 128, differs).expect_err("rank 1 has another variable");
    let place = "the gather plan of the variables that stay: ";
    assert!(error.contains(place), "{error}");
}
