//! Handles of one device: memory is freed, and given back to others, after the work of every stream.

#![expect(
    unsafe_code,
    reason = "wraps streams and device memory as another library would"
)]

use std::sync::{Arc, Mutex, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;

use super::rig::device;
use super::*;
use lowp_kernels::{AmaxJob, Cuda, CudaBuffer, CudaMark, SumSquaresJob};

/// Entries of what is freed.
const LEN: usize = 1 << 20;
/// Entries that are copied to keep a stream busy.
const LONG: usize = 1 << 28;
/// Copies of them: 0.2 s of an H200.
const COPIES: usize = 400;

/// Work that keeps a stream busy for long, given to it at once.
struct Delay([CudaBuffer<f32>; 2]);

impl Delay {
    fn new(rig: &Rig<Cuda>) -> Self {
        let buffers = [(); 2].map(|()| rig.backend.alloc(LONG).unwrap());
        rig.backend.synchronize().unwrap();
        Self(buffers)
    }

    fn give(&self, cuda: &Cuda) {
        self.give_times(cuda, 1);
    }

    fn give_times(&self, cuda: &Cuda, times: usize) {
        let [from, to] = &self.0;
        for _ in 0..times * COPIES {
            cuda.copy::<f32>(from, 0..LONG, to, 0).unwrap();
        }
    }
}

fn ones(cuda: &Cuda) -> CudaBuffer<f32> {
    cuda.upload(&vec![1f32; LEN]).unwrap()
}

/// `owner` frees memory that `reader` has not read yet, and gets other memory, which it clears. Other tests can
/// hold up this thread until the read is over; then it is tried again with a longer delay.
fn freed_after(rig: &Rig<Cuda>, owner: &Cuda, reader: &Cuda) {
    let delay = Delay::new(rig);
    let in_flight = |times: usize| {
        let from = ones(owner);
        let to = reader.alloc::<f32>(LEN).unwrap();
        delay.give_times(reader, times);
        reader.copy::<f32>(&from, 0..LEN, &to, 0).unwrap();
        let read = reader.mark().unwrap();
        drop(from);
        let others = [(); 4].map(|()| owner.alloc::<f32>(LEN).unwrap());
        let in_flight = !read.passed().unwrap();
        assert!(reader.download(&to).unwrap().iter().all(|&x| x == 1.0));
        for other in others {
            assert!(owner.download(&other).unwrap().iter().all(|&x| x == 0.0));
        }
        in_flight
    };
    let tried = [1, 2, 4, 8].into_iter().any(in_flight);
    assert!(tried, "the copy was never in flight when memory was freed");
}

#[test]
fn handles_made_apart_free_after_the_work_of_each_other() {
    device::once(|rig| {
        let ordinal = rig.backend.ordinal();
        let [owner, reader] = [(); 2].map(|()| Cuda::new(ordinal).unwrap());
        freed_after(rig, &owner, &reader);
        freed_after(rig, &reader, &rig.backend);
    });
}

#[test]
fn memory_is_freed_after_the_work_of_other_streams() {
    device::once(|rig| {
        let ordinal = rig.backend.ordinal();
        let stream = CudaContext::new(ordinal).unwrap().new_stream().unwrap();
        // SAFETY: the stream outlives everything that is made from the handle, and nothing captures it.
        let other = unsafe { Cuda::with_stream(ordinal, stream.cu_stream() as u64) }.unwrap();
        freed_after(rig, &rig.backend, &other);
        freed_after(rig, &other, &rig.backend);
    });
}

/// Other tests can hold up this thread until the copies are over; then it is tried again with more of them.
#[test]
fn the_last_handle_of_a_stream_waits_for_its_work() {
    device::once(|rig| {
        let delay = Delay::new(rig);
        let in_flight = |times: usize| {
            let reader = rig.backend.fork().unwrap();
            let from = ones(&rig.backend);
            let to = rig.backend.alloc::<f32>(LEN).unwrap();
            reader.wait_for(&rig.backend).unwrap();
            delay.give_times(&reader, times);
            reader.copy::<f32>(&from, 0..LEN, &to, 0).unwrap();
            let read = reader.mark().unwrap();
            let clone = reader.clone();
            drop(reader);
            let in_flight = !read.passed().unwrap();
            drop(clone);
            assert!(read.passed().unwrap());
            drop(from);
            drop(rig.backend.alloc::<f32>(LEN).unwrap());
            assert!(rig.content::<f32>(&to).iter().all(|&x| x == 1.0));
            in_flight
        };
        let tried = [1, 2, 4, 8].into_iter().any(in_flight);
        assert!(tried, "a handle that was not the last one waited");
    });
}

#[test]
fn a_stream_of_the_highest_priority_follows_the_one_that_it_was_made_from() {
    device::once(|rig| {
        let delay = Delay::new(rig);
        let [from, to] = [(); 2].map(|()| rig.backend.alloc::<f32>(LEN).unwrap());
        let written = ones(&rig.backend);
        delay.give(&rig.backend);
        rig.backend.copy(&written, 0..LEN, &from, 0).unwrap();
        let first = rig.backend.fork_with_priority().unwrap();
        first.copy(&from, 0..LEN, &to, 0).unwrap();
        assert!(first.download(&to).unwrap().iter().all(|&x| x == 1.0));
    });
}

#[test]
fn handles_made_apart_share_buffers_and_plans() {
    device::once(|rig| {
        let ordinal = rig.backend.ordinal();
        assert!(ordinal < Cuda::count().unwrap());
        let other = Cuda::new(ordinal).unwrap();
        let (source, out) = (ones(&other), rig.buffer(&[0f32]));
        let plan = other.plan(amax(&source, &out)).unwrap();
        other.wait_for(&rig.backend).unwrap();
        other.run(&plan, &StepScalars::default()).unwrap();
        rig.backend.wait_for(&other).unwrap();
        assert_eq!(rig.content::<f32>(&out), [1.0]);
        let marks = [&other, &rig.backend].map(|cuda| cuda.mark().unwrap());
        assert!(marks[0].milliseconds_to(&marks[1]).is_ok());
    });
}

#[test]
fn sums_of_squares_run_on_the_handle_that_planned_them() {
    device::once(|rig| {
        let (handle, other) = (&rig.backend, rig.backend.fork().unwrap());
        let (source, out) = (ones(handle), rig.buffer(&[0u8; 16]));
        let source = Source::F32(source);
        let plan = handle
            .plan(Work::SumSquares(vec![SumSquaresJob { source, out }]))
            .unwrap();
        let none = StepScalars::default();
        let scalars = handle.upload(&none.to_bytes()).unwrap();
        assert_eq!(other.run(&plan, &none), Err(KernelError::OtherHandle));
        let made = other.run_with(&plan, &scalars);
        assert_eq!(made, Err(KernelError::OtherHandle));
        // Nor may another handle capture it, or a capture give it to another handle: the graph runs where it was captured.
        assert!(other.capture(|| other.run(&plan, &none)).is_err());
        let through = other.capture(|| {
            handle.wait_for(&other)?;
            handle.run(&plan, &none)?;
            other.wait_for(handle)
        });
        assert_eq!(through.map(|_| ()), Err(KernelError::OtherHandle));
        let graph = handle.capture(|| handle.run(&plan, &none)).unwrap();
        handle.clone().run(&plan, &none).unwrap();
        handle.launch(&graph).unwrap();
    });
}

fn amax(source: &CudaBuffer<f32>, out: &CudaBuffer<f32>) -> Work<Cuda> {
    Work::Amax(vec![AmaxJob {
        shape: Shape::new(1, source.len()),
        start: 0,
        source: Source::F32(source.clone()),
        source_rounding: SourceRounding::F32,
        out: out.clone(),
        tensor: Some(0),
        blocks: Vec::new(),
        hadamard: false,
    }])
}

/// Memory of another library, which notes whether its last use was over when it was given back.
struct Lender {
    #[expect(dead_code, reason = "the memory that is lent")]
    memory: CudaBuffer<f32>,
    last_use: Arc<OnceLock<CudaMark>>,
    was_over: Arc<Mutex<Option<bool>>>,
}

impl Drop for Lender {
    fn drop(&mut self) {
        let over = self.last_use.get().map(|mark| mark.passed().unwrap());
        *self.was_over.lock().unwrap() = over;
    }
}

struct Loan {
    buffer: CudaBuffer<f32>,
    last_use: Arc<OnceLock<CudaMark>>,
    was_over: Arc<Mutex<Option<bool>>>,
}

impl Loan {
    fn new(rig: &Rig<Cuda>) -> Self {
        let (memory, last_use, was_over) = (ones(&rig.backend), Arc::default(), Arc::default());
        let lender = Lender {
            memory: memory.clone(),
            last_use: Arc::clone(&last_use),
            was_over: Arc::clone(&was_over),
        };
        // SAFETY: the lender holds the memory, and nothing else touches it.
        let buffer = unsafe {
            CudaBuffer::<f32>::from_raw(&rig.backend, memory.pointer(), LEN, lender).unwrap()
        };
        Self {
            buffer,
            last_use,
            was_over,
        }
    }
}

/// Waits until the memory is given back. Streams of other tests may be in flight, too.
fn given_back(rig: &Rig<Cuda>, was_over: &Mutex<Option<bool>>) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        rig.backend.synchronize().unwrap();
        if let Some(over) = *was_over.lock().unwrap() {
            return over;
        }
        sleep(Duration::from_millis(1));
    }
    panic!("memory of others was not given back");
}

