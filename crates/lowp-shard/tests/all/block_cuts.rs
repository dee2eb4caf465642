//! Shards of tiles: quantized by their owners and gathered they are the quantized matrix, bit for bit, for every recipe, width of tiles,
//! number of ranks and policy.

use crate::common::{ranks, values, variants};
use lowp_format::{
    AnyRecipe, BlockCuts, Phase, QuantizedTensor, Recipe, ReshardAfterForward, Shape, ShardTiles,
    Usage, block_cuts,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_shard::{
    CastItem, CastPlan, GatherGroup, GatherPool, Reshard, ScaleBookBuilder, ShardError, ShardSpec,
    ShardedTensor, quantize,
};
use proptest::prelude::*;

fn whole(
    recipe: AnyRecipe,
    shape: Shape,
    all: &[f32],
) -> Result<QuantizedTensor<CpuBuffer<u8>>, ShardError> {
    let source = Source::F32(Cpu.upload(all)?);
    quantize(&Cpu, recipe, shape, Usage::BOTH, source, None)
}

/// The weights of a block on ranks that own them as `cuts` say, cast there and gathered twice in each phase.
fn check(
    weights: &[(AnyRecipe, Shape)],
    cuts: &[BlockCuts],
    world: usize,
    policy: ReshardAfterForward,
) {
    let all: Vec<Vec<f32>> = (0..)
        .zip(weights)
        .map(|(seed, (_, shape))| values(seed, shape.elements()))
        .collect();
    let wholes: Vec<_> = weights
        .iter()
        .zip(&all)
        .map(|(&(recipe, shape), all)| whole(recipe, shape, all).expect("a quantized tensor"))
        .collect();
    ranks(world, |rank, comm| {
        let mut book = ScaleBookBuilder::default();
        let (mut shards, mut items) = (Vec::new(), Vec::new());
        for ((&(recipe, _), cuts), all) in weights.iter().zip(cuts).zip(&all) {
            let spec = ShardSpec::of_block(&recipe, cuts, rank)?;
            let own = cuts.tiles.gather(all, spec.elements());
            let own = Source::F32(Cpu.upload(&own)?);
            let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
            items.push(CastItem::rows(shard.local(), own, &mut book));
            shards.push(shard);
        }
        let book = book.build(&Cpu)?;
        CastPlan::new(&Cpu, &book, &items)?.calibrate(&book, &*comm)?;
        let reshard = Reshard::new(policy, &comm)?;
        let pool = GatherPool::new(&Cpu);
        let mut group = GatherGroup::new(&Cpu, comm, &pool, shards, reshard)?;
        for phase in [Phase::ALL, Phase::ALL].concat() {
            group.unshard(phase)?;
            for (param, whole) in wholes.iter().enumerate() {
                let got = group.tensor(param)?;
                assert!(got.usage().contains(phase.usage()));
                for buffer in got.buffers() {
                    let expected = Cpu.download(&whole.buffer(buffer.spec.key)?.storage)?;
                    let what = (got.recipe().name(), got.shape(), buffer.spec.key, phase);
                    let tile = cuts[param].tiles.tile();
                    let got = Cpu.download(&buffer.storage)?;
                    assert_eq!(got, expected, "{what:?}, {world} ranks, {tile}");
                }
            }
            group.reshard();
        }
        Ok(())
    });
}

/// Every recipe in tiles of every width, cut where a block cuts them.
#[test]
fn tiles_of_every_width_gather_to_the_matrix() {
    for recipe in variants() {
        let quantum = recipe.row_quantum(Usage::BOTH);
        let mut widths = Vec::new();
        let full = Shape::new(3 * quantum, 768);
        let most = [768, 384, 128, 32];
        for tiles in most.map(|cols| ShardTiles::at_most(&recipe, full, Usage::BOTH, cols, 1)) {
            if widths.contains(&tiles) {
                continue;
            }
            widths.push(tiles);
            let rows = tiles.tall().rows;
            for world in [2, 5] {
                let cuts = lowp_format::RowCuts::new(rows, world, quantum).expect("cuts");
                let cuts = BlockCuts { tiles, cuts };
                for policy in [true, false].map(ReshardAfterForward::from) {
                    check(
                        &[(recipe, full)],
                        std::slice::from_ref(&cuts),
                        world,
                        policy,
                    );
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// The weights of a block, as it is cut among so many ranks.
    #[test]
    fn blocks_gather_to_their_matrices(
        index in 0..variants().len(),
        bands in prop::collection::vec(1usize..4, 1..4),
        widths in prop::collection::vec(1usize..7, 3),
        world in 1usize..10,
        groups: bool,
    ) {
        let recipe = variants()[index];
        let quantum = recipe.row_quantum(Usage::BOTH);
        let weights: Vec<_> = bands
            .iter()
            .zip(&widths)
            .map(|(bands, cols)| (recipe, Shape::new(bands * quantum, 128 * cols)))
            .collect();
        let cuts = block_cuts(&weights, world, 1).expect("cuts");
        let policy = match world {
            4 | 6 | 8 if groups => ReshardAfterForward::Group(2),
            _ => ReshardAfterForward::Yes,
        };
        check(&weights, &cuts, world, policy);
    }
}
