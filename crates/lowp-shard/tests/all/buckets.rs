//! Tensors in buckets: their bytes, their places, and everything that works on tensors works on them.

use crate::common::{bytes, ranks, values};
use lowp_comm::LocalComm;
use lowp_format::{AnyRecipe, Phase, QuantizedTensor, Shape, Usage};
use lowp_kernels::{Backend, Cpu, CpuBuffer, KernelError, Source};
use lowp_shard::{
    BUCKET_ALIGN, CastItem, CastPlan, FlatMaster, GatherGroup, GatherPool, ScaleBookBuilder,
    ShardError, ShardSpec, ShardedTensor, bucket_bytes, cast_master_weights, move_into, quantize,
};
use proptest::prelude::*;

type Tensor = QuantizedTensor<CpuBuffer<u8>>;

fn source(seed: u64, shape: Shape) -> Source<Cpu> {
    Source::F32(Cpu.upload(&values(seed, shape.elements())).expect("memory"))
}

fn quantized(recipe: AnyRecipe, shape: Shape, usage: Usage, seed: u64) -> Tensor {
    quantize(&Cpu, recipe, shape, usage, source(seed, shape), None).expect("quantized")
}

fn contents(tensor: &Tensor) -> Vec<Vec<u8>> {
    let download = |b: &lowp_format::Buffer<CpuBuffer<u8>>| Cpu.download(&b.storage);
    let all = tensor
        .buffers()
        .iter()
        .map(download)
        .collect::<Result<_, _>>();
    all.expect("bytes")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// All recipes one after another in one bucket: each keeps its bytes in the places that are promised, and
    /// what lies between is not written.
    #[test]
    fn tensors_keep_their_bytes_in_a_bucket(
        rows in 0usize..70, blocks in 0usize..4, usage in 1u8..4, gap in 0usize..3, seed: u64,
    ) {
        let usage = Usage::from_bits_truncate(usage);
        let shape = Shape::new(rows, 32 * blocks);
        let tensors: Vec<Tensor> =
            AnyRecipe::all().into_iter().map(|r| quantized(r, shape, usage, seed)).collect();
        let first = gap * BUCKET_ALIGN;
        let size = first + tensors.iter().map(bucket_bytes).sum::<usize>();
        let before = bytes(seed, size + gap);
        let bucket = Cpu.upload(&before).expect("memory");
        let (mut expected, mut offset) = (before, first);
        let mut moved = Vec::new();
        for tensor in &tensors {
            moved.push(move_into(&Cpu, tensor, &bucket, offset).expect("room"));
            let mut at = offset;
            for (buffer, content) in moved[moved.len() - 1].buffers().iter().zip(contents(tensor)) {
                if !content.is_empty() {
                    let start = Cpu.span(&bucket).start;
                    prop_assert_eq!(Cpu.span(&buffer.storage).start, start + at);
                }
                prop_assert!(at.is_multiple_of(256));
                expected[at..at + content.len()].copy_from_slice(&content);
                at += content.len().next_multiple_of(256);
            }
            prop_assert_eq!(at, offset + bucket_bytes(tensor));
            offset = at;
        }
        prop_assert_eq!(Cpu.download(&bucket).expect("bytes"), expected);
        for (tensor, moved) in tensors.iter().zip(&moved) {
            prop_assert_eq!(contents(moved), contents(tensor));
            prop_assert_eq!((moved.shape(), moved.usage()), (shape, tensor.usage()));
        }
    }
}

#[test]
fn casts_fill_tensors_in_buckets() {
    let shape = Shape::new(33, 64);
    for recipe in AnyRecipe::all() {
        let tensor = quantized(recipe, shape, Usage::BOTH, 1);
        let expected = contents(&quantized(recipe, shape, Usage::BOTH, 2));
        let bucket = Cpu.alloc::<u8>(2 * bucket_bytes(&tensor)).expect("memory");
        let rows = move_into(&Cpu, &tensor, &bucket, 0).expect("room");
        let flat = move_into(&Cpu, &tensor, &bucket, bucket_bytes(&tensor)).expect("room");
        let mut book = ScaleBookBuilder::default();
        let item = CastItem::rows(&rows, source(2, shape), &mut book);
        let (book, comm) = (book.build(&Cpu).expect("a book"), LocalComm::solo(&Cpu));
        let cast = CastPlan::new(&Cpu, &book, &[item]).expect("planned");
        cast.calibrate(&book, &comm).expect("cast");
        let (tensor, start, master) = (&flat, 0, source(2, shape));
        let weight = FlatMaster {
            tensor,
            start,
            master,
        };
        cast_master_weights(&Cpu, &comm.into(), &[weight]).expect("cast");
        assert_eq!(contents(&rows), expected, "{recipe:?}");
        assert_eq!(contents(&flat), expected, "{recipe:?}");
    }
}

/// A group gathers moved shards, and hears of casts of either handle.
#[test]
fn moved_shards_are_gathered_and_keep_their_version() {
    let shape = Shape::new(96, 64);
    for recipe in AnyRecipe::all() {
        let whole = [1, 2].map(|seed| contents(&quantized(recipe, shape, Usage::ROWWISE, seed)));
        ranks(2, |rank, comm| {
            let spec = ShardSpec::for_usage(&recipe, shape, 2, rank, Usage::ROWWISE)?;
            let own = spec.elements();
            let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
            let bucket = Cpu.alloc::<u8>(bucket_bytes(shard.local()))?;
            let moved = shard.move_into(&Cpu, &bucket, 0)?;
            let pool = GatherPool::new(&Cpu);
            let params = vec![moved.clone()];
            let mut group = GatherGroup::new(&Cpu, comm.clone(), &pool, params, true)?;
            for (seed, whole) in (1..).zip(&whole) {
                let master = Cpu.upload(&values(seed, shape.elements())[own.clone()])?;
                let mut book = ScaleBookBuilder::default();
                let item = CastItem::rows(moved.local(), Source::F32(master), &mut book);
                let book = book.build(&Cpu)?;
                CastPlan::new(&Cpu, &book, &[item])?.calibrate(&book, &*comm)?;
                group.unshard(Phase::Forward)?;
                assert_eq!(&contents(group.tensor(0)?), whole, "{recipe:?}");
            }
            shard.begin_write();
            let (param, stale) = (0, group.tensor(0).err());
            assert_eq!(stale, Some(ShardError::Stale { param }));
            Ok(())
        });
    }
}

#[test]
fn places_that_do_not_fit_are_errors_with_the_numbers() {
    let tensor = quantized(AnyRecipe::all()[0], Shape::new(4, 64), Usage::BOTH, 1);
    let needed = bucket_bytes(&tensor);
    assert_eq!(needed, 1024);
    let bucket = Cpu.alloc::<u8>(1500).expect("memory");
    let place = |offset| move_into(&Cpu, &tensor, &bucket, offset).err();
    let (offset, align, len) = (128, 256, 1500);
    assert_eq!(
        place(offset),
        Some(ShardError::BucketOffset { offset, align })
    );
    for offset in [512, 2048, usize::MAX / 256 * 256] {
        assert_eq!(
            place(offset),
            Some(ShardError::BucketRoom {
                offset,
                needed,
                len
            })
        );
    }
    let text = place(512)
        .map(|error| error.to_string())
        .unwrap_or_default();
    assert!(text.contains("1536"), "{text}");
    let moved = move_into(&Cpu, &tensor, &bucket, 0).expect("room");
    let again = move_into(&Cpu, &moved, &bucket, 0).err();
    assert!(
        matches!(again, Some(ShardError::Kernel(KernelError::Aliased { .. }))),
        "{again:?}"
    );
}
