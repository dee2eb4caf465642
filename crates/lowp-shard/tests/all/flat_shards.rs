//! Flat shards: byte positions, even splits, nibble-exact merges, rejected cuts, and the cast of
//! each rank's range that equals the full quantize.

use crate::common::{self, bytes, tiling};
use lowp_comm::GatherItem;
use lowp_format::{AnyRecipe, Axis, Code, Part, Recipe, Role, Shape, Usage};
use lowp_kernels::{Backend, Cpu, Source};
use lowp_shard::{
    CastItem, CastPlan, FlatShard, ScaleBookBuilder, ShardError, flat_targets, quantize,
};
use proptest::prelude::*;

#[test]
fn an_odd_start_keeps_its_nibble() {
    // The worked example of docs/numerics.md 11.3.
    let shard = FlatShard::new(Shape::new(4, 16), Code::E2M1, 9..14).expect("a shard");
    assert_eq!(shard.bytes(), 4..7);
    assert_eq!([0, 1, 2].map(|b| shard.foreign_bits(b)), [0x0F, 0, 0]);
    let rejected = shard.gatherable().expect_err("it begins mid-byte");
    assert!(matches!(
        rejected,
        ShardError::CutThroughByte {
            start: 9,
            end: 14,
            at: 9,
            per_byte: 2
        }
    ));
    let one = FlatShard::new(Shape::new(4, 16), Code::E2M1, 3..4).expect("a shard");
    assert_eq!((one.bytes(), one.foreign_bits(0)), (1..2, 0x0F));
    let one = FlatShard::new(Shape::new(4, 16), Code::E2M1, 4..5).expect("a shard");
    assert_eq!((one.bytes(), one.foreign_bits(0)), (2..3, 0xF0));
}

#[test]
fn ranges_outside_and_rows_of_half_bytes_are_rejected() {
    let shape = Shape::new(2, 16);
    let outside = FlatShard::new(shape, Code::E4M3, 30..33).err();
    assert_eq!(
        outside,
        Some(ShardError::FlatRange {
            start: 30,
            end: 33,
            shape
        })
    );
    let shape = Shape::new(2, 15);
    let unaligned = FlatShard::new(shape, Code::E2M1, 0..2).err();
    assert_eq!(
        unaligned,
        Some(ShardError::FlatColumns { shape, per_byte: 2 })
    );
    assert!(FlatShard::new(shape, Code::E4M3, 0..2).is_ok());
}

#[test]
fn gaps_and_missing_ends_are_rejected() {
    let shape = Shape::new(2, 16);
    let shard = |range| FlatShard::new(shape, Code::E4M3, range).expect("a shard");
    let gap = FlatShard::gather_ranges(&[shard(0..8), shard(9..32)]);
    assert_eq!(
        gap,
        Err(ShardError::FlatTiling {
            shape,
            rank: 1,
            start: 9,
            expected: 8
        })
    );
    assert!(FlatShard::gather_ranges(&[shard(0..8), shard(8..31)]).is_err());
    assert!(FlatShard::gather_ranges(&[]).is_err());
}

