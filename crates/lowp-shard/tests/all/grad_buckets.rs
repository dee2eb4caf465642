//! Buckets of gradients: sums as parameters one by one would have them, memory that does not grow, and mistakes.

use std::ops::Range;

use crate::common::{failing, ranks, tiling, values};
use half::bf16;
use lowp_comm::{CommError, GradWire, Mesh, MeshComm};
use lowp_kernels::{Backend, Cpu, CpuBuffer, FloatDtype, Source};
use lowp_shard::{GradBucketOptions, GradBuckets, GradParam, Reduction, ShardError};
use proptest::prelude::*;

/// One parameter: where its gradient is cut.
type Cuts = Vec<Range<usize>>;

fn params(cuts: &[Cuts], shard: usize) -> Result<Vec<GradParam<Cpu>>, ShardError> {
    let param = |(number, ranges): (usize, &Cuts)| {
        Ok(GradParam {
            block: None,
            name: format!("w{number}"),
            ranges: ranges.clone(),
            out: Cpu.alloc(ranges[shard].len())?,
        })
    };
    cuts.iter().enumerate().map(param).collect()
}

/// The gradient of `param` that `rank` has in a micro-batch.
fn gradient(param: usize, rank: usize, micro: usize, cuts: &Cuts) -> Vec<f32> {
    let seed = 100 * param + 10 * rank + micro;
    values(seed as u64, cuts.last().map_or(0, |range| range.end))
}

fn write(grad: &Source<Cpu>, values: &[f32]) -> Result<(), ShardError> {
    assert_eq!(grad.len(&Cpu), values.len());
    Ok(grad.write(&Cpu, 0, values)?)
}

