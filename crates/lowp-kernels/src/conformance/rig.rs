//! What the conformance suite runs on: a backend, and how its plans are varied.

use std::fmt;

use crate::cpu::Cpu;
use crate::lanes::Isa;
use crate::{Backend, Element, KernelError, StepScalars, Work};

/// A backend under test.
pub(super) struct Rig<B: Backend> {
    pub(super) backend: B,
    /// What every plan goes through.
    adapt: Box<dyn Fn(B::Plan) -> B::Plan + Send + Sync>,
    name: String,
}

impl<B: Backend> Rig<B> {
    /// A buffer with the content of `values`.
    pub(super) fn buffer<T: Element>(&self, values: &[T]) -> B::Buffer<T> {
        self.backend.upload(values).unwrap()
    }

    /// The content of `buffer`.
    pub(super) fn content<T: Element>(&self, buffer: &B::Buffer<T>) -> Vec<T> {
        self.backend.download(buffer).unwrap()
    }

    /// Plans `work`.
    pub(super) fn plan(&self, work: Work<B>) -> Result<B::Plan, KernelError> {
        self.backend.plan(work).map(&self.adapt)
    }

    /// Plans and runs `work`.
    pub(super) fn run(&self, work: Work<B>) {
        self.run_with(work, &StepScalars::default());
    }

    /// Plans and runs `work` with these scalars.
    pub(super) fn run_with(&self, work: Work<B>, scalars: &StepScalars) {
        let plan = self.plan(work).unwrap();
        self.backend.run(&plan, scalars).unwrap();
    }
}

impl<B: Backend> fmt::Debug for Rig<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Runs `test` on the CPU for every instruction set, with one thread and with two.
pub(super) fn everywhere(test: impl Fn(&Rig<Cpu>) + Sync) {
    for isa in Isa::all() {
        for threads in [1, 2] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            let rig = Rig {
                backend: Cpu,
                adapt: Box::new(move |plan| plan.with_isa(isa)),
                name: format!("{isa:?}, {threads} threads"),
            };
            pool.install(|| test(&rig));
        }
    }
}

/// Runs `test` on the CPU.
pub(super) fn once(test: impl Fn(&Rig<Cpu>)) {
    test(&cpu());
}

/// The CPU as it is used.
pub(super) fn cpu() -> Rig<Cpu> {
    Rig {
        backend: Cpu,
        adapt: Box::new(|plan| plan),
        name: "CPU".to_owned(),
    }
}

/// Hands `test` the CPU with every instruction set.
pub(super) fn together(test: impl Fn(&[Rig<Cpu>])) {
    let rig = |isa| Rig {
        backend: Cpu,
        adapt: Box::new(move |plan: crate::CpuPlan| plan.with_isa(isa)),
        name: format!("{isa:?}"),
    };
    test(&Isa::all().into_iter().map(rig).collect::<Vec<_>>());
}

/// The same on the first CUDA device. Without one a test says that it did not run, and fails if
/// `LOWP_REQUIRE_GPU` is set.
#[cfg(feature = "cuda")]
pub(super) mod device {
    use std::io::Write;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::Rig;
    use crate::{Backend, Cuda, KernelError};

    pub(in crate::conformance) fn once(test: impl Fn(&Rig<Cuda>)) {
        static DEVICE: OnceLock<Result<Cuda, KernelError>> = OnceLock::new();
        static NOT_RUN: AtomicUsize = AtomicUsize::new(0);
        match DEVICE.get_or_init(|| Cuda::new(0)) {
            Ok(device) => {
                // A stream of its own: tests run side by side.
                let rig = Rig {
                    backend: device.fork().unwrap(),
                    adapt: Box::new(|plan| plan),
                    name: device.name().unwrap(),
                };
                test(&rig);
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
    pub(in crate::conformance) fn pair(test: impl Fn(&[Rig<Cuda>; 2])) {
        let rig = |ordinal| {
            let backend = Cuda::new(ordinal)?;
            let name = format!("{} {ordinal}", backend.name()?);
            let adapt = Box::new(|plan| plan);
            Ok::<_, KernelError>(Rig {
                backend,
                adapt,
                name,
            })
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
    pub(in crate::conformance) fn pass_over(why: &dyn std::fmt::Display) {
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

    pub(in crate::conformance) use once as everywhere;

    pub(in crate::conformance) fn together(test: impl Fn(&[Rig<Cuda>])) {
        once(|rig| test(std::slice::from_ref(rig)));
    }
}

/// One test per backend and law.
macro_rules! suite {
    ($($module:ident { $($test:ident $variants:ident;)+ })+) => {
        mod on_cpu {
            $(mod $module {
                $(#[test]
                fn $test() {
                    crate::conformance::rig::$variants(crate::conformance::$module::$test);
                })+
            })+
        }
        #[cfg(feature = "cuda")]
        mod on_cuda {
            $(mod $module {
                $(#[test]
                fn $test() {
                    crate::conformance::rig::device::$variants(crate::conformance::$module::$test);
                })+
            })+
        }
    };
}
pub(super) use suite;
