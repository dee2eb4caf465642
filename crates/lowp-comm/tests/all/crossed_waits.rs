//! Ranks that wait for each other in different groups are an error at once; no legal order of
//! calls is one.

use std::thread;
use std::time::{Duration, Instant};

use crate::common::{Comm, PATIENCE, bytes, failing, ranks};
use lowp_comm::{CommError, Mesh, MeshComm};
use lowp_kernels::{Backend, Cpu};

/// Expects the same mismatch on every rank, long before the time limit.
fn crossed(world: usize, f: impl Fn(usize, Comm) -> Result<(), CommError> + Sync) -> String {
    let began = Instant::now();
    let failed = failing(world, f);
    assert!(began.elapsed() < PATIENCE / 4, "{:?}", began.elapsed());
    let cause = failed.cause;
    assert!(matches!(cause, CommError::Mismatch { .. }), "{cause}");
    for (rank, result) in failed.others {
        assert_eq!(result.err().as_ref(), Some(&cause), "rank {rank}");
    }
    cause.to_string()
}

#[test]
fn a_group_and_the_world() {
    for late in [0, 1] {
        let text = crossed(2, |rank, comm| {
            let group = comm.split(0, rank)?;
            let values = Cpu.alloc::<f32>(3)?;
            if rank == late {
                thread::sleep(Duration::from_millis(20));
            }
            match rank {
                0 => group.control().all_equal("the plan", "same"),
                _ => comm.all_reduce_max(&values),
            }
        });
        for part in [
            "rank 0 waits in agree on the plan with ranks [0, 1]",
            "rank 1 waits in all_reduce_max of 1 items, 1 piece lengths [3] with ranks [0, 1]",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}

/// Ranks that do not wait for each other directly, and one that is no part of it.
#[test]
fn a_ring_of_pairs() {
    let text = crossed(4, |rank, comm| {
        let mut pairs = Vec::new();
        for first in 0..3 {
            let inside = rank == first || rank == (first + 1) % 3;
            pairs.push(comm.split(usize::from(inside), rank)?);
        }
        match rank {
            3 => comm.control().barrier(),
            _ => pairs[rank].control().barrier(),
        }
    });
    for pair in [[0, 1], [1, 2], [0, 2]] {
        let part = format!("waits in barrier with ranks {pair:?}");
        assert!(text.contains(&part), "{text}");
    }
    assert!(!text.contains("rank 3"), "{text}");
}

/// Every rank makes its calls in the order of a common program, but pairs make different numbers
/// of calls of their own in between, and every rank lags as it likes.
#[test]
fn legal_orders_pass() {
    const ROUNDS: usize = 400;
    let mesh = Mesh {
        replicate: 2,
        shard: 2,
    };
    let program = bytes(7, 2 * ROUNDS);
    ranks(mesh.world(), |rank, comm| {
        let groups = MeshComm::new(mesh, comm.clone())?;
        let (replica, column) = mesh.coordinates(rank)?;
        let groups = [(groups.shard, replica), (groups.replicate, column)];
        let values = Cpu.alloc::<f32>(4)?;
        let mut lags = bytes(100 + rank as u64, 16 * ROUNDS).into_iter();
        let mut lag = || match lags.next() {
            Some(lag) if lag % 4 == 0 => thread::sleep(Duration::from_micros(u64::from(lag))),
            _ => thread::yield_now(),
        };
        for step in program.chunks(2) {
            let (group, which) = &groups[usize::from(step[0]) % 2];
            for _ in 0..(usize::from(step[0] / 2) + which) % 3 {
                lag();
                group.all_reduce_max(&values)?;
            }
            lag();
            match step[1] % 5 {
                0 => comm.control().barrier()?,
                1 => comm.all_reduce_max(&values)?,
                2 => group.control().all_equal("the step", "same")?,
                3 => group.split(0, rank)?.control().barrier()?,
                _ => comm.split(rank % 2, rank)?.all_reduce_sum(&values)?,
            }
        }
        Ok(())
    });
}

/// A second thread of a rank that waits does not come in its place.
#[test]
fn threads_of_a_rank_take_turns() {
    let text = crossed(2, |rank, comm| {
        let group = comm.split(0, rank)?;
        if rank == 1 {
            thread::sleep(Duration::from_millis(100));
            return comm.control().barrier();
        }
        thread::scope(|scope| {
            let first = scope.spawn(|| group.control().barrier());
            thread::sleep(Duration::from_millis(20));
            let second = comm.control().barrier();
            second.and(first.join().expect("no panic"))
        })
    });
    assert!(text.contains("rank 0 waits in barrier"), "{text}");
}
