//! What the conformance suite runs on: a backend, and how its plans are varied.

use std::fmt;

use half::bf16;
use lowp_kernels::{
    Backend, Element, KernelError, Master, Source, State, StepScalars, UpdateJob, Work,
};

/// A backend under test.
pub struct Rig<B: Backend> {
    pub(crate) backend: B,
    /// What every plan goes through.
    adapt: Box<dyn Fn(B::Plan) -> B::Plan + Send + Sync>,
    name: String,
    /// Whether [`Self::some_of`] leaves cases out.
    pub(crate) sampled: bool,
}

impl<B: Backend> Rig<B> {
    /// `backend` as it is used; `name` is what failures call it.
    pub fn new(backend: B, name: impl Into<String>) -> Self {
        Self::varied(backend, name, |plan| plan)
    }

    /// `backend`, whose plans run as `adapt` makes them.
    pub fn varied(
        backend: B,
        name: impl Into<String>,
        adapt: impl Fn(B::Plan) -> B::Plan + Send + Sync + 'static,
    ) -> Self {
        Self {
            backend,
            adapt: Box::new(adapt),
            name: name.into(),
            sampled: false,
        }
    }

    /// The same, on which the longest tests take a part of their cases unless `LOWP_EXHAUSTIVE=1`: for a backend on which the
    /// suite would otherwise take minutes.
    #[must_use]
    pub fn sampled(mut self) -> Self {
        self.sampled = std::env::var_os("LOWP_EXHAUSTIVE").is_none_or(|value| value != "1");
        self
    }

    /// Of cases that differ in one ingredient each, one in `n` where this rig is sampled, else all.
    pub(crate) fn some_of<T>(&self, cases: impl IntoIterator<Item = T>, n: usize) -> Vec<T> {
        let n = if self.sampled { n } else { 1 };
        cases.into_iter().step_by(n).collect()
    }

    /// A buffer with the content of `values`.
    pub(crate) fn buffer<T: Element>(&self, values: &[T]) -> B::Buffer<T> {
        self.backend.upload(values).unwrap()
    }

    /// The content of `source` as f32, exactly.
    pub(crate) fn widened(&self, source: &Source<B>) -> Vec<f32> {
        match source {
            Source::F32(buffer) => self.content::<f32>(buffer),
            Source::Bf16(buffer) => {
                // Not `to_f32`, which quiets a signalling NaN.
                let wide = |x: bf16| f32::from_bits(u32::from(x.to_bits()) << 16);
                self.content::<bf16>(buffer).into_iter().map(wide).collect()
            }
        }
    }

    /// The master of a job as f32, exactly.
    pub(crate) fn master(&self, job: &UpdateJob<B>) -> Vec<f32> {
        match &job.master {
            Master::Values(values) => self.widened(values),
            Master::Bf16Plus16 { .. } => job.master.download(&self.backend).unwrap(),
        }
    }

    /// The states of a job as f32, exactly.
    pub(crate) fn states(&self, job: &UpdateJob<B>) -> Vec<Vec<f32>> {
        let names = job.rule.states().iter().zip(&job.states);
        let states = names.map(|(&name, state)| match state {
            State::Values(values) => self.widened(values),
            State::Fp8(_) => state.download(&self.backend, name).unwrap(),
        });
        states.collect()
    }

    /// The content of `buffer`.
    pub(crate) fn content<T: Element>(&self, buffer: &B::Buffer<T>) -> Vec<T> {
        self.backend.download(buffer).unwrap()
    }

    /// Plans `work`.
    pub(crate) fn plan(&self, work: Work<B>) -> Result<B::Plan, KernelError> {
        self.backend.plan(work).map(&self.adapt)
    }

    /// Plans and runs `work`.
    pub(crate) fn run(&self, work: Work<B>) {
        self.run_with(work, &StepScalars::default());
    }

    /// Plans and runs `work` with these scalars.
    pub(crate) fn run_with(&self, work: Work<B>, scalars: &StepScalars) {
        let plan = self.plan(work).unwrap();
        self.backend.run(&plan, scalars).unwrap();
    }
}

impl<B: Backend> fmt::Debug for Rig<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The CPU.
#[cfg(test)]
pub(crate) mod cpu {
    use lowp_kernels::testing::Isa;
    use lowp_kernels::{Cpu, CpuPlan};