proptest! {
    #[test]
    fn splits_are_even_whole_bytes(
        rows in 0usize..40, half_cols in 1usize..9, world in 1usize..=9, index in 0usize..6,
    ) {
        let (shape, code) = (Shape::new(rows, 2 * half_cols), Code::ALL[index]);
        let shards = FlatShard::split(shape, code, world).expect("a split");
        let ranges = FlatShard::gather_ranges(&shards).expect("whole bytes");
        let lens: Vec<usize> = ranges.iter().map(|r| r.len()).collect();
        prop_assert_eq!(&ranges, &tiling(&lens));
        prop_assert_eq!(lens.iter().sum::<usize>(), code.bytes(shape.elements()));
        prop_assert!(shards.iter().all(|s| s.len() <= shape.elements().div_ceil(world) + 1));
    }

    /// Shards that are cut of different matrices are rejected, whatever they are: nothing is read or
    /// written outside the pieces.
    #[test]
    fn shards_of_different_matrices_are_rejected(
        shards in prop::collection::vec(
            (0usize..4, 0usize..3, 0usize..6, 0usize..40, 0usize..40), 1..5,
        ),
        adjoin: bool,
        seed: u64,
    ) {
        let mut end = 0;
        let shards: Vec<FlatShard> = shards
            .iter()
            .map(|&(rows, cols, code, start, len)| {
                let shape = Shape::new(rows, 4 * cols);
                let start = if adjoin { end } else { start }.min(shape.elements());
                end = (start + len).min(shape.elements());
                FlatShard::new(shape, Code::ALL[code], start..end).expect("inside")
            })
            .collect();
        let pieces: Vec<Vec<u8>> = shards.iter().map(|s| bytes(seed, s.bytes().len())).collect();
        let slices: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
        let (shape, code) = (shards[0].shape(), shards[0].code());
        let alike = shards.iter().all(|s| s.shape() == shape && s.code() == code);
        let merged = FlatShard::merge(&shards, &slices);
        let ranges = FlatShard::gather_ranges(&shards);
        if alike {
            prop_assert_eq!(merged.is_ok_and(|m| m.len() == code.bytes(shape.elements())),
                shards.iter().try_fold(0, |at, s| {
                    (s.elements().start == at).then_some(s.elements().end)
                }) == Some(shape.elements()));
        } else {
            prop_assert!(merged.is_err() && ranges.is_err(), "{:?} {:?}", merged, ranges);
        }
    }

    #[test]
    fn merging_any_cuts_is_exact(
        cuts in prop::collection::vec(0usize..=96, 0..8), index in 0usize..6, seed: u64,
    ) {
        let (shape, code) = (Shape::new(6, 16), Code::ALL[index]);
        let mut at = cuts;
        at.extend([0, 96]);
        at.sort_unstable();
        let shards: Vec<FlatShard> = at
            .windows(2)
            .map(|w| FlatShard::new(shape, code, w[0]..w[1]).expect("a shard"))
            .collect();
        let full = bytes(seed, code.bytes(96));
        // Each rank's piece has noise in the nibbles that it does not own.
        let pieces: Vec<Vec<u8>> = shards
            .iter()
            .enumerate()
            .map(|(rank, shard)| {
                let noise = bytes(seed ^ rank as u64, shard.bytes().len());
                let own = full[shard.bytes()].iter().zip(noise).enumerate();
                let mix = |(i, (&x, n))| {
                    let foreign: u8 = shard.foreign_bits(i);
                    x & !foreign | n & foreign
                };
                own.map(mix).collect()
            })
            .collect();
        let slices: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
        prop_assert_eq!(FlatShard::merge(&shards, &slices), Ok(full));
        let unaligned = code == Code::E2M1 && at.windows(2).any(|w| w[0] < w[1] && w[1] % 2 == 1);
        prop_assert_eq!(FlatShard::gather_ranges(&shards).is_err(), unaligned);
    }
}

