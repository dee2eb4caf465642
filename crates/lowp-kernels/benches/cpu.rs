//! Throughput of every kernel on the CPU, in bytes of f32 input, beside a memcpy of the same bytes
//! that is measured just before. `cargo xtask bench` prints the ratios and the bars of `bars.toml`.
//!
//! With `--test` every benchmark runs once on a small matrix.

use std::time::Duration;

use criterion::{Criterion, Throughput};
use half::bf16;
use lowp_format::{
    AnyRecipe, BufferSpec, Code, Orientation, Part, Philox, Recipe, ScaleRule, Shape,
    SourceRounding, Usage, tensor_scale,
};
use lowp_kernels::{
    AdamMode, AdamScalars, AdamwJob, AmaxJob, Backend, Cpu, CpuBuffer, CpuPlan, DecodeJob,
    EncodeJob, KernelError, Moments, Slot, Source, StepScalars, SumSquaresJob, Target, TensorInput,
    TransposeJob, Work,
};
use rayon::ThreadPool;
use rayon::prelude::*;
use smallvec::SmallVec;

type Result<T> = std::result::Result<T, KernelError>;

/// A matrix to work on, in both dtypes.
struct Input {
    shape: Shape,
    /// Normal values of standard deviation 0.02, as weights have.
    values: CpuBuffer<f32>,
    halves: CpuBuffer<bf16>,
    amax: f32,
}

impl Input {
    fn new(shape: Shape) -> Result<Self> {
        let random = Philox::new(1, 0);
        let some: Vec<f32> = (0..shape.elements().min(1 << 20) as u64)
            .map(|i| 0.02 * random.normal(i))
            .collect();
        let values: Vec<f32> = some
            .iter()
            .copied()
            .cycle()
            .take(shape.elements())
            .collect();
        let halves: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        Ok(Self {
            shape,
            values: Cpu.upload(&values)?,
            halves: Cpu.upload(&halves)?,
            amax: some.iter().fold(0.0, |a, x| a.max(x.abs())),
        })
    }

    fn source(&self) -> Source<Cpu> {
        Source::F32(self.values.clone())
    }

    fn encode(
        &self,
        recipe: &AnyRecipe,
        usage: Usage,
        source: Source<Cpu>,
    ) -> Result<EncodeJob<Cpu>> {
        let target = |spec: BufferSpec| -> Result<Target<Cpu>> {
            let bytes = Cpu.alloc(spec.bytes(self.shape))?;
            Ok(Target::new(spec, bytes))
        };
        let specs = recipe.buffers(usage);
        // The scale of a tensor with this amax, whatever decides it in training.
        let known = match recipe.kernel().scale {
            ScaleRule::Tensor => tensor_scale(self.amax, recipe.kernel().element, false, 0.0),
            _ => self.amax,
        };
        let tensor = TensorInput::Known(Slot {
            buffer: Cpu.upload(&[known])?,
            index: 0,
        });
        Ok(EncodeJob {
            shape: self.shape,
            kernel: recipe.kernel(),
            source,
            source_rounding: recipe.source_rounding(),
            tensor: Some(tensor),
            targets: specs.into_iter().map(target).collect::<Result<_>>()?,
            stochastic: None,
        })
    }

    fn amax(&self) -> Result<CpuPlan> {
        Cpu.plan(Work::Amax(vec![AmaxJob {
            shape: self.shape,
            start: 0,
            source: self.source(),
            source_rounding: SourceRounding::F32,
            out: Cpu.alloc(1)?,
            tensor: Some(0),
            blocks: SmallVec::new(),
        }]))
    }

    fn adamw(&self, observe: bool, encode: Option<EncodeJob<Cpu>>) -> Result<CpuPlan> {
        let n = self.shape.elements();
        let amax = Slot {
            buffer: Cpu.alloc(1)?,
            index: 0,
        };
        Cpu.plan(Work::Adamw(vec![AdamwJob {
            master: self.values.clone(),
            moments: Moments::F32 {
                exp_avg: Cpu.alloc(n)?,
                exp_avg_sq: Cpu.alloc(n)?,
            },
            grad: Source::F32(Cpu.upload(&vec![0.01; n])?),
            group: 0,
            mode: AdamMode::AdamW,
            source_rounding: SourceRounding::F32,
            amax: observe.then_some(amax),
            encode: encode.map(Box::new),
        }]))
    }

    /// The update and the cast of one step: fused where the scale is known, else in two passes.
    fn step(&self, recipe: &AnyRecipe, usage: Usage) -> Result<Vec<CpuPlan>> {
        let source = recipe.scale_source();
        let encode = self.encode(recipe, usage, self.source())?;
        if source.needs_tensor_amax() {
            let encode = Cpu.plan(Work::Encode(vec![encode]))?;
            Ok(vec![self.adamw(true, None)?, encode])
        } else {
            Ok(vec![
                self.adamw(source.observes_tensor_amax(), Some(encode))?,
            ])
        }
    }