/// Other tests can hold up this thread until the last use is over; then it is tried again with a longer delay.
#[test]
fn memory_of_others_is_given_back_after_its_last_use() {
    device::once(|rig| {
        let (delay, user, out) = (
            Delay::new(rig),
            rig.backend.fork().unwrap(),
            rig.buffer(&[0f32]),
        );
        let in_flight = |times: usize| {
            let loan = Loan::new(rig);
            // The handle of the plan, of which the lender knows nothing, is on a stream of its own.
            let plan = user.plan(amax(&loan.buffer, &out)).unwrap();
            delay.give_times(&user, times);
            user.run(&plan, &StepScalars::default()).unwrap();
            assert!(loan.last_use.set(user.mark().unwrap()).is_ok());
            drop(loan.buffer);
            drop(plan);
            // Not in use by any handle, but by the device; the drop did not wait for that.
            let given = *loan.was_over.lock().unwrap();
            let in_flight = !loan.last_use.get().unwrap().passed().unwrap();
            assert!(!in_flight || given.is_none(), "given back while in use");
            assert!(given_back(rig, &loan.was_over));
            assert_eq!(user.download::<f32>(&out).unwrap(), [1.0]);
            in_flight
        };
        let tried = [1, 2, 4, 8].into_iter().any(in_flight);
        assert!(
            tried,
            "the last use was never in flight when memory was dropped"
        );
    });
}