    use super::Rig;

    /// Values are written past the caches from so many elements on: the suite takes both ways.
    const STREAMED: usize = 1 << 13;

    /// With every instruction set, with one thread and with two.
    pub(crate) fn everywhere(test: impl Fn(&Rig<Cpu>) + Sync) {
        for isa in Isa::all() {
            for threads in [1, 2] {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .unwrap();
                let rig = rig(isa, format!("{isa:?}, {threads} threads"));
                pool.install(|| test(&rig));
            }
        }
    }

    /// With the widest instruction set and the threads of the machine.
    pub(crate) fn once(test: impl Fn(&Rig<Cpu>)) {
        test(&best());
    }

    /// What [`once`] runs on.
    pub(crate) fn best() -> Rig<Cpu> {
        rig(Isa::best(), "CPU".to_owned())
    }

    /// With every instruction set at once.
    pub(crate) fn together(test: impl Fn(&[Rig<Cpu>])) {
        let rig = |isa| rig(isa, format!("{isa:?}"));
        test(&Isa::all().into_iter().map(rig).collect::<Vec<_>>());
    }

    fn rig(isa: Isa, name: String) -> Rig<Cpu> {
        Rig::varied(Cpu, name, move |plan: CpuPlan| plan.varied(isa, STREAMED)).sampled()
    }
}

/// The first CUDA device. Without one a test says that it did not run, and fails if
/// `LOWP_REQUIRE_GPU` is set.
#[cfg(all(test, feature = "cuda"))]
pub(crate) mod device {
    use std::io::Write;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::Rig;
    use lowp_kernels::{Backend, Cuda, KernelError};

    /// As it is used, and with buffers in page-locked memory of the host.
    pub(crate) fn everywhere(test: impl Fn(&Rig<Cuda>)) {
        once(|rig| {
            test(rig);
            let host = rig.backend.with_host_buffers();
            test(&Rig::new(host, format!("{rig:?}, buffers of the host")));
        });
    }

    pub(crate) fn once(test: impl Fn(&Rig<Cuda>)) {
        static DEVICE: OnceLock<Result<Cuda, KernelError>> = OnceLock::new();
        static NOT_RUN: AtomicUsize = AtomicUsize::new(0);
        match DEVICE.get_or_init(|| Cuda::new(0)) {
            Ok(device) => {
                // A stream of its own: tests run side by side.
                test(&Rig::new(device.fork().unwrap(), device.name().unwrap()));
            }
            Err(error) => {
                required(error);
                let count = NOT_RUN.fetch_add(1, Ordering::Relaxed) + 1;
                say(&format!(
                    "{count} GPU tests did not run in this process: {error}"
                ));
            }
        }
    }

    /// The first two devices. A machine with one need not have another, whatever is required.
    pub(crate) fn pair(test: impl Fn(&[Rig<Cuda>; 2])) {
        let rig = |ordinal| {
            let backend = Cuda::new(ordinal)?;
            let name = format!("{} {ordinal}", backend.name()?);
            Ok::<_, KernelError>(Rig::new(backend, name))
        };
        let both = || Ok::<_, KernelError>([rig(0)?, rig(1)?]);
        match Cuda::count() {
            Ok(0) => pass_over(&"this machine has no GPU"),
            Ok(1) => say("a test of two GPUs did not run: this machine has one"),
            _ => match both() {
                Ok(rigs) => test(&rigs),
                Err(error) => pass_over(&error),
            },
        }
    }

    /// Says that a test of two devices did not run, and fails if `LOWP_REQUIRE_GPU` is set.
    pub(crate) fn pass_over(why: &dyn std::fmt::Display) {
        required(why);
        say(&format!("a test of two GPUs did not run: {why}"));
    }

    fn required(why: &dyn std::fmt::Display) {
        let required = std::env::var_os("LOWP_REQUIRE_GPU").is_some();
        assert!(!required, "LOWP_REQUIRE_GPU is set, but {why}");
    }

    /// Not `eprintln!`: the test harness would keep it to itself.
    fn say(line: &str) {
        let _ = writeln!(std::io::stderr(), "{line}");
    }

    pub(crate) fn together(test: impl Fn(&[Rig<Cuda>])) {
        once(|rig| test(std::slice::from_ref(rig)));
    }
}