/// What rank `shard` of every replica has in the end, added one value after the other: what a rank keeps is added before it travels.
fn expected(
    mesh: Mesh,
    shard: usize,
    (param, cuts): (usize, &Cuts),
    micros: &[Reduction],
    [bf16_grads, bf16_wire]: [bool; 2],
) -> Vec<f32> {
    let narrowed = |narrow, x: f32| {
        if narrow {
            bf16::from_f32(x).to_f32()
        } else {
            x
        }
    };
    let given = |rank, micro, i: usize| narrowed(bf16_grads, gradient(param, rank, micro, cuts)[i]);
    // Micro-batches that are sent together.
    let numbers: Vec<usize> = (0..micros.len()).collect();
    let sent = numbers.chunk_by(|&before, _| micros[before] == Reduction::Keep);
    let sent: Vec<&[usize]> = sent.collect();
    let wired = |rank, sent: &[usize], i| {
        let own = |micro| given(rank, micro, i);
        let kept = sent[1..]
            .iter()
            .fold(own(sent[0]), |sum, &micro| sum + own(micro));
        narrowed(bf16_grads || bf16_wire, kept)
    };
    let of_replica = |replica: usize, i| {
        let first = replica * mesh.shard;
        let reduced = |sent: &[usize]| {
            let others = first + 1..first + mesh.shard;
            others.fold(wired(first, sent, i), |sum, rank| {
                sum + wired(rank, sent, i)
            })
        };
        sent[1..]
            .iter()
            .fold(reduced(sent[0]), |sum, &sent| reduced(sent) + sum)
    };
    let sum = |i| (1..mesh.replicate).fold(of_replica(0, i), |sum, r| sum + of_replica(r, i));
    cuts[shard].clone().map(sum).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn sums_do_not_depend_on_buckets(
        lens in prop::collection::vec(prop::collection::vec(0usize..20, 4), 0..6),
        shape in prop::sample::select(vec![(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1)]),
        bytes in prop::sample::select(vec![0usize, 64, 200, 1 << 20]),
        bf16_grads: bool,
        bf16_wire: bool,
        micros in prop::collection::vec(
            prop::sample::select(vec![Reduction::Keep, Reduction::Scatter]),
            0..3,
        ),
        last in prop::sample::select(vec![Reduction::Keep, Reduction::Scatter, Reduction::Finish]),
        skipped in prop::option::of(0usize..6),
        backward: bool,
    ) {
        let (replicate, shard) = shape;
        let mesh = Mesh { replicate, shard };
        let micros = [micros, vec![last]].concat();
        let cuts: Vec<Cuts> = lens.iter().map(|lens| tiling(&lens[..shard])).collect();
        let options = GradBucketOptions {
            bytes,
            dtype: if bf16_grads { FloatDtype::Bf16 } else { FloatDtype::F32 },
            wire: if bf16_wire { GradWire::Bf16 } else { GradWire::F32 },
        };
        let found = ranks(mesh.world(), |rank, comm| {
            let mesh_comm = MeshComm::new(mesh, comm)?;
            let given = params(&cuts, rank % shard)?;
            let mut buckets = GradBuckets::new(&Cpu, &mesh_comm, given.clone(), options)?;
            // From the second step on, buckets of the last micro-batch are added over replicas as they go.
            for _ in 0..3 {
                for (micro, &reduction) in micros.iter().enumerate() {
                    buckets.begin(reduction)?;
                    let mut order: Vec<usize> = (0..cuts.len()).collect();
                    if backward {
                        order.reverse();
                    }
                    for param in order.into_iter().filter(|&param| Some(param) != skipped) {
                        write(&buckets.grad(param)?, &gradient(param, rank, micro, &cuts[param]))?;
                        buckets.push(param)?;
                    }
                    buckets.flush()?;
                }
                let arrived = buckets.finish()?.contributions;
                let all = |param| if Some(param) == skipped { 0 } else { micros.len() };
                assert_eq!(arrived, (0..cuts.len()).map(all).collect::<Vec<_>>());
            }
            let sums = given.iter().map(|param| Cpu.download(&param.out));
            Ok(sums.collect::<Result<Vec<_>, _>>()?)
        });
        for (rank, sums) in found.iter().enumerate() {
            for (param, sum) in sums.iter().enumerate().filter(|(p, _)| Some(*p) != skipped) {
                let one = (param, &cuts[param]);
                let expected = expected(mesh, rank % shard, one, &micros, [bf16_grads, bf16_wire]);
                prop_assert_eq!(bits(sum), bits(&expected));
            }
        }
    }
}

/// Two ranks, parameters of eight values each.
fn eights(
    count: usize,
    bytes: usize,
    rank: usize,
    mesh: &MeshComm<Cpu>,
) -> Result<(GradBuckets<Cpu>, Vec<CpuBuffer<f32>>), ShardError> {
    let cuts = vec![tiling(&[4, 4]); count];
    let given = params(&cuts, rank)?;
    let outs = given.iter().map(|param| param.out.clone()).collect();
    let options = GradBucketOptions {
        bytes,
        ..GradBucketOptions::default()
    };
    Ok((GradBuckets::new(&Cpu, mesh, given, options)?, outs))
}

fn add(buckets: &mut GradBuckets<Cpu>, param: usize, x: f32) -> Result<(), ShardError> {
    write(&buckets.grad(param)?, &[x; 8])?;
    buckets.push(param)
}

/// Runs `f` on two ranks that share out everything.
fn two<T: Send>(f: impl Fn(usize, &MeshComm<Cpu>) -> Result<T, ShardError> + Sync) -> Vec<T> {
    ranks(2, |rank, comm| {
        f(rank, &MeshComm::new(Mesh::sharded(2), comm)?)
    })
}

