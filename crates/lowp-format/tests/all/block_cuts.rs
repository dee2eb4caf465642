//! Cuts of the weights of a block: what they cover, how even they are, and where tiles lie.

use lowp_format::{AnyRecipe, Recipe, Shape, ShardTiles, Usage, block_cuts, spelling::Variant};
use proptest::prelude::*;

/// A weight of a recipe, or of its precision tail, in whole bands.
fn weight() -> impl Strategy<Value = (Variant, Shape)> {
    let recipes = AnyRecipe::all().into_iter().map(Variant::from);
    let recipes = recipes.flat_map(|recipe| [recipe, recipe.with_bf16_forward()]);
    let recipes: Vec<Variant> = recipes.collect();
    (0..recipes.len(), 1usize..40, 1usize..40).prop_map(move |(index, bands, cols)| {
        let recipe = recipes[index];
        let rows = bands * recipe.row_quantum(Usage::BOTH);
        (recipe, Shape::new(rows, 128 * cols))
    })
}

proptest! {
    /// Every row has one owner, cuts are at tiles, and no rank has more than the mean and a tile, or more than where each weight is
    /// cut by itself.
    #[test]
    fn blocks_are_even(weights in prop::collection::vec(weight(), 1..5), world in 1usize..200) {
        let cuts = block_cuts(&weights, world, 1).unwrap();
        let mut sums = vec![0; world];
        let mut largest = 0;
        let mut by_itself = vec![0; world];
        for ((recipe, full), cut) in weights.iter().zip(&cuts) {
            let (tall, tile) = (cut.tiles.tall(), cut.tiles.tile());
            prop_assert_eq!((cut.tiles.full(), tall.elements()), (*full, full.elements()));
            prop_assert_eq!((cut.cuts.rows(), cut.cuts.world()), (tall.rows, world));
            prop_assert_eq!(cut.cuts.off_quantum(tile.rows), None);
            recipe.check(tall).unwrap();
            largest = largest.max(tile.elements());
            let alone = lowp_format::RowCuts::new(full.rows, world, tile.rows).unwrap();
            for (rank, rows) in cut.cuts.ranges().enumerate() {
                sums[rank] += rows.len() * tall.cols;
                by_itself[rank] += alone.range(rank).len() * full.cols;
            }
        }
        let total: usize = sums.iter().sum();
        let [most, alone] = [sums, by_itself].map(|sums| sums.into_iter().max().unwrap_or(0));
        prop_assert!(most <= alone);
        let even = 10 * most * world <= 11 * total;
        prop_assert!(even || most <= total.div_ceil(world) + largest, "{} of {}", most, total);
        if 10 * alone * world <= 11 * total {
            prop_assert!(cuts.iter().all(|cut| cut.tiles.are_rows()));
            prop_assert_eq!(most, alone);
        }
    }

    /// Tiles are the elements of the matrix, each once, and blocks of columns of a tile follow each other.
    #[test]
    fn tiles_have_every_element_once(
        (recipe, full) in weight(), most in 1usize..400, start: prop::sample::Index,
    ) {
        let full = Shape::new(full.rows.min(2 * recipe.row_quantum(Usage::BOTH)), full.cols.min(512));
        let tiles = ShardTiles::at_most(&recipe, full, Usage::BOTH, most, 1);
        let full = tiles.full();
        let numbers: Vec<u32> = (0..full.elements() as u32).collect();
        let tall = tiles.gather(&numbers, 0..full.elements());
        let start = start.index(full.elements());
        prop_assert_eq!(&tiles.gather(&numbers, start..full.elements()), &tall[start..]);
        prop_assert_eq!(&tiles.scatter(&tall), &numbers);
        let end = start + (full.elements() - start) / 2;
        let bands = tiles.bands(&(start..end));
        if tiles.are_in_order() {
            prop_assert_eq!(&tall, &numbers);
            prop_assert_eq!(&bands, &(start..end));
            prop_assert_eq!(tiles.runs(bands.clone()).count(), usize::from(start < end));
        }
        prop_assert_eq!(tiles.are_in_order(), tiles.are_rows() || tiles.tile().rows == 1);
        prop_assert_eq!(&tiles.of_bands(&numbers[bands.clone()], bands.start, start..end), &tall[start..end]);
        let (tile, across) = (tiles.tile(), tiles.across());
        for (at, &number) in tall.iter().enumerate().step_by(97) {
            let (row, col) = (at / tile.cols, at % tile.cols);
            let place = if tiles.are_rows() { [row, 0] } else {
                let (tile_at, row) = (row / tile.rows, row % tile.rows);
                [tile_at / across * tile.rows + row, tile_at % across * tile.cols]
            };
            prop_assert_eq!(number as usize, place[0] * full.cols + place[1] + col);
        }
        let mut sorted = tall;
        sorted.sort_unstable();
        prop_assert_eq!(sorted, numbers);
    }
}

