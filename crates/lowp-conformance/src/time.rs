//! Streams, points in their work, and captured graphs.

use super::*;
use lowp_kernels::{SumJob, SumSquaresJob};

/// Adds the sum of squares of `from` to `out`: work that shows how often it ran.
fn add<B: Backend>(rig: &Rig<B>, from: &[f32], out: &B::Buffer<u8>) -> B::Plan {
    rig.plan(Work::SumSquares(vec![SumSquaresJob {
        source: Source::F32(rig.buffer(from)),
        out: out.clone(),
    }]))
    .unwrap()
}

fn sum<B: Backend>(rig: &Rig<B>, out: &B::Buffer<u8>) -> f64 {
    let content = rig.content::<u8>(out);
    f64::from_le_bytes(*content.first_chunk().unwrap())
}

/// Adds `value` to `out`: the same, for any handle.
fn raise<B: Backend>(rig: &Rig<B>, value: f32, out: &B::Buffer<f32>) -> B::Plan {
    rig.plan(Work::Sum(vec![SumJob {
        from: Source::F32(rig.buffer(&[value])),
        into: Source::F32(out.clone()),
    }]))
    .unwrap()
}

fn run<B: Backend>(backend: &B, plan: &B::Plan) {
    backend.run(plan, &StepScalars::default()).unwrap();
}

pub fn a_pending_read_has_the_values_of_its_point<B: Backend>(rig: &Rig<B>) {
    let buffer = rig.buffer(&[0f32; 5]);
    let pending: Vec<_> = (1..=40)
        .map(|i| {
            let value = i as f32;
            rig.backend.write::<f32>(&buffer, 1, &[value; 3]).unwrap();
            rig.backend.start_read::<f32>(&buffer, 1..4).unwrap()
        })
        .collect();
    let abandoned = rig.backend.start_read::<f32>(&buffer, 0..5).unwrap();
    drop(abandoned);
    for (i, pending) in (1..).zip(pending) {
        assert_eq!(pending.wait().unwrap(), [i as f32; 3]);
    }
    let empty = rig.backend.start_read::<f32>(&buffer, 5..5).unwrap();
    assert!(empty.wait().unwrap().is_empty());
    assert!(rig.backend.start_read::<f32>(&buffer, 3..6).is_err());
}

pub fn pending_bytes_have_the_values_of_their_point<B: Backend>(rig: &Rig<B>) {
    let wide = rig.buffer(&[0f32; 4099]);
    let narrow = rig.buffer(&[bf16::ZERO; 4099]);
    let codes = rig.buffer(&[0u8; 4099]);
    let mut pending = Vec::new();
    let side = rig.backend.fork().unwrap();
    // Those of a round arrive in the memory of those before it, once these were taken.
    for round in 1..=12u8 {
        let value = f32::from(round);
        let half = bf16::from_f32(value);
        rig.backend.write::<f32>(&wide, 7, &[value; 4000]).unwrap();
        rig.backend
            .write::<bf16>(&narrow, 7, &[half; 4000])
            .unwrap();
        rig.backend.write::<u8>(&codes, 7, &[round; 4000]).unwrap();
        side.wait_for(&rig.backend).unwrap();
        pending.push((
            [value.to_le_bytes()].concat(),
            side.start_read_bytes::<f32>(&wide, 7..4007).unwrap(),
        ));
        pending.push((
            half.to_le_bytes().to_vec(),
            side.start_read_bytes::<bf16>(&narrow, 7..4007).unwrap(),
        ));
        pending.push((
            vec![round],
            side.start_read_bytes::<u8>(&codes, 7..4007).unwrap(),
        ));
        rig.backend.wait_for(&side).unwrap();
        if round % 5 == 0 {
            drop(side.start_read_bytes::<u8>(&codes, 0..9).unwrap());
            for (entry, bytes) in pending.drain(..) {
                // Another thread takes them, as that which writes a checkpoint does.
                let found = std::thread::scope(|scope| {
                    scope.spawn(|| bytes.wait().unwrap()).join().unwrap()
                });
                assert!(found == entry.repeat(4000), "round {round}");
            }
        }
    }
    for (entry, bytes) in pending {
        assert!(bytes.wait().unwrap() == entry.repeat(4000));
    }
    let empty = side.start_read_bytes::<f32>(&wide, 9..9).unwrap();
    assert!(empty.wait().unwrap().is_empty());
    assert!(side.start_read_bytes::<f32>(&wide, 4000..4100).is_err());
}

/// More than the staging memory of a device holds at once.
pub fn large_writes_arrive_whole<B: Backend>(rig: &Rig<B>) {
    let len = (20 << 20) + 12345;
    let values: Vec<u8> = (0..len).map(|i| ((i * 31) >> 3) as u8).collect();
    let buffers: Vec<_> = (0..5).map(|_| rig.buffer(&values)).collect();
    for buffer in buffers {
        assert!(rig.content::<u8>(&buffer) == values);
        let pending = rig.backend.start_read::<u8>(&buffer, 0..len).unwrap();
        assert!(pending.wait().unwrap() == values);
    }
}

