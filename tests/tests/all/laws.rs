//! The laws of every recipe: sharding commutes with quantization, and the fused step equals AdamW
//! followed by a full quantize, bit for bit.

use lowp_format::{AnyRecipe, Phase, Recipe, Shape};
use lowp_tests::model::{is_delayed, recipe_variants};
use lowp_tests::toy::Toy;
use lowp_tests::values::Family;
use lowp_tests::world::{Run, orientation, train, whole};
use proptest::prelude::*;

/// Every rank gathers what quantizing the whole gives, before and after optimizer steps.
fn check<R: Recipe>(recipe: R, run: &Run<'_>) {
    let seen = train(recipe, run);
    let master: Vec<f32> = seen.iter().flat_map(|s| s.master.iter().copied()).collect();
    assert_eq!(master.len(), run.shape.elements());
    for phase in Phase::ALL {
        let first = &seen[0].phases[phase as usize];
        for rank in &seen {
            assert_eq!(&rank.phases[phase as usize], first, "ranks disagree");
        }
        // A delayed scale comes from earlier steps, so only the first cast follows the values.
        if run.grads.is_empty() || !is_delayed(&recipe) {
            let expected = whole(recipe, run.shape, &master, orientation(phase));
            assert_eq!(first, &expected, "{} {:?}", recipe.name(), phase);
        }
    }
}

/// Awkward row counts: one row, off the quantum, fewer blocks than ranks, none.
fn shapes() -> impl Strategy<Value = Shape> {
    let rows = prop_oneof![Just(0), Just(1), Just(17), Just(136), 1usize..200];
    (rows, 1usize..3).prop_map(|(rows, tiles)| Shape::new(rows, 128 * tiles))
}

fn values(family: usize, seed: u64, shape: Shape) -> Vec<f32> {
    Family::ALL[family].values(seed, shape.elements())
}

/// Recipes with options that are not the default ones.
fn picked(picks: &[prop::sample::Index]) -> Vec<AnyRecipe> {
    let variants = recipe_variants();
    picks.iter().map(|pick| *pick.get(&variants)).collect()
}

fn grads(seed: u64, steps: usize, shape: Shape) -> Vec<Vec<f32>> {
    (0..steps as u64)
        .map(|s| Family::Normal.values(seed + 1 + s, shape.elements()))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn gathered_shards_equal_the_whole(
        shape in shapes(), world in 1usize..10, seed: u64, family in 0usize..5, reshard: bool,
        picks: [prop::sample::Index; 8],
    ) {
        let values = values(family, seed, shape);
        let run =
            Run { shape, values: &values, grads: &[], world, reshard_after_forward: reshard };
        for recipe in AnyRecipe::all() {
            check(recipe, &run);
        }
        Toy::ALL.into_iter().for_each(|toy| check(toy, &run));
        picked(&picks).into_iter().for_each(|recipe| check(recipe, &run));
    }

    #[test]
    fn a_step_is_adamw_then_a_full_quantize(
        shape in shapes(), world in 1usize..10, seed in 0u64..1 << 40, steps in 1usize..4,
        reshard: bool, picks: [prop::sample::Index; 8],
    ) {
        let values = values(0, seed, shape);
        let grads = grads(seed, steps, shape);
        let run =
            Run { shape, values: &values, grads: &grads, world, reshard_after_forward: reshard };
        for recipe in AnyRecipe::all() {
            check(recipe, &run);
        }
        Toy::ALL.into_iter().for_each(|toy| check(toy, &run));
        picked(&picks).into_iter().for_each(|recipe| check(recipe, &run));
    }

    #[test]
    fn world_size_does_not_change_the_bits(
        shape in shapes(), world in 2usize..10, seed in 0u64..1 << 40, steps in 1usize..4,
    ) {
        let values = values(1, seed, shape);
        let grads = grads(seed, steps, shape);
        let run = |world| Run {
            shape, values: &values, grads: &grads, world, reshard_after_forward: true,
        };
        for recipe in AnyRecipe::all() {
            let (one, many) = (train(recipe, &run(1)), train(recipe, &run(world)));
            prop_assert_eq!(&one[0].phases, &many[world - 1].phases, "{}", recipe.name());
        }
    }
}

#[test]
fn named_awkward_shapes() {
    for (rows, cols, world) in [
        (1, 64, 3),
        (17, 32, 2),
        (136, 160, 8),
        (32, 64, 9),
        (33, 32, 2),
        (300, 32, 7),
        (0, 32, 4),
    ] {
        let shape = Shape::new(rows, cols);
        let values = values(3, 5, shape);
        for reshard_after_forward in [true, false] {
            let run = Run {
                shape,
                values: &values,
                grads: &[],
                world,
                reshard_after_forward,
            };
            for recipe in AnyRecipe::all() {
                check(recipe, &run);
            }
        }
    }
}
