//! NCCL between GPUs, against the definition: content, order of sums, a training step, and failure. Most tests need two GPUs and
//! NCCL; elsewhere they pass, unless `LOWP_REQUIRE_GPUS` names a number of GPUs that must be there. Only with the feature
//! `cuda`.
#![cfg(feature = "cuda")]

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::{Rank, alone_and_together, bytes, tiling, values, world};
use half::bf16;
use lowp_kernels::{Backend, FloatDtype, Source};
use lowp_nccl::Sums;
use lowp_shard::{GatherItem, GradWire, ReduceItem, ShardError, ordered};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn cuda_nccl_gathers_even_uneven_and_empty_pieces() {
    let lens: [[usize; 8]; 5] = [
        [64; 8],
        [100, 7, 0, 3, 1, 50, 2, 9],
        [0, 5, 5, 5, 5, 5, 5, 5],
        [0; 8],
        [1 << 20; 8],
    ];
    alone_and_together(LIMIT, Sums::Nccl, |rank| {
        let (cuda, comm) = (&rank.cuda, &*rank.comm);
        let (me, n) = (comm.rank(), comm.world_size());
        let full = |item: usize| bytes(item as u64, lens[item][..n].iter().sum());
        let mut items = Vec::new();
        for (item, lens) in lens.iter().enumerate() {
            let ranges = tiling(&lens[..n]);
            let source = cuda.upload(&full(item)[ranges[me].clone()])?;
            let dest = cuda.alloc::<u8>(full(item).len())?;
            items.push((source, dest, ranges));
        }
        let batch: Vec<_> = items
            .iter()
            .map(|(source, dest, ranges)| GatherItem {
                source,
                dest,
                ranges,
            })
            .collect();
        ordered(cuda, comm, || comm.all_gather(&batch))?;
        for (item, (_, dest, _)) in items.iter().enumerate() {
            assert!(cuda.download(dest)? == full(item), "item {item}");
        }
        let own: usize = lens.iter().map(|lens| lens[me]).sum();
        assert_eq!(comm.traffic().all_gather_bytes, own as u64);
        Ok(())
    });
}

#[test]
fn cuda_nccl_sums_are_those_of_the_definition() {
    for sums in [Sums::Nccl, Sums::RankOrder] {
        alone_and_together(LIMIT, sums, |rank| {
            for lens in [vec![5000; 8], vec![70_000, 3, 0, 1, 9, 8, 7, 6]] {
                for wire in [GradWire::F32, GradWire::Bf16] {
                    for accumulate in [false, true] {
                        // Twice: planned, and from the plan.
                        for round in 0..2 {
                            for dtype in [FloatDtype::F32, FloatDtype::Bf16] {
                                let travel = (wire, dtype, accumulate);
                                reduce_scatter(rank, sums, &lens, travel, round)?;
                            }
                        }
                    }
                }
            }
            let (cuda, comm) = (&rank.cuda, &*rank.comm);
            let n = comm.world_size() as u64;
            let sum = cuda.upload(&values(comm.rank() as u64, 333))?;
            ordered(cuda, comm, || comm.all_reduce_sum(&sum))?;
            let expected = |i: usize| (1..n).fold(values(0, 333)[i], |s, r| s + values(r, 333)[i]);
            for (i, x) in cuda.download(&sum)?.into_iter().enumerate() {
                check(x, expected(i), sums == Sums::RankOrder || n <= 2);
            }
            let max = cuda.upload(&values(comm.rank() as u64, 333))?;
            ordered(cuda, comm, || comm.all_reduce_max(&max))?;
            let most = |i: usize| (1..n).fold(values(0, 333)[i], |s, r| s.max(values(r, 333)[i]));
            for (i, x) in cuda.download(&max)?.into_iter().enumerate() {
                check(x, most(i), true);
            }
            Ok(())
        });
    }
}

fn check(found: f32, expected: f32, exact: bool) {
    if exact {
        assert_eq!(found.to_bits(), expected.to_bits());
    } else {
        assert!((found - expected).abs() <= 1e-5, "{found} {expected}");
    }
}

