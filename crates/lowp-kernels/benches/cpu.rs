//! Throughput of every kernel on the CPU, in bytes of f32 input (of f32 output for decode), beside a memcpy of the same bytes
//! that is measured just before. `cargo xtask bench` prints the ratios and the bars of `bars.toml`.
//!
//! With `--test` every benchmark runs once on a small matrix.

use std::cell::LazyCell;
use std::time::Duration;

use criterion::{Criterion, Throughput};
use half::bf16;
use lowp_format::{
    AnyRecipe, Code, Orientation, Part, Philox, Recipe, Role, ScaleRule, Shape, SourceRounding,
    Usage, tensor_scale,
};
use lowp_kernels::{
    AmaxJob, Backend, Cpu, CpuBuffer, CpuPlan, DecodeJob, EncodeJob, FloatDtype, GroupScalars,
    KernelError, Rule, Slot, Source, StateDtype, StepScalars, SumSquaresJob, Target, TensorInput,
    TransposeJob, UpdateAmax, UpdateJob, UpdateRandom, Work,
};
use rayon::ThreadPool;
use rayon::prelude::*;

type Result<T> = std::result::Result<T, KernelError>;

/// Standard deviation of the values, as weights have it.
const SIGMA: f32 = 0.02;
/// Values that are drawn; the matrix repeats them.
const SAMPLES: usize = 1 << 20;

/// Normal values; one in a thousand is an outlier of 10 to 100 standard deviations. Without those,
/// blocks and codes would take few values.
fn samples(seed: u64, count: usize, sigma: f32) -> Vec<f32> {
    let [normal, outlier] = [0, 1].map(|stream| Philox::new(seed, stream));
    (0..count as u64)
        .map(|i| {
            let [kind, size, ..] = outlier.block(i);
            let x = sigma * normal.normal(i);
            let distance = sigma * (10.0 + 90.0 * (size as f32 / u32::MAX as f32));
            if kind % 1000 == 0 {
                distance.copysign(x)
            } else {
                x
            }
        })
        .collect()
}

/// A matrix of the caller's own, in both dtypes.
struct Input {
    shape: Shape,
    values: CpuBuffer<f32>,
    halves: CpuBuffer<bf16>,
}

impl Input {
    /// A matrix that repeats `samples`.
    fn new(shape: Shape, samples: &[f32]) -> Result<Self> {
        let halves: Vec<bf16> = samples.iter().map(|&x| bf16::from_f32(x)).collect();
        let values = samples.iter().copied().cycle().take(shape.elements());
        let halves = halves.iter().copied().cycle().take(shape.elements());
        Ok(Self {
            shape,
            values: Cpu.upload(&values.collect::<Vec<_>>())?,
            halves: Cpu.upload(&halves.collect::<Vec<_>>())?,
        })
    }

    fn source(&self) -> Source<Cpu> {
        Source::F32(self.values.clone())
    }

    /// An encode that observes what it is made of.
    fn observed(
        &self,
        recipe: &AnyRecipe,
        usage: Usage,
        source: Source<Cpu>,
    ) -> Result<EncodeJob<Cpu>> {
        EncodeJob::new(&Cpu, recipe, self.shape, usage, source)
    }

    /// The same under the scales or amaxes of its values, known before.
    fn encode(
        &self,
        recipe: &AnyRecipe,
        usage: Usage,
        source: Source<Cpu>,
    ) -> Result<EncodeJob<Cpu>> {
        known(self.observed(recipe, usage, source)?)
    }

    /// The operand of a weight gradient, after its Hadamard transform.
    fn hadamard(&self, recipe: &AnyRecipe) -> Result<EncodeJob<Cpu>> {
        let quantizers = recipe.quantizers(Role::Activation);
        let mut job = self.observed(recipe, Usage::COLUMNWISE, self.source())?;
        job.kernels = quantizers.kernels();
        job.targets.clear();
        for spec in quantizers.buffers(Usage::COLUMNWISE) {
            let bytes = Cpu.alloc(spec.bytes(self.shape))?;
            job.targets.push(Target::new(spec, bytes));
        }
        known(job)
    }

