//! Where the bytes of a flat shard lie, also of an empty one that begins inside a byte, and what its
//! cast fills.

use lowp_format::{AnyRecipe, Code, Part, Recipe, Shape, Usage};
use lowp_kernels::{Backend, Cpu};
use lowp_shard::{FlatShard, flat_targets};
use proptest::prelude::*;

const SHAPE: Shape = Shape::new(32, 64);

proptest! {
    #[test]
    fn bytes_are_those_of_the_elements(
        code in proptest::sample::select(Code::ALL.to_vec()),
        start in 0..SHAPE.elements(),
        len in 0..100usize,
    ) {
        let end = (start + len).min(SHAPE.elements());
        let shard = FlatShard::new(SHAPE, code, start..end).unwrap();
        prop_assert_eq!((shard.elements(), shard.len()), (start..end, end - start));
        prop_assert_eq!(shard.is_empty(), start == end);
        let in_full = |element: usize| element * code.bits() / 8;
        for element in start..end {
            let place = in_full(element);
            prop_assert!(shard.bytes().contains(&place));
        }
        // Whole bytes are those that hold no bit of another element.
        let whole = shard.whole_bytes();
        let owned = |byte: usize| {
            let mut elements = byte * 8 / code.bits()..=(byte * 8 + 7) / code.bits();
            elements.all(|element| (start..end).contains(&element))
        };
        for byte in shard.bytes().start.saturating_sub(2)..shard.bytes().end + 2 {
            prop_assert_eq!(whole.contains(&byte), owned(byte), "byte {}", byte);
        }
        prop_assert!(whole.start <= whole.end);
        // No byte but those of elements.
        let touched = shard.bytes().len() * 8 / code.bits();
        prop_assert!(touched < shard.len() + 2 * code.entries_per_byte());
    }

    #[test]
    fn an_empty_shard_touches_no_byte_and_cuts_none(at in 0..=SHAPE.elements()) {
        for code in Code::ALL {
            let shard = FlatShard::new(SHAPE, code, at..at).unwrap();
            prop_assert!(shard.is_empty() && shard.bytes().is_empty());
            prop_assert_eq!(shard.gatherable(), Ok(()));
        }
    }
}

#[test]
fn a_flat_cast_fills_its_bytes_of_the_data_and_whole_scales() {
    for recipe in AnyRecipe::all() {
        let shard = FlatShard::new(SHAPE, Code::F32, 70..501).unwrap();
        for usage in [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH] {
            let targets = flat_targets(&Cpu, &recipe, &shard, usage).unwrap();
            let stored = recipe.stored(usage);
            assert_eq!(targets.len(), stored.len(), "{}", recipe.name());
            for (target, spec) in targets.iter().zip(stored) {
                assert_eq!(target.spec, spec);
                let bits = spec.code.bits();
                let bytes = match spec.key.part {
                    Part::Data => (501 * bits).div_ceil(8) - 70 * bits / 8,
                    Part::BlockScale | Part::DecodeScale | Part::Amax => spec.bytes(SHAPE),
                };
                assert_eq!(Cpu.len(&target.bytes), bytes, "{}", spec.key);
            }
        }
    }
}
