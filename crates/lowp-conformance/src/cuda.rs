//! What only the CUDA backend has: graphs, streams, and memory of others.

#![expect(unsafe_code, reason = "wraps device memory as another library would")]

use std::time::Instant;

use super::rig::device;
use super::*;
use lowp_kernels::{Cuda, CudaBuffer, DeviceBuffer, GroupScalars, Rule, UpdateAmax, UpdateJob};

/// The buffers of a step in two passes, and its work in order.
struct Step {
    results: [CudaBuffer<f32>; 4],
    bytes: CudaBuffer<u8>,
    work: Vec<Work<Cuda>>,
}

fn step(rig: &Rig<Cuda>) -> Step {
    let shape = Shape::new(96, 160);
    let case = case(Code::E4M3, CURRENT, None, Some(TRANSPOSED));
    let len = shape.elements();
    let master = rig.buffer(&values(len, 1, false));
    let [exp_avg, exp_avg_sq] = [0, 0].map(|_| rig.buffer(&vec![0f32; len]));
    let observed = rig.buffer(&[0f32]);
    let slot = |buffer: &CudaBuffer<f32>| Slot {
        buffer: buffer.clone(),
        index: 0,
    };
    let adamw = UpdateJob {
        master: Source::F32(master.clone()).into(),
        states: vec![
            Source::F32(exp_avg.clone()).into(),
            Source::F32(exp_avg_sq.clone()).into(),
        ],
        grad: source(rig, &values(len, 2, false), true).0,
        group: 0,
        random: None,
        rule: Rule::AdamW,
        source_rounding: SourceRounding::F32,
        amax: Some(UpdateAmax::of_tensor(slot(&observed))),
        encode: None,
    };
    let source = Source::F32(master.clone());
    let outer = case.outer(shape, 1.0);
    let mut encode = encode_job(rig, &case, &case.specs(), shape, source, &outer);
    encode.tensor = [(); 2].map(|()| Some(TensorInput::Observed(slot(&observed))));
    Step {
        results: [master, exp_avg, exp_avg_sq, observed],
        bytes: encode.targets[0].bytes.clone(),
        work: vec![Work::Update(vec![adamw]), Work::Encode(vec![encode])],
    }
}

fn scalars(step: u64) -> StepScalars {
    let group = GroupScalars {
        lr: 1e-2,
        ..GroupScalars::default()
    };
    StepScalars {
        groups: vec![group.at_step(step)],
        ..StepScalars::default()
    }
}

/// Forty replays: more than scalars may be in flight.
#[test]
fn a_captured_step_equals_its_runs() {
    device::once(|rig| {
        let (apart, captured) = (step(rig), step(rig));
        let plans = |work: Vec<Work<Cuda>>| -> Vec<_> {
            work.into_iter().map(|w| rig.plan(w).unwrap()).collect()
        };
        let (apart_plans, captured_plans) = (plans(apart.work), plans(captured.work));
        let device = rig.buffer(&scalars(1).to_bytes());
        let run = |plan| rig.backend.run_with(plan, &device);
        let graph = rig
            .backend
            .capture(|| captured_plans.iter().try_for_each(run))
            .unwrap();
        // The graph holds what it needs.
        drop(captured_plans);
        for step in 1..=40 {
            let scalars = scalars(step);
            for plan in &apart_plans {
                rig.backend.run(plan, &scalars).unwrap();
            }
            rig.backend
                .write::<u8>(&device, 0, &scalars.to_bytes())
                .unwrap();
            rig.backend.launch(&graph).unwrap();
        }
        for (a, b) in apart.results.iter().zip(&captured.results) {
            assert_eq!(bits(&rig.content::<f32>(a)), bits(&rig.content::<f32>(b)));
        }
        let [a, b] = [&apart.bytes, &captured.bytes].map(|bytes| rig.content::<u8>(bytes));
        assert_eq!(a, b);
        let other = rig.backend.fork().unwrap();
        assert_eq!(other.launch(&graph), Err(KernelError::OtherStream));
    });
}

/// The rig, and the same with buffers in page-locked memory of the host.
fn both_places(test: impl Fn([&Rig<Cuda>; 2])) {
    device::once(|rig| {
        let host = Rig::new(rig.backend.with_host_buffers(), "buffers of the host");
        test([rig, &host]);
    });
}

