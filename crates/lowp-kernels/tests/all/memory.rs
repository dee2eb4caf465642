//! Memory that is not there is an error, and rows of nothing cost nothing.

use std::hint::black_box;

use lowp_format::{AnyRecipe, Axis, BufferSpec, Part, Recipe, Shape, Usage};
use lowp_kernels::{
    Backend, Cpu, EncodeJob, FlatEncodeJob, GroupScalars, KernelError, Rule, Source, StepScalars,
    Target, TensorInput, UpdateJob, Work,
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

/// The same with known entries of 1.
fn known(
    inputs: [Option<TensorInput<Cpu>>; 2],
) -> Result<[Option<TensorInput<Cpu>>; 2], KernelError> {
    for input in inputs.iter().flatten() {
        let buffer = &input.slot().buffer;
        Cpu.write(buffer, 0, &vec![1.0; buffer.len()])?;
    }
    Ok(inputs.map(|input| Some(TensorInput::Known(input?.slot().clone()))))
}

/// An encode of `shape`, whose scales are known.
fn encode(recipe: &AnyRecipe, shape: Shape) -> Result<EncodeJob<Cpu>, KernelError> {
    let source = Source::F32(Cpu.alloc(shape.elements())?);
    let job = EncodeJob::new(&Cpu, recipe, shape, Usage::BOTH, source)?;
    let tensor = known(job.tensor)?;
    Ok(EncodeJob { tensor, ..job })
}

/// The same as an encode of no elements of the flattened matrix.
fn flat(recipe: &AnyRecipe, shape: Shape) -> Result<FlatEncodeJob<Cpu>, KernelError> {
    let source = Source::F32(Cpu.alloc(0)?);
    let job = FlatEncodeJob::new(&Cpu, recipe, shape, Usage::BOTH, 0..0, source)?;
    let row_major = |t: &Target<Cpu>| t.spec.key.part != Part::Data || t.spec.axes[0] == Axis::Rows;
    Ok(FlatEncodeJob {
        tensor: known(job.tensor)?,
        targets: job.targets.into_iter().filter(row_major).collect(),
        ..job
    })
}

/// A file states the number of rows in a few bytes, so nothing may be in proportion to it.
#[test]
fn rows_of_nothing_cost_nothing() -> Result<(), KernelError> {
    let scalars = StepScalars {
        groups: vec![GroupScalars::default()],
        ..StepScalars::default()
    };
    for recipe in AnyRecipe::all() {
        let of_lines = |spec: &BufferSpec| spec.key.part.is_outer() && !spec.is_scalar();
        // Scales of rows are stated as often as there are rows.
        let lines = recipe.buffers(Usage::BOTH).iter().any(of_lines);
        let shape = Shape::new(if lines { 1 << 20 } else { 1 << 40 }, 0);
        let alone = encode(&recipe, shape)?;
        Cpu.once(Work::Encode(vec![alone.clone()]))?;
        for target in alone.targets.iter() {
            let written = target.spec.key.part.is_outer() && target.spec.bytes(shape) > 0;
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
        let grad = Source::F32(Cpu.alloc(0)?);
        let (update, later) =
            UpdateJob::new(&Cpu, Rule::AdamW, master.clone(), grad)?.with_encode(fused);
        assert!(update.encode.is_some() && later.is_none());
        Cpu.run(&Cpu.plan(Work::Update(vec![update]))?, &scalars)?;
        Cpu.once(Work::FlatEncode(vec![flat(&recipe, shape)?]))?;
    }
    Ok(())
}
