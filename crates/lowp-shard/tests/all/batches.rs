//! In how many batches the pieces of a gather are sent between GPUs.

use lowp_format::{
    AnyRecipe, FormatError, Fp8Current, Mxfp8, PhasePlans, Recipe, ReshardAfterForward, RowCuts,
    Shape, Usage,
};
use lowp_shard::Exchange;

/// Scales go apart from codes where these are large on the largest of the ranks.
#[test]
fn large_and_small_pieces_are_two_batches() -> Result<(), Box<dyn std::error::Error>> {
    let of = |recipe: AnyRecipe, size: usize, ranks: usize| -> Result<usize, FormatError> {
        let cuts = RowCuts::new(size, ranks, recipe.row_quantum(Usage::BOTH))?;
        let shape = Shape::new(size, size);
        let plans = PhasePlans::new(&recipe, shape, &cuts, ReshardAfterForward::Yes)?;
        Ok(Exchange::new(&[&plans.forward], ranks).batches())
    };
    let mxfp8 = AnyRecipe::from(Mxfp8::default());
    let per_tensor = AnyRecipe::from(Fp8Current::default());
    // 4 MiB of codes over two ranks, 512 KiB over eight; 32 tiles of rows over 33 ranks, one of which has nothing.
    assert_eq!(of(mxfp8, 2048, 2)?, 2);
    assert_eq!(of(mxfp8, 2048, 8)?, 1);
    assert_eq!(of(mxfp8, 4096, 33)?, 1);
    assert_eq!(of(mxfp8, 1 << 14, 33)?, 2);
    assert_eq!(of(per_tensor, 2048, 2)?, 1);
    Ok(())
}
