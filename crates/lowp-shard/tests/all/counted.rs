//! What a rank sends for gradients in worlds of any size, counted: the other ranks are not there, and nothing moves.

use crate::common::{CountingComm, tiling};
use lowp_comm::{GradWire, Mesh, MeshComm, Traffic};
use lowp_kernels::{Backend, Cpu, FloatDtype};
use lowp_shard::{GradBucketOptions, GradBuckets, GradParam, Reduction, ShardError};

/// Parameters of a rank, by bucket.
const BUCKETS: [usize; 3] = [4, 4, 1];
/// Elements that a rank has of each parameter.
const OWN: usize = 8;
const MICRO_BATCHES: usize = 4;

/// What rank 0 sends among the shards and among the replicas in the third step, and its full gradients.
fn step(
    mesh: Mesh,
    before_last: Reduction,
    wire: GradWire,
) -> Result<([Traffic; 2], usize), ShardError> {
    let comm = MeshComm {
        mesh,
        world: CountingComm::new(0, mesh.world()),
        shard: CountingComm::new(0, mesh.shard),
        replicate: CountingComm::new(0, mesh.replicate),
    };
    let params: Vec<GradParam<Cpu>> = (0..BUCKETS.iter().sum())
        .map(|number| {
            Ok(GradParam {
                block: None,
                name: format!("w{number}"),
                ranges: tiling(&vec![OWN; mesh.shard]),
                out: Cpu.alloc(OWN)?,
            })
        })
        .collect::<Result<_, ShardError>>()?;
    let bytes = 4 * 4 * OWN * mesh.shard;
    let options = GradBucketOptions {
        bytes,
        dtype: FloatDtype::F32,
        wire,
    };
    let count = params.len();
    let mut buckets = GradBuckets::new(&Cpu, &comm, params, options)?;
    let traffic = || [comm.shard.traffic(), comm.replicate.traffic()];
    let mut sent = traffic();
    for _ in 0..3 {
        let before = traffic();
        for micro in 1..=MICRO_BATCHES {
            let last = micro == MICRO_BATCHES;
            buckets.begin(if last { Reduction::Finish } else { before_last })?;
            for param in 0..count {
                buckets.grad(param)?;
                buckets.push(param)?;
            }
            buckets.flush()?;
        }
        // What is sent after it does not overlap backward.
        let [_, replicas] = traffic();
        let _ = buckets.finish()?.done;
        let after = traffic();
        assert!(after[1].since(replicas).calls <= 1);
        sent = [0, 1].map(|of| after[of].since(before[of]));
    }
    Ok((sent, buckets.resident_bytes()))
}

/// The formulas of docs/scale.md.
#[test]
fn gradients_of_many_ranks_are_those_of_the_formulas() {
    let own: usize = BUCKETS.iter().sum::<usize>() * OWN;
    for (replicate, shard) in [(1, 64), (4, 64), (1, 256), (16, 64), (1, 1024), (256, 64)] {
        let mesh = Mesh { replicate, shard };
        for (wire, bytes) in [(GradWire::F32, 4), (GradWire::Bf16, 2)] {
            for (before_last, times) in [(Reduction::Keep, 1), (Reduction::Scatter, MICRO_BATCHES)]
            {
                let ([shards, replicas], memory) = step(mesh, before_last, wire).expect("a step");
                let what = format!("{mesh} {before_last:?}");
                assert_eq!(shards.calls as usize, times * BUCKETS.len(), "{what}");
                let sent = times * bytes * own;
                assert_eq!(shards.reduce_scatter_bytes as usize, sent, "{what}");
                let summed = usize::from(replicate > 1);
                assert_eq!(replicas.calls as usize, summed * BUCKETS.len(), "{what}");
                assert_eq!(
                    replicas.all_reduce_bytes as usize,
                    summed * 4 * own,
                    "{what}"
                );
                // All gradients beside a bucket, or two buckets.
                let (all, bucket) = (4 * own * shard, 4 * 4 * OWN * shard);
                let kept = if times == 1 { all + bucket } else { 2 * bucket };
                assert_eq!(memory, kept, "{what}");
            }
        }
    }
}
