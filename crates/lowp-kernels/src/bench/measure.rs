//! Timing: events on the device around whole runs, the clock of the host around calls.

use std::cell::RefCell;
use std::time::Instant;

use lowp_format::Shape;

use super::Result;
use super::cases::{Case, CaseWork};
use super::data::Supply;
use crate::{Backend, Cuda, CudaBuffer, CudaGraph, CudaMark, CudaPlan, GroupScalars, StepScalars};

/// Buffers of a row together exceed the second-level cache by this factor.
const BEYOND_CACHE: usize = 4;
/// Runs before timing starts.
const WARM_UP: usize = 3;
/// Calls that the host is timed over; few enough that it never waits for the device.
const HOST_CALLS: u64 = 8;

/// One run: a plan, or several as a graph.
enum Run {
    Plan(CudaPlan),
    Graph(CudaGraph, Scalars),
}

/// Scalars on the device, which captured work reads.
struct Scalars {
    buffer: CudaBuffer<u8>,
    /// What was written last.
    written: RefCell<StepScalars>,
}

impl Scalars {
    fn new(cuda: &Cuda) -> Result<Self> {
        let written = scalars(1);
        Ok(Self {
            buffer: cuda.upload(&written.to_bytes())?,
            written: RefCell::new(written),
        })
    }

    fn set(&self, cuda: &Cuda, scalars: &StepScalars) -> Result<()> {
        let mut written = self.written.borrow_mut();
        if *written != *scalars {
            cuda.write(&self.buffer, 0, &scalars.to_bytes())?;
            *written = scalars.clone();
        }
        Ok(())
    }
}

impl Run {
    fn new(cuda: &Cuda, made: CaseWork) -> Result<Self> {
        let plans = made.work.into_iter().map(|work| cuda.plan(work));
        let plans: Vec<CudaPlan> = plans.collect::<Result<_>>()?;
        if let [plan] = &plans[..] {
            return Ok(Self::Plan(plan.clone()));
        }
        let scalars = Scalars::new(cuda)?;
        let run = |plan: &CudaPlan| cuda.run_with(plan, &scalars.buffer);
        let graph = cuda.capture(|| plans.iter().try_for_each(run))?;
        Ok(Self::Graph(graph, scalars))
    }

    fn launch(&self, cuda: &Cuda, scalars: &StepScalars) -> Result<()> {
        match self {
            Self::Plan(plan) => cuda.run(plan, scalars),
            Self::Graph(graph, on_device) => {
                on_device.set(cuda, scalars)?;
                cuda.launch(graph)
            }
        }
    }
}

/// Scalars of step `step`.
fn scalars(step: u64) -> StepScalars {
    let adam = GroupScalars::default();
    StepScalars {
        groups: vec![adam.at_step(step)],
        random_step: step,
        ..StepScalars::default()
    }
}

/// What one row takes.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Device time of every run, from the fastest to the slowest.
    pub runs_microseconds: Vec<f64>,
    /// Their median.
    pub microseconds: f64,
    /// Inputs read and outputs written once per pass.
    pub compulsory_bytes: usize,
    /// Launches of one run.
    pub launches: usize,
    /// Median time of the calling thread for one run.
    pub host_microseconds: f64,
}

/// Times `runs` runs of one row.
///
/// # Errors
/// No room, or the device failed.
pub fn measure(cuda: &Cuda, case: &Case, runs: usize) -> Result<Timing> {
    let supply = Supply::new(cuda, case.tensors, case.shape)?;
    let first = case.make(&supply)?;
    let (bytes, launches) = (first.bytes, first.work.len());
    let sets = (BEYOND_CACHE * cuda.cache_bytes()?)
        .div_ceil(bytes.max(1))
        .clamp(1, 64);
    let mut all = vec![Run::new(cuda, first)?];
    for _ in 1..sets {
        all.push(Run::new(cuda, case.make(&supply)?)?);
    }
    let step = scalars(10);
    let times = time(cuda, runs, |i| all[i % all.len()].launch(cuda, &step))?;
    Ok(Timing {
        microseconds: median(&times),
        runs_microseconds: times,
        compulsory_bytes: bytes,
        launches,
        host_microseconds: host(cuda, &all[0])?,
    })
}

/// Bytes read and written per second by a copy between large buffers, in 10^9; their lengths are divided by `shrink`.
///
/// # Errors
/// No room, or the device failed.
pub fn copy_rate(cuda: &Cuda, shrink: usize) -> Result<f64> {
    let len = (1 << 30) / shrink;
    let supply = Supply::new(cuda, 1, Shape::new(1, 1))?;
    let from = supply.bytes(len)?;
    let to: CudaBuffer<u8> = cuda.alloc(len)?;
    let times = time(cuda, 20, |_| cuda.copy::<u8>(&from, 0..len, &to, 0))?;
    Ok(2.0 * len as f64 / median(&times) / 1e3)
}

/// Device times of `runs` runs in microseconds, sorted.
fn time(cuda: &Cuda, runs: usize, mut run: impl FnMut(usize) -> Result<()>) -> Result<Vec<f64>> {
    for i in 0..WARM_UP {
        run(i)?;
    }
    cuda.synchronize()?;
    let mut marks: Vec<(CudaMark, CudaMark)> = Vec::with_capacity(runs);
    for i in 0..runs {
        let start = cuda.mark()?;
        run(i)?;
        marks.push((start, cuda.mark()?));
    }
    let mut times = Vec::with_capacity(runs);
    for (start, end) in &marks {
        times.push(f64::from(start.milliseconds_to(end)?) * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// Median time of the calling thread for one run whose scalars changed, in microseconds.
fn host(cuda: &Cuda, run: &Run) -> Result<f64> {
    let mut times = Vec::new();
    for batch in 0..6 {
        cuda.synchronize()?;
        for call in 0..HOST_CALLS {
            let step = scalars(1 + batch * HOST_CALLS + call);
            let start = Instant::now();
            run.launch(cuda, &step)?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    cuda.synchronize()?;
    times.sort_by(f64::total_cmp);
    Ok(median(&times))
}

/// The middle of sorted values.
fn median(sorted: &[f64]) -> f64 {
    let n = sorted.len();
    if n == 0 {
        return f64::NAN;
    }
    (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0
}
