//! Throughput of every kernel on the CPU, in GB/s of f32 input, one thread. Plain timing: the best
//! of several runs, next to a memcpy of the same size.

use std::time::Instant;

use half::bf16;
use lowp_format::{
    AnyRecipe, BufferSpec, Code, Orientation, Part, Philox, Recipe, Shape, SourceRounding, Usage,
};
use lowp_kernels::{
    AdamMode, AdamScalars, AdamwJob, AmaxJob, Backend, Cpu, CpuBuffer, DecodeJob, EncodeJob,
    KernelError, Moments, Slot, Source, StepScalars, SumSquaresJob, Target, TransposeJob, Work,
};
use smallvec::SmallVec;

const SHAPE: Shape = Shape::new(8192, 4096);

/// `cargo bench -- block` runs what contains `block`.
fn wanted(label: &str) -> bool {
    let mut filters = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .peekable();
    filters.peek().is_none() || filters.any(|filter| label.contains(&filter))
}

fn time(label: &str, mut run: impl FnMut()) {
    run();
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    while begin.elapsed().as_secs_f64() < 0.4 {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
    }
    println!(
        "{label:44} {:7.2} GB/s",
        SHAPE.elements() as f64 * 4.0 / best / 1e9
    );
}

fn time_work(
    label: &str,
    scalars: &StepScalars,
    work: impl FnOnce() -> Result<Work<Cpu>, KernelError>,
) -> Result<(), KernelError> {
    if wanted(label) {
        let plan = Cpu.plan(work()?)?;
        time(label, || {
            Cpu.run(&plan, scalars).expect("planned work runs")
        });
    }
    Ok(())
}

fn encode_job(recipe: &AnyRecipe, usage: Usage, source: Source<Cpu>) -> EncodeJob<Cpu> {
    let target = |spec: BufferSpec| Target {
        spec,
        bytes: Cpu.alloc(spec.bytes(SHAPE)).expect("memory"),
    };
    EncodeJob {
        shape: SHAPE,
        kernel: recipe.kernel(),
        source,
        source_rounding: recipe.source_rounding(),
        tensor: Some(Slot {
            buffer: CpuBuffer::from_vec(vec![if recipe.kernel().blocks.is_some() {
                0.5
            } else {
                896.0
            }]),
            index: 0,
        }),
        targets: recipe.buffers(usage).into_iter().map(target).collect(),
        stochastic: None,
    }
}

fn measure() -> Result<(), KernelError> {
    let n = SHAPE.elements();
    let random = Philox::new(1, 0);
    let value = |i: u64| {
        let words = random.block(i / 4);
        f32::from_bits(0x3F80_0000 | (words[(i % 4) as usize] >> 9)) - 1.5
    };
    let values: Vec<f32> = (0..n as u64).map(value).collect();
    if wanted("memcpy") {
        let mut copy = vec![0f32; n];
        time("memcpy", || {
            copy.copy_from_slice(std::hint::black_box(&values));
            std::hint::black_box(&mut copy);
        });
    }
    let halves: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    let (master, halves) = (Cpu.upload(&values)?, Cpu.upload(&halves)?);
    let source = || Source::F32(master.clone());
    let none = &StepScalars::default();
    for recipe in &AnyRecipe::all() {
        let name = recipe.name();
        let encode = |usage, source| encode_job(recipe, usage, source);
        for usage in [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH] {
            time_work(&format!("encode {name} {usage}"), none, || {
                Ok(Work::Encode(vec![encode(usage, source())]))
            })?;
        }
        time_work(&format!("encode {name} both, bf16 source"), none, || {
            Ok(Work::Encode(vec![encode(
                Usage::BOTH,
                Source::Bf16(halves.clone()),
            )]))
        })?;
        for orientation in Orientation::ALL {
            time_work(&format!("decode {name} {orientation}"), none, || {
                let job = encode(orientation.usage(), source());
                Cpu.once(Work::Encode(vec![job.clone()]))?;
                let part = |part| job.target(orientation, part).cloned();
                let what = "data of an orientation".to_owned();
                Ok(Work::Decode(vec![DecodeJob {
                    shape: SHAPE,
                    kernel: job.kernel,
                    data: part(Part::Data).ok_or(KernelError::Missing { what })?,
                    block_scale: part(Part::BlockScale),
                    tensor_scale: part(Part::TensorScale).map(|t| t.bytes),
                    out: Cpu.alloc(n)?,
                }]))
            })?;
        }
        for usage in [Usage::ROWWISE, Usage::BOTH] {
            time_work(
                &format!("adamw + encode {name} {usage}"),
                &adam_scalars(),
                || {
                    let observe = recipe.scale_source().observes_tensor_amax();
                    Ok(Work::Adamw(vec![adamw(
                        &master,
                        observe,
                        Some(encode(usage, source())),
                    )?]))
                },
            )?;
        }
    }
    time_work("adamw alone", &adam_scalars(), || {
        Ok(Work::Adamw(vec![adamw(&master, true, None)?]))
    })?;
    time_work("amax", none, || {
        Ok(Work::Amax(vec![AmaxJob {
            shape: SHAPE,
            start: 0,
            source: source(),
            source_rounding: SourceRounding::F32,
            out: Cpu.alloc(1)?,
            tensor: Some(0),
            blocks: SmallVec::new(),
        }]))
    })?;
    time_work("sum of squares", none, || {
        Ok(Work::SumSquares(vec![SumSquaresJob {
            source: source(),
            out: Cpu.alloc(16)?,
        }]))
    })?;
    for code in [Code::E4M3, Code::E2M1] {
        time_work(&format!("transpose {code} (4 B/element)"), none, || {
            let bytes = code.bytes(n);
            let (from, to) = (Cpu.alloc(bytes)?, Cpu.alloc(bytes)?);
            let entries = [SHAPE.rows, SHAPE.cols];
            Ok(Work::Transpose(vec![TransposeJob {
                code,
                entries,
                from,
                to,
            }]))
        })?;
    }
    Ok(())
}

fn adam_scalars() -> StepScalars {
    let adam = AdamScalars {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1: 1.0,
        correction2: 1.0,
    };
    StepScalars {
        adam: vec![adam.at_step(10)],
        ..StepScalars::default()
    }
}

fn adamw(
    master: &CpuBuffer<f32>,
    observe: bool,
    encode: Option<EncodeJob<Cpu>>,
) -> Result<AdamwJob<Cpu>, KernelError> {
    let n = SHAPE.elements();
    Ok(AdamwJob {
        master: master.clone(),
        moments: Moments::F32 {
            exp_avg: Cpu.alloc(n)?,
            exp_avg_sq: Cpu.alloc(n)?,
        },
        grad: Source::F32(Cpu.upload(&vec![0.01; n])?),
        group: 0,
        mode: AdamMode::AdamW,
        source_rounding: SourceRounding::F32,
        amax: observe.then_some(Slot {
            buffer: Cpu.alloc(1)?,
            index: 0,
        }),
        encode: encode.map(Box::new),
    })
}

fn main() {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .expect("one thread");
    pool.install(measure)
        .expect("the jobs of this benchmark are valid");
}
