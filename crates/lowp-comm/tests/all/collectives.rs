//! The collectives against their definition: content, order, determinism, accounting.

use crate::common::{bytes, failing, ranks_everywhere as ranks, tiling, values};
use half::bf16;
use lowp_comm::{Collective, CommError, GatherItem, GradWire, ReduceItem, Traffic};
use lowp_kernels::{Backend, Cpu, FloatDtype, Source};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn all_gather_concatenates_uneven_and_empty_pieces(
        world in 1usize..=9,
        lens in prop::collection::vec(prop::collection::vec(0usize..50, 9), 0..4),
    ) {
        let full = |item: usize| bytes(item as u64, lens[item][..world].iter().sum());
        let results = ranks(world, |rank, comm| {
            let cpu = Cpu;
            let mut items = Vec::new();
            for (item, lens) in lens.iter().enumerate() {
                let ranges = tiling(&lens[..world]);
                let source = cpu.upload(&full(item)[ranges[rank].clone()])?;
                let dest = cpu.alloc::<u8>(full(item).len())?;
                items.push((source, dest, ranges));
            }
            for _ in 0..2 {
                let batch: Vec<GatherItem<'_, Cpu>> = items
                    .iter()
                    .map(|(source, dest, ranges)| GatherItem { source, dest, ranges })
                    .collect();
                comm.all_gather(&batch)?;
            }
            let got: Result<Vec<_>, _> = items.iter().map(|(_, d, _)| cpu.download(d)).collect();
            Ok((got?, comm.traffic()))
        });
        for (rank, (got, traffic)) in results.iter().enumerate() {
            for (item, got) in got.iter().enumerate() {
                prop_assert_eq!(got, &full(item));
            }
            let own: usize = lens.iter().map(|lens| lens[rank]).sum();
            let all_gather_bytes = 2 * own as u64;
            prop_assert_eq!(*traffic, Traffic { all_gather_bytes, calls: 2, ..Traffic::default() });
        }
    }

    /// Each rank's piece lies in its place in the destination already: the gather fills in the others, and
    /// changes nothing else.
    #[test]
    fn all_gather_in_place_keeps_the_own_piece(
        gaps in prop::collection::vec(0usize..3, 1..=6), len in 0usize..50,
    ) {
        let mut end = 0;
        let ranges: Vec<_> = (0..).zip(&gaps).map(|(rank, gap)| {
            let start = end + gap;
            end = start + if rank % 3 == 2 { 0 } else { len };
            start..end
        }).collect();
        let (full, before) = (bytes(1, end + 2), bytes(2, end + 2));
        let results = ranks(gaps.len(), |rank, comm| {
            let mut own = before.clone();
            own[ranges[rank].clone()].copy_from_slice(&full[ranges[rank].clone()]);
            let dest = Cpu.upload(&own)?;
            let source = &Cpu.view(&dest, ranges[rank].clone())?;
            comm.all_gather(&[GatherItem { source, dest: &dest, ranges: &ranges }])?;
            assert_eq!(comm.traffic().all_gather_bytes, ranges[rank].len() as u64);
            Ok(Cpu.download(&dest)?)
        });
        let mut expected = before;
        for range in &ranges {
            expected[range.clone()].copy_from_slice(&full[range.clone()]);
        }
        for found in results {
            prop_assert_eq!(&found, &expected);
        }
    }

    #[test]
    fn reduce_scatter_is_the_sum_in_rank_order(
        world in 1usize..=9,
        lens in prop::collection::vec(0usize..40, 9),
        bf16_wire: bool,
        bf16_grads: bool,
        accumulate: bool,
    ) {
        let dtype = if bf16_grads { FloatDtype::Bf16 } else { FloatDtype::F32 };
        check_reduce_scatter(&lens[..world], bf16_wire, dtype, accumulate)?;
    }
}

#[test]
fn reduce_scatter_crosses_chunks() {
    for dtype in [FloatDtype::F32, FloatDtype::Bf16] {
        check_reduce_scatter(&[70_000, 3], true, dtype, true).expect("the sums");
    }
}