#[test]
fn a_captured_step_on_the_host_equals_one_on_the_device() {
    both_places(|places| {
        let [on_device, on_host] = places.map(|rig| {
            let Step {
                results,
                bytes,
                work,
            } = step(rig);
            let plans = work.into_iter().map(|work| rig.plan(work).unwrap());
            let plans: Vec<_> = plans.collect();
            let device = rig.buffer(&scalars(1).to_bytes());
            let run = |plan| rig.backend.run_with(plan, &device);
            let graph = rig.backend.capture(|| plans.iter().try_for_each(run));
            let graph = graph.unwrap();
            (1..=3).for_each(|_| rig.backend.launch(&graph).unwrap());
            let results = results.map(|result| bits(&rig.content::<f32>(&result)));
            (results, rig.content::<u8>(&bytes))
        });
        assert_eq!(on_device, on_host);
    });
}

/// Copies in all directions, reads that nobody waits for, and clears.
#[test]
fn memory_of_the_host_is_copied_as_that_of_the_device() {
    both_places(|[rig, host]| {
        let first = values(5000, 4, false);
        let from = host.buffer(&first);
        let [there, back] = [rig, host].map(|rig| rig.backend.alloc::<f32>(5000).unwrap());
        let cuda = &rig.backend;
        cuda.copy::<f32>(&from, 0..5000, &there, 0).unwrap();
        cuda.copy::<f32>(&there, 7..4007, &back, 0).unwrap();
        cuda.copy::<f32>(&from, 0..990, &back, 4010).unwrap();
        let pending = cuda.start_read::<f32>(&back, 0..4000).unwrap();
        let saved = cuda.start_read_bytes::<f32>(&back, 4010..5000).unwrap();
        cuda.clear::<f32>(&back).unwrap();
        assert_eq!(bits(&pending.wait().unwrap()), bits(&first[7..4007]));
        let expected = first[..990].iter().flat_map(|x| x.to_le_bytes());
        assert!(saved.wait().unwrap().into_iter().eq(expected));
        assert!(rig.content::<f32>(&back).iter().all(|x| x.to_bits() == 0));
        assert_eq!(bits(&from.to_vec().unwrap()), bits(&first));
        // More than goes by way of the device at a time.
        let long = values((5 << 20) + 3, 5, true);
        let [from, to] = [&long[..], &vec![0.0; long.len()]].map(|of| host.buffer(of));
        cuda.copy::<f32>(&from, 1..long.len(), &to, 0).unwrap();
        let found = cuda
            .start_read_bytes::<f32>(&to, 0..long.len() - 1)
            .unwrap();
        let expected = long[1..].iter().flat_map(|x| x.to_le_bytes());
        assert!(found.wait().unwrap().into_iter().eq(expected));
    });
}

#[test]
fn copies_and_clears_of_memory_of_the_host_are_captured() {
    both_places(|[rig, host]| {
        let [from, cleared] = [1.0, 2.0].map(|value| host.buffer(&vec![value; 5000]));
        let to = rig.backend.alloc::<f32>(5000).unwrap();
        let graph = rig.backend.capture(|| {
            rig.backend.copy::<f32>(&from, 0..4999, &to, 1)?;
            rig.backend.copy::<f32>(&to, 0..2, &from, 0)?;
            rig.backend.clear::<f32>(&cleared)
        });
        let graph = graph.unwrap();
        for ends in [[0.0, 1.0], [0.0, 0.0]] {
            rig.backend.launch(&graph).unwrap();
            assert_eq!(rig.content::<f32>(&from)[..2], ends);
        }
        assert_eq!(rig.content::<f32>(&to)[..4], [0.0, 0.0, 1.0, 1.0]);
        assert_eq!(rig.content::<f32>(&cleared), [0.0; 5000]);
    });
}

#[test]
fn memory_of_others_is_used_in_place() {
    device::once(|rig| {
        let whole = rig.buffer(&values(1000, 3, false));
        let pointer = whole.pointer() + 4 * 100;
        // SAFETY: the entries lie within `whole`, which the wrapper keeps alive; work is in order.
        let part =
            unsafe { CudaBuffer::<f32>::from_raw(&rig.backend, pointer, 300, whole.clone()) };
        let part = part.unwrap();
        assert_eq!(
            rig.content::<f32>(&part),
            rig.content::<f32>(&whole)[100..400]
        );
        // Overlapping memory is found although the handles differ.
        assert!(rig.backend.copy::<f32>(&whole, 95..105, &part, 0).is_err());
        rig.backend.clear::<f32>(&part).unwrap();
        drop(part);
        let found = rig.content::<f32>(&whole);
        assert!(found[100..400].iter().all(|&x| x == 0.0) && found[400] != 0.0);
        // SAFETY: rejected before it is used.
        let unaligned = unsafe { CudaBuffer::<f32>::from_raw(&rig.backend, pointer + 1, 1, ()) };
        assert!(unaligned.is_err());
    });
}