    fn amax(&self) -> Result<CpuPlan> {
        Cpu.plan(Work::Amax(vec![AmaxJob {
            shape: self.shape,
            start: 0,
            source: self.source(),
            source_rounding: SourceRounding::F32,
            out: Cpu.alloc(1)?,
            tensor: Some(0),
            blocks: Vec::new(),
            hadamard: false,
        }]))
    }

    fn adamw(&self) -> Result<UpdateJob<Cpu>> {
        let n = self.shape.elements();
        let some = samples(2, n.min(SAMPLES), 0.01);
        let grad: Vec<f32> = some.iter().copied().cycle().take(n).collect();
        UpdateJob::new(
            &Cpu,
            Rule::AdamW,
            self.values.clone(),
            Source::F32(Cpu.upload(&grad)?),
        )
    }

    /// The same with both moments in fp8.
    fn adamw_in_fp8(&self, master: FloatDtype) -> Result<UpdateJob<Cpu>> {
        let job = self.adamw()?;
        let len = self.shape.elements();
        Ok(UpdateJob {
            master: match master {
                FloatDtype::F32 => job.master,
                FloatDtype::Bf16 => Source::Bf16(self.halves.clone()).into(),
            },
            states: job.rule.alloc(&Cpu, |_| StateDtype::Fp8, len)?,
            random: Some(UpdateRandom {
                seed: 1,
                stream: 0,
                tiles: None,
                first: 0,
            }),
            ..job
        })
    }

    /// The update and the cast of one step: fused where scales are known, else in two passes.
    fn step(&self, recipe: &AnyRecipe, usage: Usage) -> Result<Vec<CpuPlan>> {
        let encode = self.observed(recipe, usage, self.source())?;
        let delayed = encode.kernels[0].scale.is_delayed();
        let (mut update, later) = self.adamw()?.with_encode(encode);
        if delayed {
            let (buffer, index) = (Cpu.alloc(1)?, 0);
            update.amax = Some(UpdateAmax::of_tensor(Slot { buffer, index }));
        }
        let update = Cpu.plan(Work::Update(vec![update]))?;
        let later = later.map(|encode| Cpu.plan(Work::Encode(vec![encode])));
        Ok([update].into_iter().chain(later.transpose()?).collect())
    }

    fn decode(&self, recipe: &AnyRecipe, orientation: Orientation) -> Result<CpuPlan> {
        let job = self.encode(recipe, orientation.usage(), self.source())?;
        let part = |part| job.target(orientation, part).cloned();
        let what = "data of an orientation".to_owned();
        let kernel = job.kernels[orientation as usize];
        let outer = kernel.scale.outer();
        let decode = DecodeJob {
            shape: self.shape,
            kernel,
            data: part(Part::Data).ok_or(KernelError::Missing { what })?,
            block_scale: part(Part::BlockScale),
            tensor_scale: outer.and_then(|(_, outer)| part(outer)).map(|t| t.bytes),
            out: Source::F32(Cpu.alloc(self.shape.elements())?),
        };
        Cpu.once(Work::Encode(vec![job]))?;
        Cpu.plan(Work::Decode(vec![decode]))
    }

    fn transpose(&self, code: Code) -> Result<CpuPlan> {
        let bytes = code.bytes(self.shape.elements());
        Cpu.plan(Work::Transpose(vec![TransposeJob {
            code,
            entries: [self.shape.rows, self.shape.cols],
            from: Cpu.alloc(bytes)?,
            to: Cpu.alloc(bytes)?,
        }]))
    }
}