fn check_reduce_scatter(
    lens: &[usize],
    bf16_wire: bool,
    dtype: FloatDtype,
    accumulate: bool,
) -> Result<(), TestCaseError> {
    let wire = if bf16_wire {
        GradWire::Bf16
    } else {
        GradWire::F32
    };
    let ranges = tiling(lens);
    let n: usize = lens.iter().sum();
    let grad = |rank: usize| values(rank as u64, n);
    let before = |rank: usize| values(100 + rank as u64, lens[rank]);
    let results = ranks(lens.len(), |rank, comm| {
        let cpu = Cpu;
        let full = Source::alloc(&cpu, dtype, n)?;
        full.write(&cpu, 0, &grad(rank))?;
        let out = cpu.upload(&before(rank))?;
        let item = ReduceItem {
            grad: &full,
            memory: 0,
            ranges: &ranges,
            out: &out,
            accumulate,
        };
        comm.reduce_scatter(&[item], wire)?;
        Ok((cpu.download(&out)?, comm.traffic().reduce_scatter_bytes))
    });
    for (rank, (got, sent)) in results.iter().enumerate() {
        for (j, i) in ranges[rank].clone().enumerate() {
            let wired = |r: usize| match (wire, dtype) {
                (GradWire::F32, FloatDtype::F32) => grad(r)[i],
                _ => bf16::from_f32(grad(r)[i]).to_f32(),
            };
            // The naive sum of a long vector is quadratic; a sample is enough there.
            if j % (1 + lens[rank] / 50) != 0 {
                continue;
            }
            let sum = (1..lens.len()).fold(wired(0), |sum, r| sum + wired(r));
            let expected = if accumulate {
                before(rank)[j] + sum
            } else {
                sum
            };
            prop_assert_eq!(got[j].to_bits(), expected.to_bits());
        }
        let bytes = wire.bytes().min(dtype.bytes());
        prop_assert_eq!(*sent, (lens[rank] * bytes) as u64);
    }
    Ok(())
}

#[test]
fn all_reduce_max_ignores_nan_and_keeps_infinity() {
    for got in ranks(3, |rank, comm| {
        let cpu = Cpu;
        let mine = [
            [f32::NAN, 1.0, 0.0, -4.0],
            [2.0, f32::INFINITY, 0.0, -3.0],
            [f32::NAN, 3.0, 0.0, -5.0],
        ];
        let buffer = cpu.upload(&mine[rank])?;
        comm.all_reduce_max(&buffer)?;
        assert_eq!(comm.traffic().all_reduce_bytes, 16);
        Ok(cpu.download(&buffer)?)
    }) {
        assert_eq!(got, [2.0, f32::INFINITY, 0.0, -3.0]);
    }
}

#[test]
fn sums_are_in_rank_order_and_equal_everywhere() {
    for world in 1..=9 {
        let results = ranks(world, |rank, comm| {
            let cpu = Cpu;
            let buffer = cpu.upload(&values(rank as u64, 33))?;
            comm.all_reduce_sum(&buffer)?;
            let mut host: Vec<f64> = values(rank as u64, 33).iter().map(|&x| x.into()).collect();
            comm.control().sum(&mut host)?;
            assert_eq!(comm.traffic().all_reduce_bytes, 33 * 4);
            Ok((cpu.download(&buffer)?, host))
        });
        for i in 0..33 {
            let sum = (1..world).fold(values(0, 33)[i], |s, r| s + values(r as u64, 33)[i]);
            let first = f64::from(values(0, 33)[i]);
            let wide = (1..world).fold(first, |s, r| s + f64::from(values(r as u64, 33)[i]));
            for (got, host) in &results {
                assert_eq!(
                    (got[i].to_bits(), host[i].to_bits()),
                    (sum.to_bits(), wide.to_bits())
                );
            }
        }
    }
}

#[test]
fn empty_batches_and_vectors_are_calls_too() {
    for traffic in ranks(2, |_, comm| {
        let cpu = Cpu;
        comm.all_gather(&[])?;
        comm.reduce_scatter(&[], GradWire::F32)?;
        comm.all_reduce_max(&cpu.alloc(0)?)?;
        comm.control().sum(&mut [])?;
        comm.control().barrier()?;
        Ok(comm.traffic())
    }) {
        assert_eq!(
            traffic,
            Traffic {
                calls: 3,
                ..Traffic::default()
            }
        );
    }
}

