//! Plans that run side by side on rayon threads of the caller and share buffers: none waits for itself.

use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use lowp_format::{Shape, SourceRounding};
use lowp_kernels::{AmaxJob, Backend, Cpu, CpuBuffer, KernelError, Source, StepScalars, Work};

/// Enough for several tasks.
const LEN: usize = 1 << 22;
const RUNS: usize = 400;
const LIMIT: Duration = Duration::from_secs(100);

/// Raises entry 0 of `out`, which is locked for writing, to the amax of `source`.
fn amax(source: &CpuBuffer<f32>, out: &CpuBuffer<f32>) -> Work<Cpu> {
    Work::Amax(vec![AmaxJob {
        shape: Shape::new(1, LEN),
        start: 0,
        source: Source::F32(source.clone()),
        source_rounding: SourceRounding::F32,
        out: out.clone(),
        tensor: Some(0),
        blocks: Vec::new(),
        hadamard: false,
    }])
}

/// Many tasks, given to a pool of `threads` threads from outside, run plans. Every second one writes the
/// same entry and the others write their own, so that threads are free to take parts of a run from those that
/// wait for the entry, and a thread that waits for its parts finds other runs to begin.
fn run_side_by_side(threads: usize) -> Result<f32, KernelError> {
    let values: Vec<f32> = (0..LEN).map(|i| (i % 1000) as f32).collect();
    let source = CpuBuffer::from_vec(values);
    let shared = Cpu.alloc::<f32>(1)?;
    let together = Cpu.plan(amax(&source, &shared))?;
    let run = |i: usize| match i % 2 {
        0 => Cpu.run(&together, &StepScalars::default()),
        _ => Cpu.once(amax(&source, &Cpu.alloc::<f32>(1)?)),
    };
    let failed = Mutex::new(None);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("threads").in_place_scope(|scope| {
        for i in 0..RUNS {
            let (run, failed) = (&run, &failed);
            scope.spawn(move |_| {
                if let Err(error) = run(i) {
                    *failed.lock().expect("no thread panics") = Some(error);
                }
            });
        }
    });
    match failed.into_inner().expect("no thread panics") {
        Some(error) => Err(error),
        None => Ok(Cpu.download(&shared)?[0]),
    }
}

/// A run that waits forever would keep the test from failing: others watch it.
fn within_the_limit(threads: usize) {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(run_side_by_side(threads)));
    let found = result.recv_timeout(LIMIT);
    assert_eq!(found, Ok(Ok(999.0)), "{threads} threads, in {LIMIT:?}");
}

#[test]
fn runs_on_one_rayon_thread_share_buffers() {
    within_the_limit(1);
}

#[test]
fn runs_on_two_rayon_threads_share_buffers() {
    within_the_limit(2);
}

#[test]
fn runs_on_four_rayon_threads_share_buffers() {
    within_the_limit(4);
}