/// An encode under the scales or amaxes of its source, which are taken here. Orientations that observe one entry know one.
fn known(mut job: EncodeJob<Cpu>) -> Result<EncodeJob<Cpu>> {
    Cpu.once(Work::Amax(AmaxJob::before(&Cpu, &job)))?;
    let mut found: Vec<(Slot<Cpu>, TensorInput<Cpu>)> = Vec::new();
    for (input, key) in job.tensor.iter_mut().zip(&job.kernels) {
        let Some(TensorInput::Observed(slot)) = input else {
            continue;
        };
        let same =
            |at: &Slot<_>| Cpu.span(&at.buffer) == Cpu.span(&slot.buffer) && at.index == slot.index;
        if let Some((_, known)) = found.iter().find(|(observed, _)| same(observed)) {
            *input = Some(known.clone());
            continue;
        }
        let mut entries = Cpu.download(&slot.buffer)?;
        if let ScaleRule::Current { pow2, epsilon, .. } = key.scale {
            let scale = |amax: &mut f32| *amax = tensor_scale(*amax, key.element, pow2, epsilon);
            entries.iter_mut().for_each(scale);
        }
        let buffer = Cpu.upload(&entries)?;
        let known = TensorInput::Known(Slot {
            buffer,
            index: slot.index,
        });
        found.push((slot.clone(), known.clone()));
        *input = Some(known);
    }
    Ok(job)
}

/// Scalars of a step that is not the first, and so small that values stay what they are.
fn scalars() -> StepScalars {
    let adam = GroupScalars {
        lr: 1e-8,
        ..GroupScalars::default()
    };
    StepScalars {
        groups: vec![adam.at_step(10)],
        ..StepScalars::default()
    }
}

/// Measures benchmarks as groups of three: memcpy, the kernel on one thread, and on two.
struct Bench<'a> {
    criterion: &'a mut Criterion,
    shape: Shape,
    samples: Vec<f32>,
    pools: [ThreadPool; 2],
}

/// What a group works on: made anew for each, so that no group sees what another left behind, and
/// only if it runs at all.
struct Made {
    input: Input,
    copy: CpuBuffer<f32>,
    plans: Vec<CpuPlan>,
}