#[test]
fn split_orders_by_key_and_counts_apart() {
    let results = ranks(5, |rank, comm| {
        // Even ranks in reverse order, odd ranks in order.
        let group = comm.split(rank % 2, if rank % 2 == 0 { 10 - rank } else { rank })?;
        let mut sum = [rank as f64];
        group.control().sum(&mut sum)?;
        assert_eq!(comm.traffic(), Traffic::default());
        group.all_reduce_sum(&Cpu.alloc(2)?)?;
        assert_eq!(group.traffic().all_reduce_bytes, 8);
        Ok((group.rank(), group.world_size(), sum[0]))
    });
    assert_eq!(
        results,
        [
            (2, 3, 6.0),
            (0, 2, 4.0),
            (1, 3, 6.0),
            (1, 2, 4.0),
            (0, 3, 6.0)
        ]
    );
}

#[test]
fn traffic_since_is_the_difference_of_each_count() {
    let earlier = Traffic {
        all_gather_bytes: 1,
        reduce_scatter_bytes: 20,
        passed_on_bytes: 50_000,
        owned_bytes: 600_000,
        all_reduce_bytes: 300,
        calls: 4000,
    };
    let later = Traffic {
        all_gather_bytes: 6,
        reduce_scatter_bytes: 80,
        passed_on_bytes: 120_000,
        owned_bytes: 1_400_000,
        all_reduce_bytes: 1000,
        calls: 12_000,
    };
    let added = Traffic {
        all_gather_bytes: 5,
        reduce_scatter_bytes: 60,
        passed_on_bytes: 70_000,
        owned_bytes: 800_000,
        all_reduce_bytes: 700,
        calls: 8000,
    };
    assert_eq!(later.since(earlier), added);
    assert_eq!(later.since(Traffic::default()), later);
}

#[test]
fn wires_have_the_widths_of_their_dtypes() {
    assert_eq!(GradWire::F32.bytes(), size_of::<f32>());
    assert_eq!(GradWire::Bf16.bytes(), size_of::<bf16>());
}

/// A batch that is started follows the point it is given, and a stream that waits for it sees its result.
#[test]
fn started_batches_are_waited_for() {
    for world in 1..=3 {
        let sums = ranks(world, |rank, comm| {
            let buffer = Cpu.upload(&[rank as f32, 1.0])?;
            let started = comm.start(&Cpu.record()?, "", Collective::Sum(&[&buffer]))?;
            started.wait(&Cpu)?;
            Ok(Cpu.download(&buffer)?)
        });
        let all = (0..world).sum::<usize>() as f32;
        assert_eq!(sums, vec![vec![all, world as f32]; world]);
    }
}

/// A rank that says that gradients share memory which they do not would give other calls than the others.
#[test]
fn the_number_of_a_memory_is_that_of_one() {
    let failed = failing(2, |_, comm| {
        let grads = [Source::F32(Cpu.alloc(4)?), Source::F32(Cpu.alloc(4)?)];
        let outs = [Cpu.alloc::<f32>(2)?, Cpu.alloc::<f32>(2)?];
        let ranges = [0..2, 2..4];
        let item = |at: usize| ReduceItem {
            grad: &grads[at],
            memory: 7,
            ranges: &ranges,
            out: &outs[at],
            accumulate: false,
        };
        comm.reduce_scatter(&[item(0), item(1)], GradWire::F32)
    });
    let error = failed.cause.to_string();
    assert!(error.contains("items 0 and 1: both give 7"), "{error}");
}

/// Ranks that have their gradients in other dtypes are found item by item.
#[test]
fn dtypes_of_gradients_are_compared() {
    let failed = failing(2, |rank, comm| {
        let grads = [Source::F32(Cpu.alloc(4)?), Source::Bf16(Cpu.alloc(4)?)];
        let outs = [Cpu.alloc::<f32>(2)?, Cpu.alloc::<f32>(2)?];
        let ranges = [0..2, 2..4];
        let item = |at: usize| ReduceItem {
            grad: &grads[(at + rank) % 2],
            memory: at,
            ranges: &ranges,
            out: &outs[at],
            accumulate: false,
        };
        comm.reduce_scatter(&[item(0), item(1)], GradWire::F32)
    });
    let other = matches!(failed.cause, CommError::Mismatch { .. });
    assert!(other, "{}", failed.cause);
}
