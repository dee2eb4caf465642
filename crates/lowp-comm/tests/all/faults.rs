//! Random faults at random places: none hangs, and none goes unnoticed.

use std::sync::Arc;
use std::time::Instant;

use crate::common::{Comm, PATIENCE};
use lowp_comm::{CommError, run_ranks};
use lowp_kernels::{Backend, Cpu};
use proptest::prelude::*;

/// How a rank misbehaves.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Panic,
    Error,
    Return,
    Abort,
    OtherCall,
}

fn one_call(comm: &Comm, call: usize) -> Result<(), CommError> {
    match call % 4 {
        0 => comm.control().barrier(),
        1 => comm.control().all_equal("it", "same"),
        2 => comm.control().sum(&mut [1.0, 2.0]),
        _ => comm.all_reduce_max(&Cpu.upload(&[1.0])?),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn no_fault_hangs_and_none_goes_unnoticed(
        world in 2usize..=6,
        culprit in 0usize..6,
        at in 0usize..8,
        grouped: bool,
        fault in prop::sample::select(vec![
            Fault::Panic, Fault::Error, Fault::Return, Fault::Abort, Fault::OtherCall,
        ]),
    ) {
        let culprit = culprit % world;
        let started = Instant::now();
        // Ranks that wait for each other in different groups are found by the time limit only.
        let crossed = grouped && matches!(fault, Fault::OtherCall);
        let limit = if crossed { PATIENCE / 300 } else { PATIENCE };
        let result = run_ranks(&Cpu, world, limit, |rank, comm| {
            let group = if grouped { comm.split(rank % 2, rank)? } else { Arc::clone(&comm) };
            for call in 0..8 {
                if (rank, call) == (culprit, at) {
                    match fault {
                        Fault::Panic => panic!("planted"),
                        Fault::Error => return Err(CommError::BadMesh { text: "planted".into() }),
                        Fault::Return => return Ok(()),
                        Fault::Abort => comm.control().abort("planted"),
                        Fault::OtherCall => comm.control().all_equal("something else", "planted")?,
                    }
                }
                one_call(if call % 2 == 0 { &comm } else { &group }, call)?;
            }
            comm.control().barrier()
        });
        prop_assert!(started.elapsed() < PATIENCE / 2);
        let failed = result.expect_err("a fault was planted");
        // Whoever returned did so only because it was the one that left early.
        for (rank, result) in &failed.others {
            prop_assert!(result.is_err() || *rank == culprit, "rank {} {:?}", rank, result);
        }
        if matches!(fault, Fault::Panic | Fault::Error) {
            prop_assert_eq!(failed.rank, culprit);
        }
    }
}
