//! Ranks that would gather different things: an error on all of them, and nobody waits.

use std::sync::Arc;

use crate::common::{Comm, Engine, failing, failing_on};
use lowp_comm::{Collective, CommError, Communicator, Control, Traffic};
use lowp_format::{AnyRecipe, Phase, Shape};
use lowp_kernels::Cpu;
use lowp_shard::{GatherGroup, GatherPool, ShardError, ShardSpec, ShardedTensor};

fn recipe_at(index: usize) -> AnyRecipe {
    AnyRecipe::low_precision()[index]
}

fn shard(recipe: AnyRecipe, shape: Shape, comm: &Comm) -> Result<ShardedTensor<Cpu>, ShardError> {
    let spec = ShardSpec::new(&recipe, shape, comm.world_size(), comm.rank())?;
    ShardedTensor::new(&Cpu, recipe, spec)
}

/// A rank whose rows alone were written: no rank gathers into a call of the others, none waits.
#[test]
fn ranks_that_disagree_on_what_is_stale_fail() {
    // What each rank wrote, and what it does after the first group.
    for (writes, then) in [
        ([0, 1, 0], "another gather"),
        ([1, 0, 1], "another gather"),
        ([0, 1, 0], "a stale gather"),
        ([1, 2, 1], "another gather"),
        ([0, 0, 1], "a barrier"),
    ] {
        for reshard in [true, false] {
            let failed = failing(3, |rank, comm| {
                let pool = GatherPool::new(&Cpu);
                let mut groups = Vec::new();
                for _ in 0..2 {
                    let shards = vec![shard(recipe_at(0), Shape::new(96, 32), &comm)?];
                    let comm = comm.clone();
                    groups.push(GatherGroup::new(&Cpu, comm, &pool, shards, reshard)?);
                }
                groups[0].unshard(Phase::Forward)?;
                if then == "a stale gather" {
                    groups[1].unshard(Phase::Forward)?;
                    groups[1].params()[0].begin_write();
                }
                for _ in 0..writes[rank] {
                    groups[0].params()[0].begin_write();
                }
                groups[0].unshard(Phase::Forward)?;
                if then != "a barrier" {
                    groups[1].unshard(Phase::Forward)?;
                }
                Ok(comm.control().barrier()?)
            });
            let what = (writes, then, reshard);
            let mismatch = matches!(failed.cause, ShardError::Comm(CommError::Mismatch { .. }));
            assert!(mismatch, "{what:?}: {}", failed.cause);
            let text = failed.cause.to_string();
            assert!(text.contains("gathered tensors are stale"), "{text}");
            assert!(failed.others.iter().all(|(_, r)| r.is_err()), "{what:?}");
        }
    }
}

/// A communicator that says that its calls are only enqueued, as those of GPUs are.
#[derive(Debug)]
struct Enqueued(Comm);

impl Communicator<Cpu> for Enqueued {
    fn control(&self) -> &dyn Control {
        self.0.control()
    }

    fn backend(&self) -> &Cpu {
        self.0.backend()
    }

    fn is_enqueued(&self) -> bool {
        true
    }

    fn enqueue(&self, _label: &str, batch: Collective<'_, Cpu>) -> Result<(), CommError> {
        self.0.enqueue("", batch)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<Cpu>>, CommError> {
        Ok(Arc::new(Self(self.0.split(color, key)?)))
    }

    fn count(&self, sent: Traffic) {
        self.0.count(sent);
    }

    fn traffic(&self) -> Traffic {
        self.0.traffic()
    }
}

/// Two groups of equal lengths; each rank gathers the group and the phase that `pick` says.
fn gather_equal_lengths(comm: &Comm, (group, phase): (usize, Phase)) -> Result<(), ShardError> {
    let pool = GatherPool::new(&Cpu);
    let mut groups = Vec::new();
    for _ in 0..2 {
        // The square shape gives both phases equal lengths.
        let shards = vec![shard(recipe_at(2), Shape::new(128, 128), comm)?];
        groups.push(GatherGroup::new(&Cpu, comm.clone(), &pool, shards, true)?);
    }
    groups[group].unshard(phase)
}

/// Equal lengths do not make two gathers the same.
#[test]
fn ranks_that_gather_other_groups_or_phases_fail() {
    let cases = [
        (
            [(0, Phase::Forward), (1, Phase::Forward)],
            ["group 0 for forward", "group 1 for forward"],
        ),
        (
            [(0, Phase::Forward), (0, Phase::Backward)],
            ["group 0 for forward", "group 0 for backward"],
        ),
        (
            [(1, Phase::Backward), (0, Phase::Backward)],
            ["group 1 for backward", "group 0 for backward"],
        ),
    ];
    for (picks, labels) in cases {
        for engine in Engine::ALL {
            let waits = failing_on(engine, 2, |rank, comm| {
                gather_equal_lengths(&comm, picks[rank])
            });
            let enqueues = failing_on(engine, 2, |rank, comm| {
                gather_equal_lengths(&(Arc::new(Enqueued(comm)) as Comm), picks[rank])
            });
            for failed in [waits, enqueues] {
                let text = failed.cause.to_string();
                assert!(
                    matches!(failed.cause, ShardError::Comm(CommError::Mismatch { .. })),
                    "{text}"
                );
                assert!(labels.iter().all(|label| text.contains(label)), "{text}");
            }
        }
    }
}