#[test]
fn a_bucket_goes_when_it_is_full() {
    two(|rank, mesh| {
        // Two gradients to a bucket, and one by itself.
        let (mut buckets, outs) = eights(5, 64, rank, mesh)?;
        assert_eq!(buckets.len(), 3);
        let mut sent = Vec::new();
        for param in 0..5 {
            add(&mut buckets, param, 1.0)?;
            sent.push(mesh.shard.traffic().calls);
        }
        assert_eq!(sent, [0, 1, 1, 2, 3]);
        assert_eq!([0, 4, 5].map(|param| buckets.arrived(param)), [1, 1, 0]);
        assert_eq!(buckets.finish()?.contributions, [1; 5]);
        assert_eq!(mesh.shard.traffic().calls, 3);
        for out in outs {
            assert_eq!(Cpu.download(&out)?, [2.0; 4]);
        }
        Ok(())
    });
}

#[test]
fn memory_is_that_of_the_buckets_at_once_and_does_not_grow() {
    two(|rank, mesh| {
        for (bytes, resident) in [(64, 64), (0, 32), (1 << 20, 5 * 32)] {
            let (mut buckets, _) = eights(5, bytes, rank, mesh)?;
            for step in 0..3 {
                for param in 0..5 {
                    add(&mut buckets, param, step as f32)?;
                }
                buckets.finish()?;
                // Ranks that wait for each other have one bucket at a time.
                assert_eq!(buckets.resident_bytes(), resident, "{bytes}");
            }
        }
        // Both are written at once.
        let (mut buckets, _) = eights(4, 64, rank, mesh)?;
        let (first, last) = (buckets.grad(0)?, buckets.grad(3)?);
        assert_eq!(buckets.resident_bytes(), 2 * 64);
        assert_ne!(first.span(&Cpu), last.span(&Cpu));
        buckets.discard()?;
        Ok(())
    });
}

#[test]
fn gradients_of_a_layer_that_is_used_twice_are_added() {
    two(|rank, mesh| {
        for bytes in [0, 64, 1 << 20] {
            let (mut buckets, outs) = eights(3, bytes, rank, mesh)?;
            for (param, x) in [
                (0, 1.0),
                (1, 1.0),
                (0, 10.0),
                (1, 10.0),
                (1, 100.0),
                (2, 1.0),
            ] {
                add(&mut buckets, param, x)?;
            }
            assert_eq!(buckets.finish()?.contributions, [2, 3, 1]);
            let sums: Vec<f32> = outs
                .iter()
                .map(|out| Ok(Cpu.download(out)?[0]))
                .collect::<Result<_, ShardError>>()?;
            assert_eq!(sums, [22.0, 222.0, 2.0], "{bytes}");
        }
        Ok(())
    });
}

#[test]
fn kept_gradients_take_the_memory_of_all_and_are_sent_once() {
    two(|rank, mesh| {
        for (bytes, slab) in [(64, 64), (0, 32), (1 << 20, 5 * 32)] {
            let (mut buckets, outs) = eights(5, bytes, rank, mesh)?;
            for step in 0..3 {
                let before = mesh.shard.traffic().calls;
                for (micro, reduction) in [Reduction::Keep, Reduction::Keep, Reduction::Finish]
                    .into_iter()
                    .enumerate()
                {
                    buckets.begin(reduction)?;
                    for param in 0..5 {
                        add(&mut buckets, param, (step + micro) as f32)?;
                    }
                    buckets.flush()?;
                    let beside = if step == 0 && micro == 0 { 0 } else { slab };
                    assert_eq!(buckets.resident_bytes(), 5 * 32 + beside, "{bytes}");
                }
                assert_eq!(buckets.finish()?.contributions, [3; 5]);
                let calls = mesh.shard.traffic().calls - before;
                assert_eq!(calls, buckets.len() as u64);
                for out in &outs {
                    assert_eq!(Cpu.download(out)?, [(6 * step + 6) as f32; 4]);
                }
            }
        }
        Ok(())
    });
}