/// What is dropped within a capture does not disturb it.
#[test]
fn memory_may_go_within_a_capture() {
    device::once(|rig| {
        let (delay, user) = (Delay::new(rig), rig.backend.fork().unwrap());
        let loan = Loan::new(rig);
        let [to, own] = [(); 2].map(|()| user.alloc::<f32>(LEN).unwrap());
        let (source, out) = (ones(&rig.backend), rig.buffer(&[0f32]));
        let plan = rig.plan(amax(&source, &out)).unwrap();
        user.wait_for(&rig.backend).unwrap();
        delay.give(&user);
        user.copy::<f32>(&loan.buffer, 0..LEN, &to, 0).unwrap();
        user.copy::<f32>(&to, 0..LEN, &own, 0).unwrap();
        assert!(loan.last_use.set(user.mark().unwrap()).is_ok());
        let graph = rig.backend.capture(|| {
            drop((own, loan.buffer));
            rig.backend.run(&plan, &StepScalars::default())?;
            // Waits for its stream, and then gives back what its work used.
            drop(user);
            Ok::<_, KernelError>(())
        });
        let graph = graph.unwrap();
        assert!(given_back(rig, &loan.was_over));
        rig.backend.launch(&graph).unwrap();
        assert_eq!(rig.content::<f32>(&out), [1.0]);
        assert!(rig.content::<f32>(&to).iter().all(|&x| x == 1.0));
    });
}