/// A weight of any width that its recipe takes.
fn of_any_width() -> impl Strategy<Value = (Variant, Shape)> {
    let recipes = AnyRecipe::all();
    (0..recipes.len(), 1usize..300, 1usize..300).prop_filter_map(
        "no shape of the recipe",
        move |(index, rows, cols)| {
            let recipe = Variant::from(recipes[index]);
            let shapes = [1, 16, 32].map(|unit| Shape::new(rows * unit, cols * unit));
            let taken = shapes
                .into_iter()
                .find(|&shape| recipe.check(shape).is_ok());
            taken.map(|shape| (recipe, shape))
        },
    )
}

proptest! {
    /// Elements of one unit of the flattened matrix have one owner, whatever the shapes are.
    #[test]
    fn no_cut_is_within_a_unit(
        weights in prop::collection::vec(of_any_width(), 1..4), world in 1usize..40, unit in prop::sample::select(vec![1, 4, 32]),
    ) {
        for ((recipe, full), cut) in weights.iter().zip(block_cuts(&weights, world, unit).unwrap()) {
            let (tiles, tall) = (cut.tiles, cut.tiles.tall());
            prop_assert_eq!((cut.cuts.rows(), cut.cuts.world()), (tall.rows, world));
            prop_assert_eq!(cut.cuts.off_quantum(tiles.tile().rows), None);
            recipe.check(tall).unwrap();
            for rows in cut.cuts.ranges().filter(|rows| !rows.is_empty()) {
                prop_assert_eq!(rows.start * tall.cols % unit, 0);
            }
            // Runs of the tall matrix are runs of the matrix.
            prop_assert!(tiles.are_in_order() || tall.cols.is_multiple_of(unit));
            prop_assert!(tiles.are_rows() || full.cols.is_multiple_of(tall.cols));
        }
    }
}

/// Where no tiles are as narrow as another weight of the block has them, there are the narrowest.
#[test]
fn tiles_end_at_the_narrowest() {
    let of = |name: &str, most| {
        let recipe = AnyRecipe::from_name(name, &Default::default()).unwrap();
        let full = Shape::new(128, 1024);
        ShardTiles::at_most(&recipe, full, Usage::BOTH, most, 1)
            .tile()
            .cols
    };
    let widths = |name| [1024, 300, 64, 1].map(|most| of(name, most));
    assert_eq!(widths("bf16"), [1024, 256, 64, 1]);
    assert_eq!(widths("mxfp8"), [1024, 256, 64, 32]);
    assert_eq!(widths("fp8-block"), [1024, 256, 128, 128]);
    assert_eq!(widths("fp8-rowwise"), [1024; 4]);
}

/// A block of very many parts is cut by rows, as its plan would hold gigabytes.
#[test]
fn blocks_of_very_many_parts_are_cut_by_rows() {
    let recipe = AnyRecipe::from_name("fp8-block", &Default::default()).unwrap();
    let full = Shape::new(128, 1024);
    let are_rows = |weights: usize, world| {
        let cuts = block_cuts(&vec![(recipe, full); weights], world, 1).unwrap();
        cuts.iter().all(|cut| cut.tiles.are_rows())
    };
    assert!(!are_rows(1, 1 << 20));
    assert!(are_rows(1, (1 << 20) + 1));
    assert!(!are_rows(8, 1 << 17));
    assert!(are_rows(9, 1 << 17));
}

#[test]
fn tiles_that_cut_a_scale_are_refused() {
    let of = |name: &str, rows, cols| {
        let recipe = AnyRecipe::from_name(name, &Default::default()).unwrap();
        let full = Shape::new(rows, 256);
        ShardTiles::new(&recipe, full, Usage::BOTH, cols)
            .map(|tiles| tiles.tile())
            .map_err(|error| error.to_string())
    };
    assert_eq!(of("mxfp8", 64, 64), Ok(Shape::new(32, 64)));
    assert_eq!(of("mxfp8", 65, 256), Ok(Shape::new(32, 256)));
    let errors = [
        of("mxfp8", 64, 48),
        of("mxfp8", 65, 64),
        of("mxfp8", 64, 96),
        of("fp8-rowwise", 64, 64),
    ];
    insta::assert_snapshot!(errors.map(Result::unwrap_err).join("\n"));
}