impl Bench<'_> {
    fn group(&mut self, name: &str, plans: impl Fn(&Input) -> Result<Vec<CpuPlan>>) {
        let (shape, samples) = (self.shape, &self.samples);
        let made = LazyCell::new(|| {
            let make = || {
                let input = Input::new(shape, samples)?;
                let copy = Cpu.alloc(shape.elements())?;
                let plans = plans(&input)?;
                Ok::<_, KernelError>(Made { input, copy, plans })
            };
            make().expect("the jobs of this benchmark are valid")
        });
        let scalars = scalars();
        let mut group = self.criterion.benchmark_group(name);
        group.throughput(Throughput::Bytes(4 * shape.elements() as u64));
        group.sample_size(10);
        group.warm_up_time(Duration::from_millis(200));
        group.measurement_time(Duration::from_millis(800));
        group.bench_function("memcpy", |b| {
            // Plans lock what they touch: these locks end here.
            let values = made.input.values.read().expect("no lock is held");
            let mut copy = made.copy.write().expect("no lock is held");
            b.iter(|| {
                copy.copy_from_slice(std::hint::black_box(&values));
                std::hint::black_box(&mut *copy);
            });
        });
        for (threads, pool) in ["1 thread", "2 threads"].iter().zip(&self.pools) {
            group.bench_function(*threads, |b| {
                let plans = &made.plans;
                b.iter(|| {
                    pool.install(|| plans.iter().try_for_each(|plan| Cpu.run(plan, &scalars)))
                        .expect("planned work runs");
                });
            });
        }
        group.finish();
    }

    /// What two threads gain where the memory is all there is to wait for.
    fn memcpy(&mut self) {
        let (shape, samples) = (self.shape, &self.samples);
        let made = LazyCell::new(|| {
            let make = || {
                Ok::<_, KernelError>((
                    Input::new(shape, samples)?,
                    Cpu.alloc::<f32>(shape.elements())?,
                ))
            };
            make().expect("memory for two matrices")
        });
        let mut group = self.criterion.benchmark_group("memcpy");
        group.throughput(Throughput::Bytes(4 * shape.elements() as u64));
        group.sample_size(10);
        group.warm_up_time(Duration::from_millis(200));
        group.measurement_time(Duration::from_millis(800));
        for (threads, pool) in [1, 2].into_iter().zip(&self.pools) {
            let label = ["1 thread", "2 threads"][threads - 1];
            let part = shape.elements().div_ceil(threads);
            group.bench_function(label, |b| {
                let (input, copy) = &*made;
                let values = input.values.read().expect("no lock is held");
                let mut copy = copy.write().expect("no lock is held");
                b.iter(|| {
                    let parts = copy.par_chunks_mut(part).zip(values.par_chunks(part));
                    pool.install(|| parts.for_each(|(to, from)| to.copy_from_slice(from)));
                });
            });
        }
        group.finish();
    }

    fn all(&mut self) {
        self.memcpy();
        for recipe in &AnyRecipe::all() {
            self.recipe(recipe);
        }
        self.group("adamw", |input| {
            Ok(vec![Cpu.plan(Work::Update(vec![input.adamw()?]))?])
        });
        for (name, master) in [("fp8", FloatDtype::F32), ("fp8 and bf16", FloatDtype::Bf16)] {
            self.group(&format!("adamw {name}"), |input| {
                let update = input.adamw_in_fp8(master)?;
                Ok(vec![Cpu.plan(Work::Update(vec![update]))?])
            });
        }
        self.group("amax", |input| Ok(vec![input.amax()?]));
        self.group("sum of squares", |input| {
            let (source, out) = (input.source(), Cpu.alloc(16)?);
            let work = Work::SumSquares(vec![SumSquaresJob { source, out }]);
            Ok(vec![Cpu.plan(work)?])
        });
        for code in [Code::E4M3, Code::E2M1] {
            self.group(&format!("transpose {code}"), |input| {
                Ok(vec![input.transpose(code)?])
            });
        }
    }

    fn recipe(&mut self, recipe: &AnyRecipe) {
        let name = recipe.name();
        let encode = |input: &Input, usage, source| {
            let encode = input.encode(recipe, usage, source)?;
            Cpu.plan(Work::Encode(vec![encode]))
        };
        for usage in [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH] {
            self.group(&format!("encode {name} {usage}"), |input| {
                Ok(vec![encode(input, usage, input.source())?])
            });
            self.group(&format!("encode {name} {usage} bf16"), |input| {
                let source = Source::Bf16(input.halves.clone());
                Ok(vec![encode(input, usage, source)?])
            });
        }
        for usage in [Usage::ROWWISE, Usage::BOTH] {
            let mut orientations = usage.orientations();
            if orientations.any(|o| recipe.kernel(o).scale.waits_for_amax()) {
                self.group(&format!("amax and encode {name} {usage}"), |input| {
                    let encode = input.observed(recipe, usage, input.source())?;
                    let amaxes = Work::Amax(AmaxJob::before(&Cpu, &encode));
                    Ok(vec![
                        Cpu.plan(amaxes)?,
                        Cpu.plan(Work::Encode(vec![encode]))?,
                    ])
                });
            }
            self.group(&format!("adamw and encode {name} {usage}"), |input| {
                input.step(recipe, usage)
            });
        }
        let activation = recipe.quantizers(Role::Activation);
        if activation.columnwise.kernel.hadamard {
            self.group(&format!("hadamard and encode {name} columnwise"), |input| {
                let encode = input.hadamard(recipe)?;
                Ok(vec![Cpu.plan(Work::Encode(vec![encode]))?])
            });
        }
        for orientation in Orientation::ALL {
            self.group(&format!("decode {name} {orientation}"), |input| {
                Ok(vec![input.decode(recipe, orientation)?])
            });
        }
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    // Cargo passes `--bench` to measure; without it, or with `--test`, criterion runs everything once.
    let mut args = std::env::args();
    let measure = args.any(|arg| arg == "--bench") && !args.any(|arg| arg == "--test");
    let shape = if measure { [8192, 4096] } else { [256, 512] };
    let shape = Shape::new(shape[0], shape[1]);
    let pool = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads")
    };
    let mut bench = Bench {
        criterion: &mut criterion,
        shape,
        samples: samples(1, shape.elements().min(SAMPLES), SIGMA),
        pools: [pool(1), pool(2)],
    };
    bench.all();
    criterion.final_summary();
}