/// What was kept, what travels and what waits in a bucket.
#[test]
fn a_layer_that_is_used_twice_is_kept_twice() {
    two(|rank, mesh| {
        for bytes in [0, 64, 1 << 20] {
            let (mut buckets, outs) = eights(3, bytes, rank, mesh)?;
            for reduction in [Reduction::Keep, Reduction::Scatter, Reduction::Keep] {
                buckets.begin(reduction)?;
                for (param, x) in [(0, 1.0), (1, 1.0), (0, 10.0), (2, 1.0), (1, 100.0)] {
                    add(&mut buckets, param, x)?;
                }
                buckets.flush()?;
            }
            // Kept, and discarded with the rest of the step.
            buckets.discard()?;
            for reduction in [Reduction::Keep, Reduction::Finish] {
                buckets.begin(reduction)?;
                for (param, x) in [(0, 1.0), (1, 1.0), (0, 10.0), (1, 100.0)] {
                    add(&mut buckets, param, x)?;
                }
                buckets.flush()?;
            }
            assert_eq!(buckets.finish()?.contributions, [4, 4, 0]);
            for (out, sum) in outs.iter().zip([44.0, 404.0]) {
                assert_eq!(Cpu.download(out)?, [sum; 4], "{bytes}");
            }
        }
        Ok(())
    });
}

/// Replicas are added while backward goes on, from the second step on; a bucket that is sent more than once in a micro-batch waits.
#[test]
fn replicas_are_added_bucket_by_bucket() {
    let replicas = Mesh {
        replicate: 2,
        shard: 1,
    };
    ranks(2, |_, comm| {
        let mesh = MeshComm::new(replicas, comm)?;
        let given = params(&vec![tiling(&[8]); 4], 0)?;
        let options = GradBucketOptions {
            bytes: 64,
            ..GradBucketOptions::default()
        };
        let mut buckets = GradBuckets::new(&Cpu, &mesh, given.clone(), options)?;
        for (step, calls) in [[0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 2]]
            .into_iter()
            .enumerate()
        {
            let before = mesh.replicate.traffic().calls;
            let mut added = Vec::new();
            buckets.begin(Reduction::Finish)?;
            for param in [0, 1, 2, 3, 2] {
                add(&mut buckets, param, 1.0)?;
                added.push(mesh.replicate.traffic().calls - before);
            }
            buckets.finish()?;
            added.push(mesh.replicate.traffic().calls - before);
            assert_eq!(added, calls, "{step}");
            for (param, sum) in given.iter().zip([2.0, 2.0, 4.0, 2.0]) {
                assert_eq!(Cpu.download(&param.out)?, [sum; 8]);
            }
        }
        Ok(())
    });
    let failed = failing(2, |_, comm| {
        let mesh = MeshComm::new(replicas, comm)?;
        let given = params(&[tiling(&[8])], 0)?;
        let mut buckets = GradBuckets::new(&Cpu, &mesh, given, GradBucketOptions::default())?;
        for uses in [1, 2] {
            buckets.begin(Reduction::Finish)?;
            (0..uses).try_for_each(|_| add(&mut buckets, 0, 1.0))?;
            buckets.finish()?;
        }
        Ok(())
    });
    let found = failed.cause.to_string();
    assert!(
        found.starts_with("the gradient of 'w0' came again after its replicas"),
        "{found}"
    );
}

/// Which buckets are sent once is learned of every step, whatever its reduction, and not of one that did not send them.
#[test]
fn buckets_that_may_come_again_wait_for_the_end_of_the_step() {
    let replicas = Mesh {
        replicate: 2,
        shard: 1,
    };
    ranks(2, |_, comm| {
        let mesh = MeshComm::new(replicas, comm)?;
        let given = params(&vec![tiling(&[8]); 2], 0)?;
        let options = GradBucketOptions {
            bytes: 0,
            ..GradBucketOptions::default()
        };
        let mut buckets = GradBuckets::new(&Cpu, &mesh, given.clone(), options)?;
        // The first has a gradient twice, the second has none in the first step.
        for (reduction, uses, early) in [
            (Reduction::Scatter, &[0, 0][..], 0),
            (Reduction::Finish, &[0, 0, 1], 0),
            (Reduction::Finish, &[0, 0, 1], 1),
        ] {
            buckets.begin(reduction)?;
            let before = mesh.replicate.traffic().calls;
            uses.iter()
                .try_for_each(|&param| add(&mut buckets, param, 1.0))?;
            buckets.flush()?;
            assert_eq!(mesh.replicate.traffic().calls - before, early);
            buckets.finish()?;
            assert_eq!(Cpu.download(&given[0].out)?, [4.0; 8]);
        }
        assert_eq!(Cpu.download(&given[1].out)?, [2.0; 8]);
        Ok(())
    });
}

