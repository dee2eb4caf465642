//! Flat shards: byte positions, even splits, nibble-exact merges, refused cuts.

mod common;

use common::{bytes, tiling};
use lowp_format::{Code, Shape};
use lowp_shard::{FlatShard, ShardError};
use proptest::prelude::*;

#[test]
fn an_odd_start_keeps_its_nibble() {
    // The worked example of docs/numerics.md 11.3.
    let shard = FlatShard::new(Shape::new(4, 16), Code::E2M1, 9..14).expect("a shard");
    assert_eq!(shard.bytes(), 4..7);
    assert_eq!(
        [9, 10, 11, 12, 13].map(|i| shard.byte_of(i)),
        [0, 1, 1, 2, 2]
    );
    assert_eq!([0, 1, 2].map(|b| shard.foreign_bits(b)), [0x0F, 0, 0]);
    let refused = shard.gatherable().expect_err("it begins mid-byte");
    assert!(matches!(
        refused,
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
fn ranges_outside_and_odd_rows_are_refused() {
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
    let odd = FlatShard::new(shape, Code::E2M1, 0..2).err();
    assert_eq!(odd, Some(ShardError::FlatColumns { shape, per_byte: 2 }));
    assert!(FlatShard::new(shape, Code::E4M3, 0..2).is_ok());
}

#[test]
fn gaps_and_missing_ends_are_refused() {
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
        let odd = code == Code::E2M1 && at.windows(2).any(|w| w[0] < w[1] && w[1] % 2 == 1);
        prop_assert_eq!(FlatShard::gather_ranges(&shards).is_err(), odd);
    }
}
