//! Ranks with a handle each: what a collective reads was written, and is read before it changes,
//! though nothing but the collective orders the handles.

use std::sync::{Arc, Mutex};

use lowp_comm::{
    Collective, CommError, Communicator, Control, GatherItem, GradWire, LocalComm, Mesh, MeshComm,
    ReduceItem, Traffic, run_ranks_on,
};
use lowp_format::{AnyRecipe, Phase, RecipeOptions, ReshardAfterForward, Shape};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_shard::{
    GRAD_REDUCERS, GatherGroup, GatherPool, GradBucketOptions, GradBuckets, GradParam, Reduction,
    Reshard, ShardError, ShardSpec, ShardedTensor,
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
            memory: 0,
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
fn gathered_memory_is_written_again_after_its_last_reader() {
    const SHAPE: Shape = Shape::new(LEN, 32);
    let run = || -> Result<(), ShardError> {
        let [gathers, first, second] = [(); 3].map(|()| Queued::default());
        let comm: Arc<dyn Communicator<Queued>> = LocalComm::solo(&gathers).into();
        let pool = GatherPool::new(&gathers);
        let group = |reader: &Queued, value: u8| {
            let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
            let spec = ShardSpec::new(&recipe, SHAPE, 1, 0)?;
            let shard = ShardedTensor::new(reader, recipe, spec)?;
            let data = shard.local().buffers()[0].storage.clone();
            reader.copy(&at_rest(value, data.len())?, 0..data.len(), &data, 0)?;
            GatherGroup::new(reader, comm.clone(), &pool, vec![shard], true)
        };
        let mut groups = [group(&first, 1)?, group(&second, 2)?];
        let seen = [&first, &second].map(|reader| reader.alloc::<u8>(SHAPE.elements()));
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

/// A rank that is alone, with communicators beside it on `others`.
#[derive(Debug)]
struct Several {
    comm: LocalComm<Queued>,
    others: Mutex<Vec<Queued>>,
}

impl Communicator<Queued> for Several {
    fn control(&self) -> &dyn Control {
        self.comm.control()
    }

    fn backend(&self) -> &Queued {
        self.comm.backend()
    }

    fn is_enqueued(&self) -> bool {
        self.comm.is_enqueued()
    }

    fn enqueue(&self, label: &str, batch: Collective<'_, Queued>) -> Result<(), CommError> {
        self.comm.enqueue(label, batch)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<Queued>>, CommError> {
        self.comm.split(color, key)
    }

    fn beside(&self) -> Result<Option<Arc<dyn Communicator<Queued>>>, CommError> {
        let other = self.others.lock().expect("no panic").pop();
        Ok(other.map(|other| LocalComm::solo(&other).into()))
    }

    fn count(&self, sent: Traffic) {
        self.comm.count(sent);
    }

    fn traffic(&self) -> Traffic {
        self.comm.traffic()
    }
}

/// Communicators that reduce the buckets of a step.
const REDUCERS: [usize; 2] = [1, GRAD_REDUCERS];

/// Gradients of one rank that are a bucket each, written and read by one handle and reduced by others.
struct Step {
    compute: Queued,
    /// That of the rank's communicator, or those beside it.
    reductions: Vec<Queued>,
    params: Vec<GradParam<Queued>>,
    buckets: GradBuckets<Queued>,
    seen: Vec<CpuBuffer<f32>>,
    /// What becomes of the gradients of each micro-batch, which are the same.
    micros: &'static [Reduction],
    /// Gradients that were pushed since the last step ended.
    pushed: usize,
}

impl Step {
    const PARAMS: usize = 5;

    fn new(micros: &'static [Reduction], reducers: usize) -> Result<Self, ShardError> {
        let compute = Queued::default();
        let reductions: Vec<_> = (0..reducers).map(|_| Queued::default()).collect();
        let comm: Arc<dyn Communicator<Queued>> = match &*reductions {
            [reductions] => LocalComm::solo(reductions).into(),
            several => Arc::new(Several {
                comm: LocalComm::solo(&Queued::default()),
                others: Mutex::new(several.to_vec()),
            }),
        };
        let mesh = MeshComm::new(Mesh::sharded(1), comm)?;
        let param = |number: usize| {
            Ok(GradParam {
                block: None,
                name: number.to_string(),
                ranges: std::iter::once(0..LEN).collect(),
                out: compute.alloc(LEN)?,
            })
        };
        let params = (0..Self::PARAMS).map(param);
        let params = params.collect::<Result<Vec<_>, ShardError>>()?;
        let options = GradBucketOptions {
            bytes: 0,
            ..GradBucketOptions::default()
        };
        let buckets = GradBuckets::new(&compute, &mesh, params.clone(), options)?;
        let seen = (0..Self::PARAMS).map(|_| compute.alloc::<f32>(LEN));
        Ok(Self {
            seen: seen.collect::<Result<_, _>>()?,
            compute,
            reductions,
            params,
            buckets,
            micros,
            pushed: 0,
        })
    }

    fn give(&mut self, param: usize, from: &CpuBuffer<f32>) -> Result<(), ShardError> {
        let Source::F32(grad) = self.buckets.grad(param)? else {
            unreachable!("the gradients are f32");
        };
        // Queued: nothing but the bucket makes anyone wait for it.
        self.compute.copy(from, 0..LEN, &grad, 0)?;
        self.pushed += 1;
        self.buckets.push(param)
    }

    /// A step whose gradients come from `from`; the sums are copied after it.
    fn run(&mut self, from: &[CpuBuffer<f32>]) -> Result<(), ShardError> {
        for &reduction in self.micros {
            self.buckets.begin(reduction)?;
            for (param, from) in from.iter().enumerate() {
                self.give(param, from)?;
            }
            self.buckets.flush()?;
        }
        let contributions = self.buckets.finish()?.contributions;
        assert_eq!(contributions, [self.micros.len(); Self::PARAMS]);
        self.pushed = 0;
        self.look()
    }

    /// Copies the sums.
    fn look(&self) -> Result<(), ShardError> {
        for (param, seen) in self.params.iter().zip(&self.seen) {
            self.compute.copy(&param.out, 0..LEN, seen, 0)?;
        }
        Ok(())
    }

    /// Checks what the last step, of gradients [`given`] for `step`, left.
    fn check(&self, step: usize) -> Result<(), ShardError> {
        for (param, seen) in self.seen.iter().enumerate() {
            let expected = [(self.micros.len() * (10 * step + param)) as f32; LEN];
            assert_eq!(self.compute.download(seen)?, expected, "step {step}");
        }
        Ok(())
    }
}

/// The gradients of step `step`.
fn given(step: usize) -> Result<Vec<CpuBuffer<f32>>, ShardError> {
    let values = (0..Step::PARAMS).map(|param| (10 * step + param) as f32);
    values.map(|value| at_rest(value, LEN)).collect()
}

/// A bucket is reduced after the work that wrote it, a third one waits for the memory of the first, and the sums are
/// there for what follows the step.
#[test]
fn gradients_in_buckets_follow_their_writers_and_leave_memory_to_the_next() {
    let run = |reducers| -> Result<(), ShardError> {
        let mut step = Step::new(&[Reduction::Scatter], reducers)?;
        // Steps are not read in between, so that each comes upon the one before.
        for number in 0..3 {
            step.run(&given(number)?)?;
        }
        step.check(2)?;
        // What follows also comes after work that is discarded.
        step.give(0, &at_rest(-1.0, LEN)?)?;
        step.buckets.discard()?;
        let out = step.params[0].out.clone();
        step.compute.clear(&out)?;
        assert_eq!(step.compute.download(&out)?, [0.0; LEN]);
        for reductions in &step.reductions {
            reductions.synchronize()?;
        }
        assert_eq!(step.compute.download(&out)?, [0.0; LEN]);
        assert_eq!(step.buckets.resident_bytes(), 2 * 4 * LEN);
        Ok(())
    };
    for reducers in REDUCERS {
        run(reducers).unwrap_or_else(|e| panic!("{reducers}: {e}"));
    }
}

/// A step that was captured, or discarded in a capture, leaves buckets that work outside, and in the next capture.
#[test]
fn gradients_in_buckets_can_be_captured_with_the_step() {
    let run = |micros, reducers| -> Result<(), ShardError> {
        let mut step = Step::new(micros, reducers)?;
        step.run(&given(1)?)?;
        let source = given(2)?;
        let compute = step.compute.clone();
        let graph = compute.capture(|| step.run(&source))?;
        for number in 3..5 {
            for (to, value) in source.iter().zip(&given(number)?) {
                compute.copy(value, 0..LEN, to, 0)?;
            }
            compute.launch(&graph)?;
            step.check(number)?;
        }
        step.run(&given(5)?)?;
        step.check(5)?;
        let again = compute.capture(|| -> Result<(), ShardError> {
            step.give(0, &source[0])?;
            step.buckets.discard()?;
            step.run(&source)
        })?;
        compute.launch(&again)?;
        step.check(4)?;
        step.run(&given(6)?)?;
        step.check(6)
    };
    use Reduction::{Finish, Keep, Scatter};
    // LocalComm adds to earlier sums on the host, which no graph does.
    for micros in [&[Scatter][..], &[Keep, Finish], &[Keep, Keep, Scatter]] {
        for reducers in REDUCERS {
            run(micros, reducers).unwrap_or_else(|e| panic!("{micros:?}, {reducers}: {e}"));
        }
    }
}

/// The parts that a smaller group of ranks keeps are new memory of a group that borrows a set that is not new.
#[test]
fn parts_of_weights_are_written_after_the_zeros_of_their_memory() {
    const SHAPE: Shape = Shape::new(4 * LEN, 32);
    let backends: Vec<Queued> = (0..4).map(|_| Queued::default()).collect();
    let run = run_ranks_on(&backends, TIMEOUT, |rank, comm| -> Result<(), ShardError> {
        let (compute, memory) = (&backends[rank], Queued::default());
        let pool = GatherPool::new(&memory);
        let reshard = Reshard::new(ReshardAfterForward::Group(2), &comm)?;
        let group = |value: u8| {
            let recipe = AnyRecipe::from_name("mxfp8-2d", &RecipeOptions::default())?;
            let spec = ShardSpec::new(&recipe, SHAPE, 4, rank)?;
            let shard = ShardedTensor::new(compute, recipe, spec)?;
            for buffer in shard.local().buffers() {
                let len = buffer.storage.len();
                compute.copy(&at_rest(value, len)?, 0..len, &buffer.storage, 0)?;
            }
            GatherGroup::new(compute, comm.clone(), &pool, vec![shard], reshard.clone())
        };
        // A set goes with the last group of its shapes.
        let mut groups = Vec::new();
        for value in 1..3 {
            let mut group = group(value)?;
            group.unshard(Phase::Forward)?;
            group.reshard();
            compute.synchronize()?;
            // Late, as work that nobody waits for may be.
            memory.synchronize()?;
            group.unshard(Phase::Backward)?;
            for buffer in group.tensor(0)?.buffers() {
                let found = compute.download(&buffer.storage)?;
                assert!(
                    found.iter().all(|&byte| byte == value),
                    "{}",
                    buffer.spec.key
                );
            }
            group.reshard();
            groups.push(group);
        }
        assert_eq!(pool.sets(), 1, "the groups share one set");
        Ok(())
    });
    run.unwrap_or_else(|e| panic!("{e}"));
}

/// A world of one rank may go on after a failure, but not with a step of which a part is missing.
#[test]
fn gradients_in_buckets_begin_anew_after_a_failure() {
    // On the handle that writes gradients, and on each that reduces them.
    let places = REDUCERS.map(|n| (0..=n).map(move |place| (n, place.checked_sub(1))));
    for (reducers, on_reductions) in places.into_iter().flatten() {
        let run = |call: u64| -> Result<bool, ShardError> {
            let mut step = Step::new(&[Reduction::Scatter], reducers)?;
            step.run(&given(1)?)?;
            let handle = match on_reductions {
                Some(number) => step.reductions[number].clone(),
                None => step.compute.clone(),
            };
            handle.fail_at(call);
            let failed = step.run(&given(2)?);
            if handle.will_fail() {
                return Ok(false);
            }
            assert!(failed.is_err(), "call {call}");
            if let Ok(reduced) = step.buckets.finish() {
                // It failed between two parameters, or after all of them.
                let all: usize = reduced.contributions.iter().sum();
                assert_eq!(all, step.pushed, "call {call}");
                if all == Step::PARAMS {
                    step.look()?;
                    step.check(2)?;
                }
            }
            step.buckets.discard()?;
            step.run(&given(3)?)?;
            step.check(3)?;
            // Memory is what it was.
            assert_eq!(step.buckets.resident_bytes(), 2 * 4 * LEN, "call {call}");
            Ok(true)
        };
        let failures = (1..).take_while(|&call| run(call).unwrap_or_else(|e| panic!("{e}")));
        let least = Step::PARAMS / reducers;
        assert!(failures.count() > least, "{reducers}, {on_reductions:?}");
    }
}