fn reduce_scatter(
    rank: &Rank,
    sums: Sums,
    lens: &[usize],
    (wire, dtype, accumulate): (GradWire, FloatDtype, bool),
    round: u64,
) -> Result<(), ShardError> {
    let (cuda, comm) = (&rank.cuda, &*rank.comm);
    let (me, n) = (comm.rank(), comm.world_size());
    let ranges = tiling(&lens[..n]);
    let len: usize = lens[..n].iter().sum();
    let grad = |rank: usize| values(10 * round + rank as u64, len);
    let before = values(100 + me as u64, lens[me]);
    let full = Source::alloc(cuda, dtype, len)?;
    full.write(cuda, 0, &grad(me))?;
    let out = cuda.upload(&before)?;
    let item = ReduceItem {
        grad: &full,
        ranges: &ranges,
        out: &out,
        accumulate,
    };
    ordered(cuda, comm, || comm.reduce_scatter(&[item], wire))?;
    let all: Vec<Vec<f32>> = (0..n).map(grad).collect();
    let narrow = wire == GradWire::Bf16 || dtype == FloatDtype::Bf16;
    let wired = |r: usize, i: usize| match narrow {
        false => all[r][i],
        true => bf16::from_f32(all[r][i]).to_f32(),
    };
    // Two values have one sum, and one is its own.
    let exact = n <= 2 || sums == Sums::RankOrder || narrow;
    for (j, (x, i)) in cuda
        .download(&out)?
        .into_iter()
        .zip(ranges[me].clone())
        .enumerate()
    {
        let sum = (1..n).fold(wired(0, i), |sum, r| sum + wired(r, i));
        check(x, if accumulate { before[j] + sum } else { sum }, exact);
    }
    Ok(())
}

#[test]
fn cuda_nccl_groups_of_groups() {
    world(2, LIMIT, Sums::Nccl, |rank| {
        let (cuda, comm) = (&rank.cuda, &*rank.comm);
        let n = comm.world_size();
        let reversed = comm.split(0, n - comm.rank())?;
        assert_eq!(reversed.rank(), n - 1 - comm.rank());
        let alone = comm.split(comm.rank(), 0)?;
        assert_eq!(alone.world_size(), 1);
        for comm in [&*reversed, &*alone] {
            let source = cuda.upload(&[comm.rank() as u8; 3])?;
            let dest = cuda.alloc::<u8>(3 * comm.world_size())?;
            let ranges = tiling(&vec![3; comm.world_size()]);
            let item = GatherItem {
                source: &source,
                dest: &dest,
                ranges: &ranges,
            };
            ordered(cuda, comm, || comm.all_gather(&[item]))?;
            let expected: Vec<u8> = (0..comm.world_size()).flat_map(|r| [r as u8; 3]).collect();
            assert_eq!(cuda.download(&dest)?, expected);
        }
        Ok(())
    });
}

/// A gather that one rank does not take part in is done on no rank, and the host of the others waits for it on the device.
#[test]
fn cuda_nccl_ends_everywhere_when_a_rank_fails() {
    for how in ["error", "panic", "hang"] {
        let limit = if how == "hang" {
            Duration::from_secs(3)
        } else {
            LIMIT
        };
        let begun = Instant::now();
        let failed = common::failing(2, limit, Sums::Nccl, |rank| {
            let (cuda, comm) = (&rank.cuda, &*rank.comm);
            let n = comm.world_size();
            let len = 1 << 22;
            let (source, dest) = (cuda.alloc::<u8>(len)?, cuda.alloc::<u8>(n * len)?);
            let ranges = tiling(&vec![len; n]);
            let gather = || {
                ordered(cuda, comm, || {
                    comm.all_gather(&[GatherItem {
                        source: &source,
                        dest: &dest,
                        ranges: &ranges,
                    }])
                })
            };
            gather()?;
            cuda.synchronize()?;
            if comm.rank() == n - 1 {
                thread::sleep(Duration::from_millis(300));
                match how {
                    "error" => {
                        return Err(ShardError::BadMesh {
                            text: "planted".into(),
                        });
                    }
                    "panic" => panic!("planted"),
                    _ => thread::sleep(Duration::from_secs(8)),
                }
            }
            gather()?;
            cuda.synchronize()?;
            gather()
        });
        let Some(failed) = failed else { return };
        let text = failed.to_string();
        let expected = if how == "hang" {
            "all_gather is not done after 3."
        } else {
            "planted"
        };
        assert!(text.contains(expected), "{how}: {text}");
        assert!(
            failed.others.iter().all(|(_, result)| result.is_err()),
            "{how}"
        );
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{how}: {:?}",
            begun.elapsed()
        );
    }
}
