//! Casts, gathers and decodes of tensors of a few blocks, for every recipe: small enough for Miri (`cargo xtask miri`), which
//! interprets every access that the portable loops and the exchanges make.

use crate::common::{ranks, values};
use lowp_format::{AnyRecipe, Orientation, Phase, Recipe, Shape, Usage};
use lowp_kernels::{Backend, Cpu, DecodeJob, Source, StepScalars, Work};
use lowp_shard::{
    CastItem, CastPlan, GatherGroup, GatherPool, ScaleBookBuilder, ShardError, ShardSpec,
    ShardedTensor, quantize,
};

/// The fewest columns that `recipe` takes, and rows that end within a block.
fn shape(recipe: AnyRecipe) -> Shape {
    let shapes = [16, 32, 64, 128].map(|cols| Shape::new(3, cols));
    let fits = |shape: &Shape| recipe.check(*shape).is_ok();
    shapes.into_iter().find(fits).expect("few columns")
}

#[test]
fn decoded_values_are_near_the_source() -> Result<(), ShardError> {
    for recipe in AnyRecipe::all() {
        let shape = shape(recipe);
        let len = shape.elements();
        let numbers = values(1, len);
        let source = Source::F32(Cpu.upload(&numbers)?);
        let tensor = quantize(&Cpu, recipe, shape, Usage::BOTH, source, None)?;
        let amax = numbers.iter().fold(0f32, |amax, x| amax.max(x.abs()));
        for orientation in Orientation::ALL {
            let out = Cpu.alloc::<f32>(len)?;
            let job = DecodeJob::new(&tensor, orientation, Source::F32(out.clone()))?;
            let plan = Cpu.plan(Work::Decode(vec![job]))?;
            Cpu.run(&plan, &StepScalars::default())?;
            let decoded = Cpu.download(&out)?;
            let apart = decoded.iter().zip(&numbers).map(|(a, b)| (a - b).abs());
            // E2M1 has no value between 4 and 6, and its block scales round, too.
            assert!(
                apart.fold(0.0, f32::max) < 0.25 * amax,
                "{recipe:?} {orientation:?}"
            );
            assert!(decoded.iter().any(|&x| x != 0.0), "{recipe:?}");
        }
    }
    Ok(())
}

#[test]
fn two_ranks_gather_what_one_casts() {
    for recipe in AnyRecipe::low_precision() {
        let shape = shape(recipe);
        let numbers = values(2, shape.elements());
        ranks(2, |rank, comm| {
            let spec = ShardSpec::new(&recipe, shape, 2, rank)?;
            let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
            let own = Cpu.upload(&numbers[shard.spec().elements()])?;
            let mut book = ScaleBookBuilder::default();
            let items = [CastItem::rows(shard.local(), Source::F32(own), &mut book)];
            let book = book.build(&Cpu)?;
            CastPlan::new(&Cpu, &book, &items)?.calibrate(&book, &*comm)?;
            let pool = GatherPool::new(&Cpu);
            let mut group = GatherGroup::new(&Cpu, comm, &pool, vec![shard], true)?;
            let source = Source::F32(Cpu.upload(&numbers)?);
            let whole = quantize(&Cpu, recipe, shape, Usage::BOTH, source, None)?;
            for phase in Phase::ALL {
                group.prefetch(phase)?;
                group.unshard(phase)?;
                for buffer in group.tensor(0)?.buffers() {
                    let key = buffer.spec.key;
                    let expected = Cpu.download(&whole.buffer(key)?.storage)?;
                    assert_eq!(
                        Cpu.download(&buffer.storage)?,
                        expected,
                        "{recipe:?} {key:?}"
                    );
                }
                group.reshard();
            }
            Ok(())
        });
    }
}