#[test]
fn discarded_gradients_do_not_count() {
    two(|rank, mesh| {
        let (mut buckets, outs) = eights(3, 64, rank, mesh)?;
        for param in 0..3 {
            add(&mut buckets, param, 5.0)?;
        }
        buckets.grad(1)?;
        buckets.discard()?;
        for param in 0..3 {
            add(&mut buckets, param, 1.0)?;
        }
        assert_eq!(buckets.finish()?.contributions, [1; 3]);
        for out in &outs {
            assert_eq!(Cpu.download(out)?, [2.0; 4]);
        }
        assert_eq!(buckets.resident_bytes(), 64);
        Ok(())
    });
}

#[test]
fn mistakes_are_errors_on_all_ranks() {
    type Act = fn(&mut GradBuckets<Cpu>) -> Result<(), ShardError>;
    let acts: [(Act, &str); 6] = [
        (|b| b.push(0), "the gradient of 'w0' has no memory"),
        (
            |b| {
                b.grad(1)?;
                b.push(1)?;
                b.push(1)
            },
            "the gradient of 'w1' has no memory",
        ),
        (
            |b| b.grad(3).map(drop),
            "3 parameters, and there is no parameter 3",
        ),
        (|b| b.push(7), "3 parameters, and there is no parameter 7"),
        (
            |b| {
                b.grad(2)?;
                b.flush()
            },
            "the gradient of 'w2' got memory but was not pushed",
        ),
        (
            |b| {
                b.grad(0)?;
                b.grad(2)?;
                b.push(0)?;
                b.finish().map(drop)
            },
            "the gradient of 'w2' got memory but was not pushed",
        ),
    ];
    for (act, says) in acts {
        let failed = failing(2, |rank, comm| {
            let mesh = MeshComm::new(Mesh::sharded(2), comm)?;
            let (mut buckets, _) = eights(3, 1 << 20, rank, &mesh)?;
            act(&mut buckets)
        });
        assert!(failed.cause.to_string().contains(says), "{}", failed.cause);
    }
}

#[test]
fn gradients_of_different_parameters_are_not_added() {
    let replicas = Mesh {
        replicate: 2,
        shard: 1,
    };
    for mesh in [Mesh::sharded(2), replicas] {
        let failed = failing(2, |rank, comm| {
            let mesh = MeshComm::new(mesh, comm)?;
            let cuts = vec![tiling(&vec![8 / mesh.mesh.shard; mesh.mesh.shard]); 2];
            let given = params(&cuts, mesh.shard.rank())?;
            let mut buckets = GradBuckets::new(&Cpu, &mesh, given, GradBucketOptions::default())?;
            add(&mut buckets, rank, 1.0)?;
            buckets.finish()
        });
        let other = matches!(failed.cause, ShardError::Comm(CommError::Mismatch { .. }));
        assert!(other, "{mesh}: {}", failed.cause);
    }
}

