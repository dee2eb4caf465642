//! A rank that fails, departs, differs or does not come is an error on every rank, never a hang.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::{self, Comm, Engine, PATIENCE, failing_on};
use lowp_comm::{CommError, Departure, GatherItem, GradWire, ReduceItem};
use lowp_kernels::{Backend, Cpu, Source};

/// Runs `f` on every rank without the harness; returns what each rank got.
fn bare<T: Send>(
    engine: Engine,
    world: usize,
    timeout: Duration,
    f: impl Fn(usize, Comm) -> T + Sync,
) -> Vec<Option<T>> {
    let world = engine.world(world, timeout);
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = world
            .into_iter()
            .enumerate()
            .map(|(rank, comm)| scope.spawn(move || f(rank, comm)))
            .collect();
        threads.into_iter().map(|t| t.join().ok()).collect()
    })
}

/// Expects the same mismatch on every rank, now and ever after.
fn mismatch(engine: Engine, f: impl Fn(usize, &Comm) -> Result<(), CommError> + Sync) -> String {
    let errors = bare(engine, 3, PATIENCE, |rank, comm| {
        let first = f(rank, &comm).expect_err("the ranks differ");
        let later = comm.control().barrier().expect_err("the world has failed");
        assert_eq!(first, later);
        first
    });
    let errors: Vec<CommError> = errors.into_iter().flatten().collect();
    assert_eq!(errors.len(), 3);
    assert!(errors.iter().all(|e| *e == errors[0]), "{errors:?}");
    assert!(
        matches!(errors[0], CommError::Mismatch { .. }),
        "{:?}",
        errors[0]
    );
    errors[0].to_string()
}

/// As a thread does that watches the operations of a device.
#[test]
fn who_looks_for_failures_takes_no_answer() {
    for engine in Engine::ALL {
        let ran =
            engine.run(3, |_, comm| {
                let (control, done) = (comm.control(), AtomicBool::new(false));
                thread::scope(|scope| {
                    scope.spawn(|| {
                        while control.failure().is_none() && !done.load(Ordering::Relaxed) {}
                    });
                    let called = (0..500).try_for_each(|_| control.barrier());
                    done.store(true, Ordering::Relaxed);
                    called
                })
            });
        ran.expect("a world in peace");
    }
}

#[test]
fn different_calls_are_named() {
    for engine in Engine::ALL {
        let text = mismatch(engine, |rank, comm| match rank {
            1 => comm.control().sum(&mut [1.0]),
            _ => comm.control().barrier(),
        });
        assert!(text.contains("ranks [0, 2]: barrier"), "{text}");
        assert!(text.contains("ranks [1]: sum of 1 values"), "{text}");
    }
}

#[test]
fn different_lengths_are_named() {
    for engine in Engine::ALL {
        let cpu = Cpu;
        let text = mismatch(engine, |rank, comm| {
            let lens = if rank == 2 { [4, 5, 7] } else { [4, 5, 6] };
            let source = cpu.alloc(lens[rank])?;
            let dest = cpu.alloc(20)?;
            let ranges = common::tiling(&lens);
            comm.all_gather(&[GatherItem {
                source: &source,
                dest: &dest,
                ranges: &ranges,
            }])
        });
        assert!(
            text.contains("[4, 5, 7]") && text.contains("[4, 5, 6]"),
            "{text}"
        );
    }
}

#[test]
fn different_wires_batches_and_texts_are_named() {
    for engine in Engine::ALL {
        let cpu = Cpu;
        let text = mismatch(engine, |rank, comm| {
            let wire = if rank == 0 {
                GradWire::F32
            } else {
                GradWire::Bf16
            };
            comm.reduce_scatter(&[], wire)
        });
        assert!(
            text.contains("f32 wire") && text.contains("bf16 wire"),
            "{text}"
        );
        let text = mismatch(engine, |rank, comm| {
            let (grad, out) = (cpu.alloc(3)?, cpu.alloc(1)?);
            let ranges = common::tiling(&[1, 1, 1]);
            let item = ReduceItem {
                grad: &Source::F32(grad),
                memory: 0,
                ranges: &ranges,
                out: &out,
                accumulate: false,
            };
            comm.reduce_scatter(&vec![item; 1 + rank], GradWire::F32)
        });
        assert!(
            text.contains("of 1 items") && text.contains("of 3 items"),
            "{text}"
        );
        let text = mismatch(engine, |rank, comm| {
            comm.control()
                .all_equal(["plan", "plan", "mesh"][rank], "same")
        });
        assert!(
            text.contains("agree on plan") && text.contains("agree on mesh"),
            "{text}"
        );
        let common = "x".repeat(500);
        let text = mismatch(engine, |rank, comm| {
            comm.control()
                .all_equal("the plan", &format!("{common} {}", rank / 2))
        });
        assert!(text.contains("disagree on the plan"), "{text}");
        assert!(
            text.contains("x 0; ranks [2]: ..x") && text.len() < 400,
            "{text}"
        );
    }
}