pub fn streams_follow_events<B: Backend>(rig: &Rig<B>) {
    let (out, len) = (rig.buffer(&[0f32]), 1 << 20);
    let [from, to] = [1f32, 0f32].map(|x| rig.buffer(&vec![x; len]));
    let other = rig.backend.fork().unwrap();
    let plan = raise(rig, 4.0, &out);
    other.wait_for(&rig.backend).unwrap();
    for _ in 0..10 {
        run(&rig.backend, &plan);
        rig.backend.copy::<f32>(&from, 0..len, &to, 0).unwrap();
        let point = rig.backend.record().unwrap();
        other.wait(&point.clone()).unwrap();
        run(&other, &plan);
        other.clear::<f32>(&from).unwrap();
        other.copy::<f32>(&to, 0..len, &from, 0).unwrap();
        rig.backend.wait_for(&other).unwrap();
    }
    assert_eq!(rig.content::<f32>(&out), [80.0]);
    assert!(rig.content::<f32>(&from).iter().all(|&x| x == 1.0));
    other.synchronize().unwrap();
}

pub fn a_graph_does_what_was_captured<B: Backend>(rig: &Rig<B>) {
    let [first, second] = [(); 2].map(|()| rig.buffer(&[0u8; 16]));
    let kept = rig.buffer(&[0u8; 8]);
    let plan = add(rig, &[3.0, 4.0], &first);
    let graph = rig.backend.capture(|| {
        rig.backend.clear::<u8>(&first)?;
        rig.backend.run(&plan, &StepScalars::default())?;
        rig.backend.run(&plan, &StepScalars::default())?;
        rig.backend.copy::<u8>(&first, 0..16, &second, 0)?;
        let part = rig.backend.view::<u8>(&second, 0..8)?;
        rig.backend.copy::<u8>(&part, 0..8, &kept, 0)
    });
    let graph = graph.unwrap();
    // The graph holds what it needs, and nothing has run.
    drop(plan);
    assert_eq!([sum(rig, &first), sum(rig, &second)], [0.0; 2]);
    for _ in 0..3 {
        rig.backend.launch(&graph.clone()).unwrap();
        assert_eq!(
            [sum(rig, &first), sum(rig, &second), sum(rig, &kept)],
            [50.0; 3]
        );
        rig.backend.clear::<u8>(&second).unwrap();
    }
}

/// A second stream that waits for the first and is waited for belongs to the graph.
pub fn a_graph_spans_streams<B: Backend>(rig: &Rig<B>) {
    let other = rig.backend.fork().unwrap();
    let sums = [(); 3].map(|()| rig.buffer(&[0f32]));
    let [one, two, three] =
        [(1.0, 0), (4.0, 1), (9.0, 2)].map(|(value, out)| raise(rig, value, &sums[out]));
    let before = other.record().unwrap();
    let graph = rig.backend.capture(|| {
        // What was there before the capture.
        rig.backend.wait(&before)?;
        rig.backend.run(&one, &StepScalars::default())?;
        other.wait(&rig.backend.record()?)?;
        other.run(&two, &StepScalars::default())?;
        rig.backend.run(&three, &StepScalars::default())?;
        rig.backend.wait_for(&other)?;
        rig.backend.copy::<f32>(&sums[1], 0..1, &sums[0], 0)
    });
    let graph = graph.unwrap();
    for launches in 1..=5 {
        rig.backend.launch(&graph).unwrap();
        let launches = launches as f32;
        let found = sums.each_ref().map(|out| rig.content::<f32>(out)[0]);
        assert_eq!(found, [4.0 * launches, 4.0 * launches, 9.0 * launches]);
    }
    // Both streams go on by themselves.
    run(&other, &two);
    rig.backend.wait_for(&other).unwrap();
    assert_eq!(rig.content::<f32>(&sums[1]), [24.0]);
}

pub fn a_capture_takes_only_work<B: Backend>(rig: &Rig<B>) {
    let (backend, out) = (&rig.backend, rig.buffer(&[0u8; 16]));
    let plan = add(rig, &[1.0], &out);
    let graph = backend
        .capture(|| backend.run(&plan, &StepScalars::default()))
        .unwrap();
    type Call<'c> = &'c dyn Fn() -> Result<(), KernelError>;
    let cases: [(&str, Call<'_>); 8] = [
        ("an allocation", &|| backend.alloc::<u8>(1).map(|_| ())),
        ("a write", &|| backend.write::<u8>(&out, 0, &[1])),
        ("a read", &|| backend.read::<u8>(&out, 0, &mut [1])),
        ("a read", &|| {
            backend.start_read::<u8>(&out, 0..1).map(|_| ())
        }),
        ("planning", &|| backend.plan(Work::Amax(vec![])).map(|_| ())),
        ("waiting for work", &|| backend.synchronize()),
        ("the launch of a graph", &|| backend.launch(&graph)),
        ("a capture", &|| {
            backend.capture(|| backend.clear::<u8>(&out)).map(|_| ())
        }),
    ];
    for (name, work) in cases {
        let error = backend.capture(work).unwrap_err();
        assert!(
            matches!(error, KernelError::InCapture { .. }),
            "{name}: {error}"
        );
        assert!(error.to_string().starts_with(name), "{name}: {error}");
    }
    let nothing = backend.capture(|| Ok::<(), KernelError>(())).unwrap_err();
    assert!(
        nothing.to_string().contains("work in a capture"),
        "{nothing}"
    );
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        backend.capture(|| -> Result<(), KernelError> {
            backend.run(&plan, &StepScalars::default())?;
            panic!("in a capture")
        })
    }));
    assert!(panicked.is_err());
    // None of it ran, none of it is left, and the next capture works.
    assert_eq!(sum(rig, &out), 0.0);
    backend.launch(&graph).unwrap();
    run(backend, &plan);
    assert_eq!(sum(rig, &out), 2.0);
    let again = backend.capture(|| backend.clear::<u8>(&out)).unwrap();
    backend.launch(&again).unwrap();
    assert_eq!(sum(rig, &out), 0.0);
}
