//! Ranks with a handle each: what a collective reads was written, and is read before it changes,
//! though nothing but the collective orders the handles.

use std::sync::Arc;

use lowp_format::{AnyRecipe, Phase, RecipeOptions, Shape};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_shard::{
    Communicator, GatherGroup, GatherItem, GatherPool, GradBucketOptions, GradBuckets, GradParam,
    GradWire, LocalComm, Mesh, MeshComm, ReduceItem, ShardError, ShardSpec, ShardedTensor,
    run_ranks_on,
};
use lowp_tests::queued::Queued;
use lowp_tests::world::TIMEOUT;

const RANKS: usize = 3;
const LEN: usize = 8;

fn handles() -> Vec<Queued> {
    (0..RANKS).map(|_| Queued::default()).collect()
}

/// Values in memory that no handle has to write first.
fn at_rest<T: lowp_kernels::Element>(value: T, len: usize) -> Result<CpuBuffer<T>, ShardError> {
    Ok(Cpu.upload(&vec![value; len])?)
}

#[test]
fn a_gather_follows_the_writers_and_their_next_writes_follow_it() {
    let backends = handles();
    let run = run_ranks_on(&backends, TIMEOUT, |rank, comm| -> Result<_, ShardError> {
        let backend = &backends[rank];
        let ranges: Vec<_> = (0..RANKS).map(|r| r * LEN..(r + 1) * LEN).collect();
        let (source, dest) = (backend.alloc::<u8>(LEN)?, backend.alloc::<u8>(RANKS * LEN)?);
        let mut seen = Vec::new();
        for step in 0..3u8 {
            let value = at_rest(10 * step + rank as u8 + 1, LEN)?;
            // Queued: nothing but the gather makes another rank wait for it.
            backend.copy(&value, 0..LEN, &source, 0)?;
            comm.all_gather(&[GatherItem {
                source: &source,
                dest: &dest,
                ranges: &ranges,
            }])?;
            // The next step of rank 0 begins at once, while the others have not copied yet.
            if rank == 0 {
                backend.clear(&source)?;
                backend.download(&source)?;
                comm.control().barrier()?;
            } else {
                comm.control().barrier()?;
            }
            seen.push(backend.download(&dest)?);
        }
        Ok(seen)
    });
    for seen in run.unwrap_or_else(|e| panic!("{e}")) {
        for (step, bytes) in seen.iter().enumerate() {
            for (rank, piece) in bytes.chunks(LEN).enumerate() {
                let expected = [(10 * step + rank + 1) as u8; LEN];
                assert_eq!(piece, expected, "step {step}, piece of rank {rank}");
            }
        }
    }
}

#[test]
fn reductions_follow_the_writers() {
    let backends = handles();
    let run = run_ranks_on(&backends, TIMEOUT, |rank, comm| -> Result<_, ShardError> {
        let backend = &backends[rank];
        let ranges: Vec<_> = (0..RANKS).map(|r| r * LEN..(r + 1) * LEN).collect();
        let value = at_rest(rank as f32 + 1.0, RANKS * LEN)?;
        let [grad, sums, most] = [(); 3].map(|()| backend.alloc::<f32>(RANKS * LEN));
        let (grad, sums, most) = (grad?, sums?, most?);
        for to in [&grad, &sums, &most] {
            backend.copy(&value, 0..RANKS * LEN, to, 0)?;
        }
        // What the sum is added to is queued as well.
        let out = backend.alloc::<f32>(LEN)?;
        backend.copy(&at_rest(100.0, LEN)?, 0..LEN, &out, 0)?;
        let item = ReduceItem {
            grad: &Source::F32(grad.clone()),
            ranges: &ranges,
            out: &out,
            accumulate: true,
        };
        comm.reduce_scatter(&[item], GradWire::F32)?;
        comm.all_reduce_sum(&sums)?;
        comm.all_reduce_max(&most)?;
        let read = |buffer| backend.download::<f32>(buffer);
        Ok([read(&out)?, read(&sums)?, read(&most)?])
    });
    for [out, sums, most] in run.unwrap_or_else(|e| panic!("{e}")) {
        assert_eq!(out, [106.0; LEN]);
        assert_eq!(sums, [6.0; RANKS * LEN]);
        assert_eq!(most, [3.0; RANKS * LEN]);
    }
}