#[test]
fn equal_descriptions_agree() {
    common::ranks(4, |_, comm| comm.control().all_equal("the plan", "same"));
}

#[test]
fn a_panic_is_the_root_cause_on_every_rank() {
    for engine in Engine::ALL {
        let failed = failing_on(engine, 4, |rank, comm| {
            comm.control().barrier()?;
            assert!(rank != 2, "planted");
            comm.control().barrier()
        });
        assert_eq!(failed.rank, 2);
        assert!(
            failed.cause.to_string().contains("planted"),
            "{}",
            failed.cause
        );
        assert_eq!(failed.others.len(), 3);
        for (rank, result) in failed.others {
            let message = match result {
                Err(CommError::Failed { rank: 2, message }) => message,
                other => panic!("rank {rank}: {other:?}"),
            };
            assert_eq!(message, "panicked: planted");
        }
    }
}

#[test]
fn an_error_of_one_rank_reaches_all_and_stays() {
    for engine in Engine::ALL {
        let failed = failing_on(engine, 3, |rank, comm| {
            comm.control().barrier()?;
            if rank == 1 {
                return Err(CommError::BadMesh {
                    text: "planted".into(),
                });
            }
            let first = comm.control().barrier();
            assert_eq!(first, comm.control().sum(&mut [0.0]));
            first
        });
        assert_eq!(
            (
                failed.rank,
                matches!(failed.cause, CommError::BadMesh { .. })
            ),
            (1, true)
        );
        for (_, result) in failed.others {
            assert!(
                matches!(result, Err(CommError::Failed { rank: 1, .. })),
                "{result:?}"
            );
        }
    }
}

#[test]
fn an_early_return_is_a_departure() {
    for engine in Engine::ALL {
        let failed = failing_on(engine, 3, |rank, comm| {
            if rank == 0 {
                Ok(())
            } else {
                comm.control().barrier()
            }
        });
        assert!(matches!(
            failed.cause,
            CommError::Departed {
                rank: 0,
                how: Departure::Dropped,
                ..
            }
        ));
        assert!(
            failed
                .cause
                .to_string()
                .contains("barrier: rank 0 dropped its communicator")
        );
    }
}

#[test]
fn a_bare_thread_that_panics_is_a_departure() {
    for engine in Engine::ALL {
        let results = bare(engine, 3, PATIENCE, |rank, comm| {
            assert!(rank != 1, "planted");
            comm.control().barrier()
        });
        for rank in [0, 2] {
            let gone = Some(Err(CommError::Departed {
                op: "barrier".into(),
                rank: 1,
                how: Departure::Panicked,
            }));
            assert_eq!(results[rank], gone);
        }
    }
}

#[test]
fn finishing_last_calls_is_no_departure() {
    for engine in Engine::ALL {
        for _ in 0..200 {
            let results = bare(engine, 4, PATIENCE, |_, comm| comm.control().barrier());
            assert!(results.iter().all(|r| *r == Some(Ok(()))), "{results:?}");
        }
    }
}

#[test]
fn abort_wakes_ranks_that_wait() {
    for engine in Engine::ALL {
        let results = bare(engine, 3, PATIENCE, |rank, comm| {
            if rank == 2 {
                thread::sleep(Duration::from_millis(20));
                comm.control().abort("out of memory");
            }
            comm.control().barrier()
        });
        for result in results {
            let failed = CommError::Failed {
                rank: 2,
                message: "out of memory".into(),
            };
            assert_eq!(result, Some(Err(failed)));
        }
    }
}