#[test]
fn streams_wait_for_each_other() {
    device::once(|rig| {
        let other = rig.backend.fork().unwrap();
        let len = 1 << 24;
        let from = rig.buffer(&vec![1f32; len]);
        let to = rig.backend.alloc::<f32>(len).unwrap();
        other.wait_for(&rig.backend).unwrap();
        rig.backend.copy::<f32>(&from, 0..len, &to, 0).unwrap();
        other.wait_for(&rig.backend).unwrap();
        // Freed after the work of both streams, although that has not run yet.
        drop(from);
        let mut last = [0f32];
        other.read(&to, len - 1, &mut last).unwrap();
        assert_eq!(last, [1.0]);
    });
}

/// Work of a stream that has no place in the capture, and one that nothing waits for.
#[test]
fn streams_of_a_graph_are_joined() {
    device::once(|rig| {
        let other = rig.backend.fork().unwrap();
        let buffer = rig.buffer(&[0f32; 8]);
        other.wait_for(&rig.backend).unwrap();
        for joined in [false, true] {
            let error = rig.backend.capture(|| {
                rig.backend.clear::<f32>(&buffer)?;
                if joined {
                    other.wait_for(&rig.backend)?;
                }
                other.clear::<f32>(&buffer)
            });
            let error = error.unwrap_err();
            assert!(matches!(error, KernelError::InCapture { .. }), "{error}");
        }
        let point = rig.backend.capture(|| {
            let point = rig.backend.record()?;
            assert!(point.passed().is_err());
            rig.backend.clear::<f32>(&buffer)
        });
        point.unwrap();
        // Another thread's work is not captured, although it is that of the same handle.
        let graph = rig.backend.capture(|| {
            std::thread::scope(|scope| {
                let work = || rig.backend.write::<f32>(&buffer, 0, &[5.0]);
                scope.spawn(work).join().unwrap()
            })?;
            rig.backend.copy::<f32>(&buffer, 0..1, &buffer, 1)
        });
        let graph = graph.unwrap();
        assert_eq!(rig.content::<f32>(&buffer)[..2], [5.0, 0.0]);
        rig.backend.launch(&graph).unwrap();
        assert_eq!(rig.content::<f32>(&buffer)[..2], [5.0, 5.0]);
    });
}

/// The host goes on while the device is busy, whatever it writes, records, launches and drops, in memory of either. Other tests that make or
/// end streams keep the driver locked until the device is idle, so it is tried until they are done.
#[test]
fn nothing_but_reads_waits_for_the_device() {
    device::once(|rig| {
        let cuda = rig.backend.fork().unwrap();
        let len = 1 << 28;
        let [from, to] = [(); 2].map(|()| cuda.alloc::<f32>(len).unwrap());
        let (other, host) = (cuda.fork().unwrap(), cuda.with_host_buffers());
        let places = [&cuda, &host].map(|place| {
            let small = place.upload(&[0f32; 64]).unwrap();
            let graph = cuda.capture(|| cuda.clear::<f32>(&small)).unwrap();
            (small, graph)
        });
        let goes_on = || {
            cuda.synchronize().unwrap();
            let dropped = host.alloc::<f32>(64).unwrap();
            let (mut pending, mut saved) = (Vec::new(), Vec::new());
            // 0.2 s of an H200.
            for _ in 0..400 {
                cuda.copy::<f32>(&from, 0..len, &to, 0).unwrap();
            }
            let busy = cuda.record().unwrap();
            for i in 0..200 {
                let (small, graph) = &places[i % 2];
                cuda.write::<f32>(small, 0, &[i as f32; 64]).unwrap();
                cuda.launch(graph).unwrap();
                other.wait_for(&cuda).unwrap();
                cuda.wait(&other.record().unwrap()).unwrap();
                pending.push(cuda.start_read::<f32>(small, 0..64).unwrap());
                saved.push(other.start_read_bytes::<f32>(small, 0..64).unwrap());
                cuda.wait(&other.record().unwrap()).unwrap();
                cuda.alloc::<u8>(1 << 20).unwrap();
            }
            cuda.copy::<f32>(&places[1].0, 0..64, &dropped, 0).unwrap();
            drop(dropped);
            let goes_on = !busy.passed().unwrap();
            for pending in pending {
                assert_eq!(pending.wait().unwrap(), [0f32; 64]);
            }
            for saved in saved {
                assert_eq!(saved.wait().unwrap(), [0; 256]);
            }
            goes_on
        };
        let start = Instant::now();
        while !goes_on() {
            assert!(start.elapsed().as_secs() < 90, "the host waited");
        }
    });
}
