//! NCCL between GPUs, against the definition: content, order of sums, a training step, and failure. Most tests need two GPUs and
//! NCCL; elsewhere they pass, unless `LOWP_REQUIRE_GPUS` names a number of GPUs that must be there. Only with the feature
//! `cuda`.

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{self, Rank, alone_and_together, bytes, tiling, values, world};
use half::bf16;
use lowp_comm::{
    Adder, CommError, Communicator, Control, GatherItem, GradWire, ReduceItem, Traffic, UnevenRun,
    ordered, spanned, threads,
};
use lowp_kernels::{Backend, Cuda, FloatDtype, Source};
use lowp_nccl::{NcclComm, NcclOptions, Sums};
use lowp_shard::ShardError;

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

/// Everyone who adds gradients.
const SUMS: [Sums; 3] = [Sums::Peers, Sums::Nccl, Sums::RankOrder];

#[test]
fn cuda_nccl_sums_are_those_of_the_definition() {
    for sums in SUMS {
        alone_and_together(LIMIT, sums, |rank| {
            for lens in [vec![5000; 8], vec![70_000, 3, 0, 1, 9, 8, 7, 6]] {
                for wire in [GradWire::F32, GradWire::Bf16] {
                    for accumulate in [false, true] {
                        for dtype in [FloatDtype::F32, FloatDtype::Bf16] {
                            let travel = (wire, dtype, accumulate);
                            let ranges = tiling(&lens[..rank.comm.world_size()]);
                            reduce_scatter(rank, sums, &[ranges], &[travel], Memory::OfEach)?;
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

/// How a gradient travels, its dtype, and whether the sum is added to what is there.
type Travel = (GradWire, FloatDtype, bool);

/// Where the gradients of a batch lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    OfEach,
    OfAll,
}

/// What a reduce-scatter counts, by the plan.
fn traffic(
    sums: Sums,
    items: &[ReduceItem<'_, Cuda>],
    wire: GradWire,
    [rank, world]: [usize; 2],
) -> Traffic {
    let is_wide = |item: &ReduceItem<'_, Cuda>| item.wire(wire) == GradWire::F32;
    let adder = match sums {
        Sums::Peers if world > 1 => Adder::Reader,
        Sums::Nccl | Sums::Peers if items.iter().all(is_wide) => Adder::Library,
        _ => Adder::Receiver,
    };
    let places = items.iter().map(|item| (item.memory, item.ranges));
    let runs = UnevenRun::find(&places.collect::<Vec<_>>(), world, adder);
    let on_wire = items
        .iter()
        .map(|item| (item.ranges, item.wire(wire).bytes()));
    Traffic::of_reduction(&on_wire.collect::<Vec<_>>(), &runs, rank)
}

/// A batch of gradients with these ranges, planned, from the plan, and as a graph.
fn reduce_scatter(
    rank: &Rank,
    sums: Sums,
    ranges: &[Vec<Range<usize>>],
    travels: &[Travel],
    memory: Memory,
) -> Result<(), ShardError> {
    let (cuda, comm) = (&rank.cuda, &*rank.comm);
    let (me, n) = (comm.rank(), comm.world_size());
    let end = |ranges: &[Range<usize>]| ranges.iter().map(|range| range.end).max().unwrap_or(0);
    let mut buffers = Vec::new();
    let last = ranges.iter().map(|ranges| end(ranges)).max().unwrap_or(0);
    let shared = Source::alloc(cuda, travels[0].1, last)?;
    for (ranges, (_, dtype, _)) in ranges.iter().zip(travels) {
        let full = match memory {
            Memory::OfEach => Source::alloc(cuda, *dtype, end(ranges))?,
            Memory::OfAll => shared.clone(),
        };
        buffers.push((full, cuda.alloc::<f32>(ranges[me].len())?));
    }
    let mut items = Vec::new();
    for ((ranges, (_, _, accumulate)), (grad, out)) in ranges.iter().zip(travels).zip(&buffers) {
        items.push(ReduceItem {
            grad,
            memory: match memory {
                Memory::OfEach => items.len(),
                Memory::OfAll => 0,
            },
            ranges,
            out,
            accumulate: *accumulate,
        });
    }
    let (wire, ..) = travels[0];
    let mut graph = None;
    let (sent, counted) = (traffic(sums, &items, wire, [me, n]), comm.traffic());
    for round in 0..4 {
        let grad = |item: usize, rank: usize| {
            values((100 * item + 10 * round + rank) as u64, end(&ranges[item]))
        };
        let before =
            |item: usize| values((1000 + 10 * round + item) as u64, ranges[item][me].len());
        for (item, (full, out)) in buffers.iter().enumerate() {
            let start = match memory {
                Memory::OfEach => 0,
                Memory::OfAll => spanned(&ranges[item]).start,
            };
            full.write(cuda, start, &grad(item, me)[start..])?;
            cuda.write(out, 0, &before(item))?;
        }
        match (round, &graph) {
            (0 | 1, _) => ordered(cuda, comm, || comm.reduce_scatter(&items, wire))?,
            (_, None) => {
                let made = comm
                    .backend()
                    .capture(|| comm.reduce_scatter(&items, wire))?;
                ordered(cuda, comm, || Ok(comm.backend().launch(&made)?))?;
                graph = Some(made);
            }
            (_, Some(graph)) => ordered(cuda, comm, || Ok(comm.backend().launch(graph)?))?,
        }
        if round == 0 {
            assert_eq!(comm.traffic().since(counted), sent);
        }
        for (item, (_, dtype, accumulate)) in travels.iter().enumerate() {
            let all: Vec<Vec<f32>> = (0..n).map(|rank| grad(item, rank)).collect();
            let narrow = wire == GradWire::Bf16 || *dtype == FloatDtype::Bf16;
            let wired = |r: usize, i: usize| match narrow {
                false => all[r][i],
                true => bf16::from_f32(all[r][i]).to_f32(),
            };
            // Two values have one sum, and one is its own.
            let exact = n <= 2 || sums != Sums::Nccl || narrow;
            let (found, before) = (cuda.download(&buffers[item].1)?, before(item));
            for (j, (x, i)) in found.into_iter().zip(ranges[item][me].clone()).enumerate() {
                let sum = (1..n).fold(wired(0, i), |sum, r| sum + wired(r, i));
                check(x, if *accumulate { before[j] + sum } else { sum }, exact);
            }
        }
    }
    Ok(())
}

/// Gradients of every kind in one batch, whose ranges begin after others' elements.
#[test]
fn cuda_nccl_batches_of_many_kinds() {
    for sums in SUMS {
        alone_and_together(LIMIT, sums, |rank| {
            let n = rank.comm.world_size();
            let gaps = |first: usize, len: usize| -> Vec<Range<usize>> {
                let start = |rank: usize| first + rank * (len + 3);
                (0..n).map(|rank| start(rank)..start(rank) + len).collect()
            };
            let ranges = [
                gaps(5, 4000),
                gaps(0, 1),
                gaps(33, 517),
                gaps(16, 70_000),
                gaps(1, 64),
            ];
            for wire in [GradWire::F32, GradWire::Bf16] {
                let (wide, narrow) = (FloatDtype::F32, FloatDtype::Bf16);
                let kinds = [
                    (wide, true),
                    (wide, false),
                    (narrow, true),
                    (wide, true),
                    (narrow, false),
                ];
                let travels = kinds.map(|(dtype, accumulate)| (wire, dtype, accumulate));
                reduce_scatter(rank, sums, &ranges, &travels, Memory::OfEach)?;
            }
            Ok(())
        });
    }
}

/// Buckets of which ranks own uneven parts: the same sums as those of each gradient.
#[test]
fn cuda_nccl_buckets_in_even_parts() {
    for sums in SUMS {
        alone_and_together(LIMIT, sums, |rank| {
            let n = rank.comm.world_size();
            // A weight of the first rank, one of all, one of the last, and what does not divide evenly.
            let lens = |rank: usize| {
                let first = if rank == 0 { 70_000 } else { 0 };
                let last = if rank == n - 1 { 5_123 } else { 16 };
                [first, 512, last, 3 + 2 * rank]
            };
            let of_item = |item: usize| (0..n).map(move |rank| lens(rank)[item]);
            let lens: Vec<usize> = (0..4).flat_map(of_item).collect();
            let ranges: Vec<_> = tiling(&lens).chunks(n).map(<[_]>::to_vec).collect();
            for dtype in [FloatDtype::F32, FloatDtype::Bf16] {
                for wire in [GradWire::F32, GradWire::Bf16] {
                    for accumulate in [[false; 4], [true; 4], [true, false, false, true]] {
                        let travels = accumulate.map(|accumulate| (wire, dtype, accumulate));
                        reduce_scatter(rank, sums, &ranges, &travels, Memory::OfAll)?;
                    }
                }
            }
            Ok(())
        });
    }
}

/// Communicators beside that of the rank reduce as it does, and their calls alternate.
#[test]
fn cuda_nccl_reduces_beside_others() {
    for sums in SUMS {
        alone_and_together(LIMIT, sums, |rank| {
            let n = rank.comm.world_size();
            let beside = [rank.comm.beside()?, rank.comm.beside()?];
            let beside: Vec<_> = beside.into_iter().flatten().collect();
            assert_eq!(beside.len(), if n > 1 { 2 } else { 0 });
            let lens = [70_000, 512, 5_123].iter().flat_map(|&len| vec![len; n]);
            let lens: Vec<usize> = lens.collect();
            let ranges: Vec<_> = tiling(&lens).chunks(n).map(<[_]>::to_vec).collect();
            for number in 0..4 {
                for comm in &beside {
                    let (cuda, comm) = (rank.cuda.clone(), Arc::clone(comm));
                    let wire = [GradWire::F32, GradWire::Bf16][number / 2];
                    let travels = [(wire, FloatDtype::F32, number % 2 > 0); 3];
                    reduce_scatter(&Rank { cuda, comm }, sums, &ranges, &travels, Memory::OfAll)?;
                }
            }
            Ok(())
        });
    }
}

/// Pieces that lie where they are gathered.
#[test]
fn cuda_nccl_gathers_in_place() {
    alone_and_together(LIMIT, Sums::Nccl, |rank| {
        let (cuda, comm) = (&rank.cuda, &*rank.comm);
        let ranges = tiling(&vec![4096; comm.world_size()]);
        let own = ranges[comm.rank()].clone();
        let full = bytes(1, 4096 * comm.world_size());
        let dest = cuda.alloc::<u8>(full.len())?;
        cuda.write(&dest, own.start, &full[own.clone()])?;
        let source = cuda.view(&dest, own)?;
        let item = GatherItem {
            source: &source,
            dest: &dest,
            ranges: &ranges,
        };
        ordered(cuda, comm, || comm.all_gather(&[item]))?;
        assert!(cuda.download(&dest)? == full);
        Ok(())
    });
}

/// A group of one rank hears of the failure of its world. One GPU is enough for two of them.
#[test]
fn cuda_nccl_groups_of_one_end_with_their_world() {
    let Some(devices) = common::devices(1) else {
        return;
    };
    let rank = |control: Arc<dyn Control>| -> Result<(), ShardError> {
        let cuda = devices[0].fork()?;
        let alone = control.split(control.rank(), 0)?;
        let alone = NcclComm::new(alone, &cuda, NcclOptions::default())?;
        let (source, dest) = (cuda.alloc::<u8>(8)?, cuda.alloc::<u8>(8)?);
        let ranges = tiling(&[8]);
        let item = GatherItem {
            source: &source,
            dest: &dest,
            ranges: &ranges,
        };
        let gather = || alone.all_gather(std::slice::from_ref(&item));
        ordered(&cuda, &alone, gather)?;
        control.barrier()?;
        if control.rank() == 0 {
            control.abort("enough");
            return Ok(());
        }
        let begun = Instant::now();
        while begun.elapsed() < LIMIT {
            ordered(&cuda, &alone, gather)?;
        }
        Ok(())
    };
    let ended: Vec<_> = thread::scope(|scope| {
        let controls = threads(2, LIMIT).into_iter();
        let ranks: Vec<_> = controls
            .map(|control| scope.spawn(|| rank(control)))
            .collect();
        let ranks = ranks.into_iter();
        ranks.map(|rank| rank.join().expect("no panic")).collect()
    });
    assert!(ended[0].is_ok(), "{:?}", ended[0]);
    let error = ended[1].as_ref().expect_err("the world failed").to_string();
    assert!(
        error.contains("rank 0") && error.contains("enough"),
        "{error}"
    );
}

#[test]
fn cuda_nccl_groups_of_groups() {
    world(2, LIMIT, Sums::Peers, |rank| {
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

/// What one rank does not take part in is done on no rank, and the host of the others waits for it on the device.
#[test]
fn cuda_nccl_ends_everywhere_when_a_rank_fails() {
    let hows = ["error", "panic", "hang"];
    for (collective, how) in hows
        .map(|how| ("all_gather", how))
        .into_iter()
        .chain(hows.map(|how| ("reduce_scatter", how)))
    {
        let limit = if how == "hang" {
            Duration::from_secs(3)
        } else {
            LIMIT
        };
        let begun = Instant::now();
        let failed = common::failing(2, limit, Sums::Peers, |rank| {
            let (cuda, comm) = (&rank.cuda, &*rank.comm);
            let n = comm.world_size();
            let len = 1 << 22;
            let (source, dest) = (cuda.alloc::<u8>(len)?, cuda.alloc::<u8>(n * len)?);
            let ranges = tiling(&vec![len; n]);
            let grad = Source::Bf16(cuda.alloc(n * len)?);
            let sums = cuda.alloc::<f32>(len)?;
            let give = || {
                ordered(cuda, comm, || match collective {
                    "all_gather" => comm.all_gather(&[GatherItem {
                        source: &source,
                        dest: &dest,
                        ranges: &ranges,
                    }]),
                    _ => {
                        let item = ReduceItem {
                            grad: &grad,
                            memory: 0,
                            ranges: &ranges,
                            out: &sums,
                            accumulate: false,
                        };
                        comm.reduce_scatter(&[item], GradWire::Bf16)
                    }
                })
            };
            give()?;
            cuda.synchronize()?;
            if comm.rank() == n - 1 {
                thread::sleep(Duration::from_millis(300));
                match how {
                    "error" => {
                        return Err(CommError::BadMesh {
                            text: "planted".into(),
                        }
                        .into());
                    }
                    "panic" => panic!("planted"),
                    _ => thread::sleep(Duration::from_secs(8)),
                }
            }
            give()?;
            cuda.synchronize()?;
            Ok(give()?)
        });
        let Some(failed) = failed else { return };
        let text = failed.to_string();
        let expected = if how == "hang" {
            match collective {
                "all_gather" => "all_gather is not done after 3.",
                _ => "reduce_scatter (bf16 wire) is not done after 3.",
            }
        } else {
            "planted"
        };
        assert!(text.contains(expected), "{collective}, {how}: {text}");
        assert!(
            failed.others.iter().all(|(_, result)| result.is_err()),
            "{collective}, {how}"
        );
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{collective}, {how}: {:?}",
            begun.elapsed()
        );
    }
}