#[test]
fn what_belongs_to_another_device_is_rejected() {
    device::pair(|[here, there]| {
        let [a, b] = [&here.backend, &there.backend];
        let (mine, out, theirs) = (ones(a), a.upload(&[0f32]).unwrap(), ones(b));
        let rejected = |result: Result<(), KernelError>| {
            let error = result.unwrap_err();
            assert!(matches!(error, KernelError::OtherDevice { ordinal: 0, .. }));
            assert!(
                error.to_string().contains("belongs to CUDA device 1"),
                "{error}"
            );
        };
        rejected(a.write::<f32>(&theirs, 0, &[0.0]));
        rejected(a.read::<f32>(&theirs, 0, &mut [0.0]));
        rejected(a.copy::<f32>(&theirs, 0..1, &mine, 0));
        rejected(a.copy::<f32>(&mine, 0..1, &theirs, 0));
        rejected(a.clear::<f32>(&theirs));
        rejected(a.plan(amax(&theirs, &out)).map(|_| ()));
        rejected(a.wait_for(b));
        let [first, later] = [a, b].map(|cuda| cuda.mark().unwrap());
        rejected(first.milliseconds_to(&later).map(|_| ()));
        let plan = b.plan(amax(&theirs, &b.upload(&[0f32]).unwrap())).unwrap();
        rejected(a.run(&plan, &StepScalars::default()));
        rejected(
            a.capture(|| a.run(&plan, &StepScalars::default()))
                .map(|_| ()),
        );
        rejected(a.wait(&b.record().unwrap()));
    });
}

/// A stream that takes part in a capture has earlier work to do: the graph follows that, and reads scalars
/// that are there.
#[test]
fn a_graph_follows_the_earlier_work_of_its_streams() {
    device::once(|rig| {
        let (delay, other) = (Delay::new(rig), rig.backend.fork().unwrap());
        let (source, out) = (ones(&rig.backend), rig.buffer(&[0f32]));
        let (from, seen) = (ones(&rig.backend), rig.backend.alloc::<f32>(LEN).unwrap());
        let plan = rig.plan(amax(&source, &out)).unwrap();
        rig.backend.synchronize().unwrap();
        delay.give(&other);
        other.clear::<f32>(&from).unwrap();
        let graph = rig.backend.capture(|| {
            other.wait_for(&rig.backend)?;
            other.run(&plan, &StepScalars::default())?;
            rig.backend.wait_for(&other)?;
            rig.backend.copy::<f32>(&from, 0..LEN, &seen, 0)
        });
        rig.backend.launch(&graph.unwrap()).unwrap();
        assert_eq!(rig.content::<f32>(&out), [1.0]);
        assert!(rig.content::<f32>(&seen).iter().all(|&x| x == 0.0));
    });
}

/// Within a capture that it takes no part in, a stream waits as it does elsewhere.
#[test]
fn a_wait_beside_a_capture_counts() {
    device::once(|rig| {
        let (delay, [apart, late]) = (
            Delay::new(rig),
            [(); 2].map(|()| rig.backend.fork().unwrap()),
        );
        let [from, to, seen] = [(); 3].map(|()| rig.backend.alloc::<f32>(LEN).unwrap());
        let source = ones(&rig.backend);
        rig.backend.synchronize().unwrap();
        delay.give(&late);
        late.copy::<f32>(&source, 0..LEN, &from, 0).unwrap();
        let written = late.record().unwrap();
        let graph = rig.backend.capture(|| {
            apart.wait(&written)?;
            rig.backend.clear::<f32>(&to)
        });
        apart.copy::<f32>(&from, 0..LEN, &seen, 0).unwrap();
        assert!(apart.download(&seen).unwrap().iter().all(|&x| x == 1.0));
        drop(graph.unwrap());
    });
}

/// A call that no capture allows ends the capture, whatever its work then says; the next capture is whole.
#[test]
fn a_capture_that_is_lost_says_so() {
    device::once(|rig| {
        let (source, out) = (ones(&rig.backend), rig.buffer(&[0f32]));
        let plan = rig.plan(amax(&source, &out)).unwrap();
        rig.backend.synchronize().unwrap();
        let work = || rig.backend.run(&plan, &StepScalars::default());
        for ignored in [false, true] {
            let lost = rig.backend.capture(|| {
                let whole = CudaContext::new(0).unwrap().synchronize();
                assert!(whole.is_err());
                if ignored { Ok(()) } else { work() }
            });
            assert!(
                matches!(lost, Err(KernelError::CaptureLost)),
                "{lost:?} {ignored}"
            );
        }
        assert_eq!(rig.content::<f32>(&out), [0.0]);
        let graph = rig.backend.capture(work).unwrap();
        rig.backend.launch(&graph).unwrap();
        assert_eq!(rig.content::<f32>(&out), [1.0]);
    });
}
