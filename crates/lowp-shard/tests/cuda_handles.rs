//! Ranks with a stream each on one GPU: what a collective reads was written, and is read before it
//! changes, though nothing but the collective orders the streams. Without a GPU they pass, unless
//! `LOWP_REQUIRE_GPU` is set. Only with the feature `cuda`.
#![cfg(feature = "cuda")]

mod common;

use common::PATIENCE;
use lowp_kernels::{Backend, Cuda};
use lowp_shard::{GatherItem, GradWire, ReduceItem, ShardError, run_ranks_on};

const RANKS: usize = 3;
/// Bytes of a piece: a copy takes much longer than the call that starts it.
const LEN: usize = 1 << 26;
/// Copies that a rank's stream is behind when the collective begins.
const BEHIND: usize = 40;
const STEPS: usize = 4;

/// A stream for each rank.
fn handles() -> Option<Vec<Cuda>> {
    let fork = |cuda: Cuda| {
        (0..RANKS)
            .map(|_| cuda.fork())
            .collect::<Result<Vec<_>, _>>()
    };
    match Cuda::new(0).and_then(fork) {
        Ok(handles) => Some(handles),
        Err(error) if std::env::var_os("LOWP_REQUIRE_GPU").is_some() => {
            panic!("LOWP_REQUIRE_GPU is set, but {error}")
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

#[test]
fn cuda_gathers_follow_the_streams_of_all_ranks() {
    let Some(backends) = handles() else { return };
    let run = run_ranks_on(&backends, PATIENCE, |rank, comm| -> Result<_, ShardError> {
        let backend = &backends[rank];
        let ranges: Vec<_> = (0..RANKS).map(|r| r * LEN..(r + 1) * LEN).collect();
        let (source, dest) = (backend.alloc::<u8>(LEN)?, backend.alloc::<u8>(RANKS * LEN)?);
        let zeros = backend.alloc::<u8>(LEN)?;
        let mut seen = Vec::new();
        for step in 0..STEPS {
            let value = backend.upload(&vec![(10 * step + rank + 1) as u8; LEN])?;
            // The last of many copies is the one that counts.
            for _ in 0..BEHIND * (1 + rank) {
                backend.copy(&zeros, 0..LEN, &source, 0)?;
            }
            backend.copy(&value, 0..LEN, &source, 0)?;
            comm.all_gather(&[GatherItem {
                source: &source,
                dest: &dest,
                ranges: &ranges,
            }])?;
            // At once, while the others may not have copied.
            backend.clear(&source)?;
            let all = backend.download(&dest)?;
            let piece = |r: usize| {
                let first = all[r * LEN];
                (
                    first,
                    all[r * LEN..(r + 1) * LEN].iter().all(|&x| x == first),
                )
            };
            seen.push((0..RANKS).map(piece).collect::<Vec<_>>());
        }
        Ok(seen)
    });
    for seen in run.unwrap_or_else(|e| panic!("{e}")) {
        for (step, pieces) in seen.into_iter().enumerate() {
            let expected = (0..RANKS).map(|rank| ((10 * step + rank + 1) as u8, true));
            assert_eq!(pieces, expected.collect::<Vec<_>>(), "step {step}");
        }
    }
}

#[test]
fn cuda_reductions_follow_the_streams_of_all_ranks() {
    let Some(backends) = handles() else { return };
    let len = LEN / 16;
    let run = run_ranks_on(&backends, PATIENCE, |rank, comm| -> Result<_, ShardError> {
        let backend = &backends[rank];
        let ranges: Vec<_> = (0..RANKS).map(|r| r * len..(r + 1) * len).collect();
        let value = backend.upload(&vec![rank as f32 + 1.0; RANKS * len])?;
        let zeros = backend.alloc::<f32>(RANKS * len)?;
        let [grad, most] = [(); 2].map(|()| backend.alloc::<f32>(RANKS * len));
        let (grad, most, out) = (grad?, most?, backend.alloc::<f32>(len)?);
        for to in [&grad, &most] {
            for _ in 0..BEHIND * (1 + rank) {
                backend.copy(&zeros, 0..RANKS * len, to, 0)?;
            }
            backend.copy(&value, 0..RANKS * len, to, 0)?;
        }
        let item = ReduceItem {
            grad: &grad,
            ranges: &ranges,
            out: &out,
            accumulate: false,
        };
        comm.reduce_scatter(&[item], GradWire::F32)?;
        backend.clear(&grad)?;
        comm.all_reduce_max(&most)?;
        Ok([backend.download(&out)?, backend.download(&most)?])
    });
    for [out, most] in run.unwrap_or_else(|e| panic!("{e}")) {
        assert!(out.iter().all(|&x| x == 6.0));
        assert!(most.iter().all(|&x| x == 3.0));
    }
}