/// Both have one length, so no call tells them apart.
#[test]
fn gradients_in_another_order_are_not_added() {
    let failed = failing(2, |rank, comm| {
        let mesh = MeshComm::new(Mesh::sharded(2), comm)?;
        let (mut buckets, _) = eights(2, 0, rank, &mesh)?;
        for param in [rank, 1 - rank] {
            add(&mut buckets, param, 1.0)?;
        }
        buckets.finish()
    });
    let other = matches!(failed.cause, ShardError::Comm(CommError::Mismatch { .. }));
    assert!(other, "{}", failed.cause);
    // Within a bucket the order does not matter.
    ranks(2, |rank, comm| {
        let mesh = MeshComm::new(Mesh::sharded(2), comm)?;
        let (mut buckets, outs) = eights(2, 1 << 20, rank, &mesh)?;
        for param in [rank, 1 - rank] {
            add(&mut buckets, param, 1.0 + param as f32)?;
        }
        assert_eq!(buckets.finish()?.contributions, [1, 1]);
        assert_eq!(Cpu.download(&outs[1])?, [4.0; 4]);
        Ok(())
    });
}

#[test]
fn plans_are_checked() {
    let plan = |ranges: Vec<Range<usize>>, out: usize| {
        failing(2, |_, comm| {
            let mesh = MeshComm::new(Mesh::sharded(2), comm)?;
            let param = GradParam {
                block: None,
                name: "w".to_owned(),
                ranges: ranges.clone(),
                out: Cpu.alloc(out)?,
            };
            GradBuckets::new(&Cpu, &mesh, vec![param], GradBucketOptions::default()).map(drop)
        })
        .cause
        .to_string()
    };
    let ranges = |ends: &[(usize, usize)]| ends.iter().map(|&(a, b)| a..b).collect();
    for (found, says) in [
        (plan(ranges(&[(0, 4)]), 4), "the gradient of 'w'"),
        (
            plan(ranges(&[(0, 4), (5, 9)]), 4),
            "rank 1 owns elements 5..9, but the next element is 4",
        ),
        (
            plan(ranges(&[(1, 4), (4, 8)]), 4),
            "rank 0 owns elements 1..4, but the next element is 0",
        ),
        (
            plan(ranges(&[(0, 4), (4, 8)]), 5),
            "has 5 values and this rank owns 4 elements",
        ),
    ] {
        assert!(found.contains(says), "{found}");
    }
    let replicas = Mesh {
        replicate: 2,
        shard: 1,
    };
    for mesh in [Mesh::sharded(2), replicas] {
        let failed = failing(2, |rank, comm| {
            let mesh = MeshComm::new(mesh, comm)?;
            let cuts = vec![tiling(&vec![4; mesh.mesh.shard]); 2];
            let mut given = params(&cuts, mesh.shard.rank())?;
            // As long, so that nothing else tells the ranks apart.
            if rank == 1 {
                given.reverse();
            }
            GradBuckets::new(&Cpu, &mesh, given, GradBucketOptions::default()).map(drop)
        });
        let other = matches!(failed.cause, ShardError::Comm(CommError::Mismatch { .. }));
        assert!(other, "{mesh}: {}", failed.cause);
    }
    let failed = failing(2, |rank, comm| {
        let mesh = MeshComm::new(Mesh::sharded(2), comm)?;
        eights(3, 64 * (1 + rank), rank, &mesh).map(drop)
    });
    let other = matches!(failed.cause, ShardError::Comm(CommError::Mismatch { .. }));
    assert!(other, "{}", failed.cause);
}

#[test]
fn buckets_are_as_long_as_their_bytes_in_either_dtype() {
    two(|rank, mesh| {
        for (dtype, expected) in [(FloatDtype::F32, 3), (FloatDtype::Bf16, 2)] {
            let given = params(&vec![tiling(&[4, 4]); 5], rank)?;
            let options = GradBucketOptions {
                bytes: 64,
                dtype,
                ..GradBucketOptions::default()
            };
            let mut buckets = GradBuckets::new(&Cpu, mesh, given, options)?;
            assert_eq!(buckets.len(), expected, "{}", dtype.name());
            buckets.grad(0)?;
            assert_eq!(buckets.resident_bytes(), 64, "{}", dtype.name());
            buckets.discard()?;
        }
        Ok(())
    });
}