    fn decode(&self, recipe: &AnyRecipe, orientation: Orientation) -> Result<CpuPlan> {
        let job = self.encode(recipe, orientation.usage(), self.source())?;
        let part = |part| job.target(orientation, part).cloned();
        let what = "data of an orientation".to_owned();
        let decode = DecodeJob {
            shape: self.shape,
            kernel: job.kernel,
            data: part(Part::Data).ok_or(KernelError::Missing { what })?,
            block_scale: part(Part::BlockScale),
            tensor_scale: part(Part::TensorScale).map(|t| t.bytes),
            out: Cpu.alloc(self.shape.elements())?,
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

/// Scalars of a step that is not the first.
fn scalars() -> StepScalars {
    let adam = AdamScalars {
        lr: 1e-4,
        ..AdamScalars::default()
    };
    StepScalars {
        adam: vec![adam.at_step(10)],
        ..StepScalars::default()
    }
}

/// Measures benchmarks as groups of three: memcpy, the kernel on one thread, and on two.
struct Bench<'a> {
    criterion: &'a mut Criterion,
    input: &'a Input,
    pools: [ThreadPool; 2],
    copy: CpuBuffer<f32>,
}

impl Bench<'_> {
    fn group(&mut self, name: &str, plans: Vec<CpuPlan>) -> Result<()> {
        let scalars = scalars();
        let mut group = self.criterion.benchmark_group(name);
        group.throughput(Throughput::Bytes(4 * self.input.shape.elements() as u64));
        group.sample_size(10);
        group.warm_up_time(Duration::from_millis(200));
        group.measurement_time(Duration::from_millis(800));
        let values = self.input.values.read()?;
        let mut copy = self.copy.write()?;
        group.bench_function("memcpy", |b| {
            b.iter(|| {
                copy.copy_from_slice(std::hint::black_box(&values));
                std::hint::black_box(&mut *copy);
            });
        });
        // Plans lock what they touch.
        drop((values, copy));
        for (threads, pool) in ["1 thread", "2 threads"].iter().zip(&self.pools) {
            group.bench_function(*threads, |b| {
                b.iter(|| {
                    pool.install(|| plans.iter().try_for_each(|plan| Cpu.run(plan, &scalars)))
                        .expect("planned work runs");
                });
            });
        }
        group.finish();
        Ok(())
    }

    /// What two threads gain where the memory is all there is to wait for.
    fn memcpy(&mut self) -> Result<()> {
        let values = self.input.values.read()?;
        let mut group = self.criterion.benchmark_group("memcpy");
        group.throughput(Throughput::Bytes(4 * values.len() as u64));
        group.sample_size(10);
        group.warm_up_time(Duration::from_millis(200));
        group.measurement_time(Duration::from_millis(800));
        for (threads, pool) in [1, 2].into_iter().zip(&self.pools) {
            let label = ["1 thread", "2 threads"][threads - 1];
            let part = values.len().div_ceil(threads);
            let mut copy = self.copy.write()?;
            group.bench_function(label, |b| {
                b.iter(|| {
                    let parts = copy.par_chunks_mut(part).zip(values.par_chunks(part));
                    pool.install(|| parts.for_each(|(to, from)| to.copy_from_slice(from)));
                });
            });
        }
        group.finish();
        Ok(())
    }

    fn all(&mut self) -> Result<()> {
        let input = self.input;
        self.memcpy()?;
        let usages = [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH];
        for recipe in &AnyRecipe::all() {
            let name = recipe.name();
            for usage in usages {
                for (dtype, source) in [
                    ("", input.source()),
                    (" bf16", Source::Bf16(input.halves.clone())),
                ] {
                    let encode = input.encode(recipe, usage, source)?;
                    let encode = Cpu.plan(Work::Encode(vec![encode]))?;
                    self.group(&format!("encode {name} {usage}{dtype}"), vec![encode])?;
                }
            }
            for usage in [Usage::ROWWISE, Usage::BOTH] {
                if recipe.scale_source().needs_tensor_amax() {
                    let encode = input.encode(recipe, usage, input.source())?;
                    let encode = Cpu.plan(Work::Encode(vec![encode]))?;
                    let plans = vec![input.amax()?, encode];
                    self.group(&format!("amax and encode {name} {usage}"), plans)?;
                }
                let plans = input.step(recipe, usage)?;
                self.group(&format!("adamw and encode {name} {usage}"), plans)?;
            }
            for orientation in Orientation::ALL {
                let plans = vec![input.decode(recipe, orientation)?];
                self.group(&format!("decode {name} {orientation}"), plans)?;
            }
        }
        self.group("adamw", vec![input.adamw(false, None)?])?;
        self.group("amax", vec![input.amax()?])?;
        let out = Cpu.alloc(16)?;
        let source = input.source();
        let squares = Cpu.plan(Work::SumSquares(vec![SumSquaresJob { source, out }]))?;
        self.group("sum of squares", vec![squares])?;
        for code in [Code::E4M3, Code::E2M1] {
            self.group(&format!("transpose {code}"), vec![input.transpose(code)?])?;
        }
        Ok(())
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    // Cargo passes `--bench` to measure; without it, or with `--test`, criterion runs everything once.
    let mut args = std::env::args();
    let measure = args.any(|arg| arg == "--bench") && !args.any(|arg| arg == "--test");
    let shape = if measure { [8192, 4096] } else { [256, 512] };
    let input = Input::new(Shape::new(shape[0], shape[1])).expect("memory for a matrix");
    let pool = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads")
    };
    let mut bench = Bench {
        criterion: &mut criterion,
        input: &input,
        pools: [pool(1), pool(2)],
        copy: Cpu
            .alloc(input.shape.elements())
            .expect("memory for a copy"),
    };
    bench.all().expect("the jobs of this benchmark are valid");
    criterion.final_summary();
}
