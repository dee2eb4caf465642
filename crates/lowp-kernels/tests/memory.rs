//! Memory that is not there is an error, and rows of nothing cost nothing.

use std::hint::black_box;

use lowp_format::{AnyRecipe, Axis, Part, Recipe, ScaleRule, Shape, SourceRounding, Usage};
use lowp_kernels::{
    AdamMode, AdamScalars, AdamwJob, Backend, BlockAmax, Cpu, EncodeJob, FlatBlocks, FlatEncodeJob,
    KernelError, Moments, Slot, Source, StepScalars, Target, TensorInput, Work,
};

#[test]
fn a_buffer_that_does_not_fit_is_an_error() {
    // More than can be counted in bytes, than an allocation may have, and than a process can address.
    for len in [usize::MAX, usize::MAX / 4, 1 << 46] {
        let bytes = len as u128 * 4;
        let found = black_box(Cpu.alloc::<f32>(len)).map(|_| ());
        assert_eq!(found, Err(KernelError::NoMemory { bytes }));
        let message = KernelError::NoMemory { bytes }.to_string();
        assert!(message.contains(&bytes.to_string()), "{message}");
    }
    assert!(Cpu.alloc::<u8>(usize::MAX).is_err());
    assert!(Cpu.alloc::<half::bf16>(usize::MAX).is_err());
}

/// An encode of `shape`, with the tensor amax that the recipe may need.
fn encode(recipe: &AnyRecipe, shape: Shape) -> Result<EncodeJob<Cpu>, KernelError> {
    let target = |spec: lowp_format::BufferSpec| {
        let bytes = Cpu.alloc(spec.bytes(shape))?;
        Ok(Target::new(spec, bytes))
    };
    let targets = recipe.buffers(Usage::BOTH).into_iter().map(target);
    let kernel = recipe.kernel();
    let slot = Slot {
        buffer: Cpu.upload(&[1f32])?,
        index: 0,
    };
    let known = matches!(kernel.scale, ScaleRule::Tensor | ScaleRule::TwoLevel);
    Ok(EncodeJob {
        shape,
        kernel,
        source: Source::F32(Cpu.alloc(shape.elements())?),
        source_rounding: recipe.source_rounding(),
        tensor: known.then_some(TensorInput::Known(slot)),
        targets: targets.collect::<Result<_, KernelError>>()?,
        stochastic: None,
    })
}

/// The same as an encode of the flattened matrix, with agreed amaxes.
fn flat(job: EncodeJob<Cpu>) -> Result<FlatEncodeJob<Cpu>, KernelError> {
    let blocks = job.kernel.blocks.map(|[rowwise, columnwise]| {
        let part = |block| BlockAmax { block, start: 0 };
        let both = [part(rowwise), part(columnwise)].into_iter();
        let distinct = if rowwise == columnwise { 1 } else { 2 };
        both.take(distinct).collect()
    });
    let amaxes = Cpu.alloc(1)?;
    let row_major = |t: &Target<Cpu>| t.spec.key.part != Part::Data || t.spec.axes[0] == Axis::Rows;
    Ok(FlatEncodeJob {
        shape: job.shape,
        start: 0,
        len: 0,
        kernel: job.kernel,
        source: job.source,
        source_rounding: job.source_rounding,
        tensor: job.tensor,
        blocks: blocks.map(|blocks| FlatBlocks { amaxes, blocks }),
        targets: job.targets.into_iter().filter(row_major).collect(),
    })
}

/// A file states the number of rows in a few bytes, so nothing may be in proportion to it.
#[test]
fn rows_of_nothing_cost_nothing() -> Result<(), KernelError> {
    let shape = Shape::new(1 << 40, 0);
    let scalars = StepScalars {
        adam: vec![AdamScalars::default()],
        ..StepScalars::default()
    };
    for recipe in AnyRecipe::all() {
        let alone = encode(&recipe, shape)?;
        Cpu.once(Work::Encode(vec![alone.clone()]))?;
        for target in alone.targets.iter() {
            let written = target.spec.key.part.is_per_tensor();
            let bytes = Cpu.download(&target.bytes)?;
            assert_eq!(
                bytes.iter().any(|&byte| byte != 0),
                written,
                "{:?}",
                target.spec
            );
        }
        let fused = encode(&recipe, shape)?;
        let Source::F32(master) = &fused.source else {
            continue;
        };
        let update = AdamwJob {
            master: master.clone(),
            moments: Moments::F32 {
                exp_avg: Cpu.alloc(0)?,
                exp_avg_sq: Cpu.alloc(0)?,
            },
            grad: Source::F32(Cpu.alloc(0)?),
            group: 0,
            mode: AdamMode::AdamW,
            source_rounding: SourceRounding::F32,
            amax: None,
            encode: Some(Box::new(fused)),
        };
        Cpu.run(&Cpu.plan(Work::Adamw(vec![update]))?, &scalars)?;
        Cpu.once(Work::FlatEncode(vec![flat(encode(&recipe, shape)?)?]))?;
    }
    Ok(())
}