#[test]
fn a_stuck_rank_is_a_timeout_that_names_it() {
    for engine in Engine::ALL {
        let stuck = Barrier::new(3);
        // All meet within it, too.
        let limit = Duration::from_millis(250);
        let results = bare(engine, 3, limit, |rank, comm| {
            let result = if rank == 1 {
                Ok(())
            } else {
                comm.control().barrier()
            };
            // Rank 1 stays alive until the others gave up, and hears of it then.
            stuck.wait();
            if rank == 1 {
                comm.control().barrier()
            } else {
                result
            }
        });
        let mut timeouts = 0;
        for result in results.into_iter().flatten() {
            match result {
                Err(CommError::Timeout {
                    op,
                    waited_s,
                    missing,
                    elsewhere,
                }) => {
                    assert_eq!(&*op, "barrier");
                    assert!(elsewhere.is_empty());
                    assert!(waited_s >= limit.as_secs_f64());
                    assert_eq!(missing, [1]);
                    timeouts += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(timeouts, 3);
    }
}

#[test]
fn a_failure_reaches_ranks_that_wait_in_another_group() {
    for engine in Engine::ALL {
        let failed = failing_on(engine, 4, |rank, comm| {
            let group = comm.split(rank / 2, rank)?;
            match rank {
                // Ranks 0 and 1 wait in the world, rank 2 in its group, rank 3 fails.
                3 => Err(CommError::BadMesh {
                    text: "planted".into(),
                }),
                _ => group
                    .control()
                    .barrier()
                    .and_then(|()| comm.control().barrier()),
            }
        });
        assert_eq!(failed.rank, 3);
        assert!(failed.others.iter().all(|(_, r)| r.is_err()));
    }
}

#[test]
fn wrong_items_are_rejected_and_reach_the_others() {
    for engine in Engine::ALL {
        let failed = failing_on(engine, 2, |rank, comm| {
            let cpu = Cpu;
            let (source, dest) = (cpu.alloc(if rank == 0 { 4 } else { 3 })?, cpu.alloc(8)?);
            let ranges = [0..4, 4..8];
            comm.all_gather(&[GatherItem {
                source: &source,
                dest: &dest,
                ranges: &ranges,
            }])
        });
        assert_eq!(failed.rank, 1);
        let text = failed.cause.to_string();
        assert_eq!(
            text,
            "all_gather, item 0: the source holds 3 entries, but the ranges need 4"
        );
        let failed = failing_on(engine, 2, |_, comm| {
            let cpu = Cpu;
            let (buffer, ranges) = (cpu.alloc(4)?, common::tiling(&[4]));
            comm.all_gather(&[GatherItem {
                source: &buffer,
                dest: &buffer,
                ranges: &ranges,
            }])
        });
        assert!(matches!(
            failed.cause,
            CommError::World {
                found: 1,
                world: 2,
                ..
            }
        ));
    }
}

#[test]
fn a_destination_that_is_too_short_fails_everywhere() {
    for engine in Engine::ALL {
        let failed = failing_on(engine, 2, |rank, comm| {
            let cpu = Cpu;
            let (source, dest) = (cpu.alloc(4)?, cpu.alloc(if rank == 0 { 7 } else { 8 })?);
            comm.all_gather(&[GatherItem {
                source: &source,
                dest: &dest,
                ranges: &[0..4, 4..8],
            }])
        });
        assert_eq!(failed.rank, 0);
        assert!(
            matches!(
                failed.cause,
                CommError::ItemLength {
                    what: "the destination",
                    needed: 8,
                    found: 7,
                    ..
                }
            ),
            "{}",
            failed.cause
        );
        assert!(failed.others.iter().all(|(_, r)| r.is_err()));
    }
}

#[test]
fn a_timeout_says_where_the_missing_ranks_wait() {
    for engine in Engine::ALL {
        let gave_up = Barrier::new(4);
        let results = bare(engine, 4, Duration::from_millis(400), |rank, comm| {
            let pair = comm.split(rank / 2, rank)?;
            let result = match rank {
                // Later than the others, by more than the time between two looks at who waits: one of those gives up first.
                0 => {
                    thread::sleep(Duration::from_millis(250));
                    pair.control().barrier()
                }
                1 => Ok(()),
                _ => comm.control().barrier(),
            };
            // Rank 1 stays alive until the others gave up, and hears of it then.
            gave_up.wait();
            if rank == 1 {
                comm.control().barrier()
            } else {
                result
            }
        });
        let errors: Vec<String> = results
            .into_iter()
            .flatten()
            .filter_map(|r| Some(r.err()?.to_string()))
            .collect();
        assert_eq!(errors.len(), 4);
        let place = "rank 0 waits in barrier with ranks [0, 1]";
        assert!(errors[0].contains(place), "{}", errors[0]);
    }
}