/// Two groups share the pool's memory, and each has a stream of its own for what reads the gathered
/// weights: the gather of the second group waits for the readers of the first.
#[test]
fn gathered_memory_is_written_again_behind_its_last_reader() {
    const SHAPE: Shape = Shape::new(LEN, 32);
    let run = || -> Result<(), ShardError> {
        let [gathers, first, second] = [(); 3].map(|()| Queued::default());
        let comm: Arc<dyn Communicator<Queued>> = LocalComm::solo(&gathers).into();
        let pool = GatherPool::new(&gathers);
        let group = |reader: &Queued, value: u8| {
            let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
            let spec = ShardSpec::new(&recipe, SHAPE, 1, 0)?;
            let shard = ShardedTensor::new(&gathers, recipe, spec)?;
            let data = shard.local().buffers()[0].storage.clone();
            reader.copy(&at_rest(value, data.len())?, 0..data.len(), &data, 0)?;
            GatherGroup::new(reader, comm.clone(), &pool, vec![shard], true)
        };
        let mut groups = [group(&first, 1)?, group(&second, 2)?];
        let seen = [(); 2].map(|()| first.alloc::<u8>(SHAPE.elements()));
        for ((group, reader), seen) in groups.iter_mut().zip([&first, &second]).zip(&seen) {
            let seen = seen.as_ref().map_err(Clone::clone)?;
            group.unshard(Phase::Forward)?;
            let data = &group.tensor(0)?.buffers()[0].storage;
            // Queued: nothing but the memory's next writer makes anyone wait for it.
            reader.copy(data, 0..seen.len(), seen, 0)?;
            group.reshard();
        }
        assert_eq!(pool.sets(), 1, "the groups share one set");
        for (reader, seen, value) in [(&second, &seen[1], 2), (&first, &seen[0], 1)] {
            let seen = seen.as_ref().map_err(Clone::clone)?;
            assert_eq!(reader.download(seen)?, [value; SHAPE.elements()]);
        }
        Ok(())
    };
    run().unwrap_or_else(|e| panic!("{e}"));
}

/// A bucket is reduced behind the work that wrote it, a third one waits for the memory of the first, and the sums are
/// there for what follows the step.
#[test]
fn gradients_in_buckets_follow_their_writers_and_leave_memory_to_the_next() {
    const PARAMS: usize = 5;
    let run = || -> Result<(), ShardError> {
        let [compute, reductions] = [(); 2].map(|()| Queued::default());
        let comm: Arc<dyn Communicator<Queued>> = LocalComm::solo(&reductions).into();
        let mesh = MeshComm::new(Mesh::sharded(1), comm)?;
        let param = |number: usize| {
            Ok(GradParam {
                name: number.to_string(),
                ranges: vec![0..LEN],
                out: compute.alloc(LEN)?,
            })
        };
        let params = (0..PARAMS)
            .map(param)
            .collect::<Result<Vec<_>, ShardError>>()?;
        // Each gradient is a bucket.
        let options = GradBucketOptions {
            bytes: 0,
            ..GradBucketOptions::default()
        };
        let mut buckets = GradBuckets::new(&compute, &mesh, params.clone(), options)?;
        let seen = (0..PARAMS).map(|_| compute.alloc::<f32>(LEN));
        let seen = seen.collect::<Result<Vec<_>, _>>()?;
        let give = |buckets: &mut GradBuckets<Queued>, param: usize, value: f32| {
            let Source::F32(grad) = buckets.grad(param)? else {
                unreachable!("the gradients are f32");
            };
            // Queued: nothing but the bucket makes anyone wait for it.
            compute.copy(&at_rest(value, LEN)?, 0..LEN, &grad, 0)?;
            buckets.push(param)
        };
        for step in 0..3 {
            for param in 0..PARAMS {
                give(&mut buckets, param, (10 * step + param) as f32)?;
            }
            assert_eq!(buckets.finish()?, [1; PARAMS]);
            for (param, seen) in params.iter().zip(&seen) {
                compute.copy(&param.out, 0..LEN, seen, 0)?;
            }
            // The last step is read; the earlier ones are not, so that the next one comes upon them.
            if step == 1 {
                // What is forgotten is behind what follows, too.
                give(&mut buckets, 0, -1.0)?;
                buckets.discard()?;
                compute.clear(&params[0].out)?;
                assert_eq!(compute.download(&params[0].out)?, [0.0; LEN]);
                reductions.synchronize()?;
                assert_eq!(compute.download(&params[0].out)?, [0.0; LEN]);
            }
        }
        for (param, seen) in seen.iter().enumerate() {
            assert_eq!(compute.download(seen)?, [(20 + param) as f32; LEN]);
        }
        assert_eq!(buckets.resident_bytes(), 2 * 4 * LEN);
        Ok(())
    };
    run().unwrap_or_else(|e| panic!("{e}"));
}
