//! Throughput of every kernel on the CPU, in GB/s of f32 input, one thread. Plain timing: the best
//! of several runs, next to a memcpy of the same size.

use std::time::Instant;

use half::bf16;
use lowp_format::{AnyRecipe, Orientation, Part, Philox, Recipe, ScaleSource, Shape, Usage};
use lowp_kernels::{
    AdamMode, AdamScalars, AdamwJob, AmaxJob, Backend, Cpu, CpuBuffer, DecodeJob, EncodeJob,
    KernelError, Moments, Slot, Source, StepScalars, SumSquaresJob, Target, TransposeJob, Work,
};

const SHAPE: Shape = Shape::new(4096, 2048);

fn time(label: &str, mut run: impl FnMut()) {
    // `cargo bench -- mx` runs what contains `mx`.
    let mut filters = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .peekable();
    if filters.peek().is_some() && !filters.any(|filter| label.contains(&filter)) {
        return;
    }
    run();
    let best = (0..7)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    println!(
        "{label:44} {:7.2} GB/s",
        SHAPE.elements() as f64 * 4.0 / best / 1e9
    );
}

fn time_work(label: &str, work: Work<Cpu>, scalars: &StepScalars) -> Result<(), KernelError> {
    let plan = Cpu.plan(work)?;
    time(label, || {
        Cpu.run(&plan, scalars).expect("planned work runs")
    });
    Ok(())
}

fn encode_job(recipe: &AnyRecipe, usage: Usage, source: Source<Cpu>) -> EncodeJob<Cpu> {
    let target = |spec: lowp_format::BufferSpec| Target {
        spec,
        bytes: CpuBuffer::from_vec(vec![0; spec.bytes(SHAPE)]),
    };
    EncodeJob {
        shape: SHAPE,
        kernel: recipe.kernel(),
        source,
        source_rounding: recipe.source_rounding(),
        tensor: Some(Slot {
            buffer: CpuBuffer::from_vec(vec![4.0]),
            index: 0,
        }),
        targets: recipe.buffers(usage).into_iter().map(target).collect(),
        stochastic: None,
    }
}

fn measure() -> Result<(), KernelError> {
    let n = SHAPE.elements();
    let random = Philox::new(1, 0);
    let values: Vec<f32> = (0..n as u64).map(|i| random.normal(i)).collect();
    let mut copy = vec![0f32; n];
    time("memcpy", || {
        copy.copy_from_slice(std::hint::black_box(&values));
        std::hint::black_box(&mut copy);
    });
    let halves: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    let (master, halves) = (CpuBuffer::from_vec(values), CpuBuffer::from_vec(halves));
    let none = StepScalars::default();
    for recipe in AnyRecipe::all() {
        let name = recipe.name();
        for usage in [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH] {
            let job = encode_job(&recipe, usage, Source::F32(master.clone()));
            time_work(
                &format!("encode {name} {usage}"),
                Work::Encode(vec![job]),
                &none,
            )?;
        }
        let job = encode_job(&recipe, Usage::BOTH, Source::Bf16(halves.clone()));
        time_work(
            &format!("encode {name} both, bf16 source"),
            Work::Encode(vec![job]),
            &none,
        )?;
        let job = encode_job(&recipe, Usage::BOTH, Source::F32(master.clone()));
        Cpu.once(Work::Encode(vec![job.clone()]))?;
        for orientation in Orientation::ALL {
            let part = |part| job.target(orientation, part).cloned();
            let Some(data) = part(Part::Data) else {
                continue;
            };
            let decode = DecodeJob {
                shape: SHAPE,
                kernel: job.kernel,
                data,
                block_scale: part(Part::BlockScale),
                tensor_scale: part(Part::TensorScale).map(|t| t.bytes),
                out: Cpu.alloc(n)?,
            };
            let label = format!("decode {name} {orientation}");
            time_work(&label, Work::Decode(vec![decode]), &none)?;
        }
        let label = format!("adamw + encode {name} both");
        let fused = adamw(
            &master,
            Some(encode_job(
                &recipe,
                Usage::BOTH,
                Source::F32(master.clone()),
            )),
        )?;
        if recipe.scale_source() != ScaleSource::None || name.len() > 3 {
            time_work(&label, Work::Adamw(vec![fused]), &adam_scalars())?;
        }
    }
    time_work(
        "adamw",
        Work::Adamw(vec![adamw(&master, None)?]),
        &adam_scalars(),
    )?;
    let source = Source::F32(master.clone());
    let amax = AmaxJob {
        shape: SHAPE,
        start: 0,
        source: source.clone(),
        source_rounding: lowp_format::SourceRounding::F32,
        out: Cpu.alloc(1)?,
        tensor: Some(0),
        blocks: Default::default(),
    };
    time_work("amax", Work::Amax(vec![amax]), &none)?;
    let sum = SumSquaresJob {
        source,
        out: Cpu.alloc(16)?,
    };
    time_work("sum of squares", Work::SumSquares(vec![sum]), &none)?;
    for code in [lowp_format::Code::E4M3, lowp_format::Code::E2M1] {
        let entries = [SHAPE.rows, SHAPE.cols];
        let bytes = code.bytes(n);
        let (from, to) = (Cpu.alloc(bytes)?, Cpu.alloc(bytes)?);
        let job = TransposeJob {
            code,
            entries,
            from,
            to,
        };
        time_work(
            &format!("transpose {code} (4 B/element)"),
            Work::Transpose(vec![job]),
            &none,
        )?;
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
        source_rounding: lowp_format::SourceRounding::F32,
        amax: Some(Slot {
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