/// ZeRO-1: every rank casts its flat range with agreed scales, data bytes are gathered, and the
/// result is the full quantize.
fn cast_and_gather(
    recipe: AnyRecipe,
    shape: Shape,
    cuts: impl Fn(Code) -> Vec<FlatShard> + Sync,
    merge: bool,
) {
    let all = common::values(7, shape.elements());
    let source = || Ok::<_, ShardError>(Source::F32(Cpu.upload(&all)?));
    let whole = source()
        .and_then(|source| quantize(&Cpu, recipe, shape, Usage::BOTH, source, None))
        .expect("quantized");
    let codes = recipe
        .quantizers(Role::Weight)
        .kernels()
        .map(|kernel| kernel.element);
    let narrowest = codes.into_iter().min_by_key(|code| code.bits());
    let shards = cuts(narrowest.expect("two codes"));
    let stored_as = |code| shards.iter().map(|s| s.stored_as(code)).collect::<Vec<_>>();
    let results = common::ranks(shards.len(), |rank, comm| {
        let own = shards[rank];
        let targets = flat_targets(&Cpu, &recipe, &own, Usage::BOTH)?;
        let master = Source::F32(Cpu.upload(&all[own.elements()])?);
        let mut book = ScaleBookBuilder::default();
        let range = own.elements();
        let item = CastItem::flat(&recipe, shape, range, master, targets.clone(), &mut book);
        let book = book.build(&Cpu)?;
        CastPlan::new(&Cpu, &book, &[item])?.calibrate(&book, &*comm)?;
        let mut pieces = Vec::new();
        for target in &targets {
            let expected = Cpu.download(&whole.buffer(target.spec.key)?.storage)?;
            if target.spec.key.part != Part::Data {
                assert_eq!(Cpu.download(&target.bytes)?, expected, "{}", recipe.name());
            } else if merge {
                let code = target.spec.code;
                pieces.push((code, expected, Cpu.download(&target.bytes)?));
            } else {
                let ranges = FlatShard::gather_ranges(&stored_as(target.spec.code))?;
                let dest = Cpu.alloc(expected.len())?;
                comm.all_gather(&[GatherItem {
                    source: &target.bytes,
                    dest: &dest,
                    ranges: &ranges,
                }])?;
                assert_eq!(Cpu.download(&dest)?, expected, "{}", recipe.name());
            }
        }
        Ok(pieces)
    });
    for buffer in 0..results[0].len() {
        let pieces: Vec<&[u8]> = results.iter().map(|r| r[buffer].2.as_slice()).collect();
        let (code, expected, _) = &results[0][buffer];
        let merged = FlatShard::merge(&stored_as(*code), &pieces).expect("a tiling");
        assert_eq!(&merged, expected, "{}", recipe.name());
    }
}

/// Recipes whose data all lie in the order of the flattened matrix.
fn flat_recipes() -> Vec<AnyRecipe> {
    let straight = |r: &AnyRecipe| {
        let stored = r.stored(Usage::BOTH);
        stored.iter().all(|s| s.axes[0] == Axis::Rows)
    };
    let recipes = common::variants().into_iter().filter(common::casts_flat);
    recipes.filter(straight).collect()
}

#[test]
fn even_splits_gather_to_the_full_quantize() {
    for recipe in flat_recipes() {
        for world in [1, 2, 3, 7, 9] {
            for rows in [1, 17, 48] {
                let shape = Shape::new(rows, 64);
                let split = |code| FlatShard::split(shape, code, world).expect("a split");
                cast_and_gather(recipe, shape, split, false);
            }
        }
    }
}

#[test]
fn odd_splits_merge_to_the_full_quantize() {
    for recipe in flat_recipes() {
        let shape = Shape::new(17, 64);
        let at = [0, 0, 1, 63, 64, 515, 1088, 1088];
        let cut = |code| {
            let pairs = at.windows(2);
            let shard = |w: &[usize]| FlatShard::new(shape, code, w[0]..w[1]).expect("a shard");
            pairs.map(shard).collect::<Vec<_>>()
        };
        cast_and_gather(recipe, shape, cut, true);
    }
}

proptest! {
    /// Blocks by their definition: all elements are owned.
    #[test]
    fn whole_blocks_have_no_element_of_another_rank(
        rows in 1usize..20, cols in 1usize..20,
        block in prop::sample::select(vec![[1, 4], [4, 1], [3, 3], [1, 32], [32, 1], [16, 16]]),
        cuts: (f64, f64),
    ) {
        let shape = Shape::new(rows, cols);
        let cut = |at: f64| (at.abs().fract() * (shape.elements() + 1) as f64) as usize;
        let (a, b) = (cut(cuts.0), cut(cuts.1));
        let own = a.min(b)..a.max(b);
        let shard = FlatShard::new(shape, Code::E4M3, own.clone()).unwrap();
        let across = cols.div_ceil(block[1]);
        let is_whole = |number: usize| {
            let [first, left] = [number / across * block[0], number % across * block[1]];
            let rows = first..rows.min(first + block[0]);
            let mut elements = rows.flat_map(|row| {
                (left..cols.min(left + block[1])).map(move |col| row * cols + col)
            });
            elements.all(|element| own.contains(&element))
        };
        let blocks = rows.div_ceil(block[0]) * across;
        let whole: Vec<usize> = (0..blocks).filter(|&number| is_whole(number)).collect();
        prop_assert_eq!(shard.whole_blocks(block).collect::<Vec<_>>(), whole);
    }
}
