//! The model over sharded weights: bits that depend on no policy, losses that depend on neither ranks nor micro-batches.

use super::setup::{Setup, exhaustive, some_for};
use lowp_format::{AnyRecipe, Orientation, Recipe, ReshardAfterForward, Role, Usage};
use lowp_fsdp::{Passes, Sharding};
use lowp_transformer::{Arch, Llama};

/// The losses of rows.
fn train(
    recipe: AnyRecipe,
    world: usize,
    reshard: impl Into<ReshardAfterForward>,
    micro_batches: usize,
    steps: u64,
) -> Vec<f32> {
    let passes = Passes {
        micro_batches,
        recompute: false,
    };
    let setup = Setup {
        reshard: reshard.into(),
        passes,
        steps,
        ..Setup::new(recipe, world)
    };
    setup.train().0
}

/// Full weights that are gathered once per step train as rows that are gathered for each use do: the same losses
/// and the same weights, to the bit.
fn zero1_is_fsdp(world: usize) {
    for recipe in AnyRecipe::all() {
        let [fsdp, zero1] = [Sharding::Fsdp, Sharding::Zero1].map(|sharding| {
            let setup = Setup {
                sharding,
                steps: if exhaustive() { 20 } else { 8 },
                ..Setup::new(recipe, world)
            };
            setup.train()
        });
        assert_eq!(fsdp.0, zero1.0, "{}", recipe.name());
        assert!(fsdp.1 == zero1.1, "{}: other weights", recipe.name());
    }
}

#[test]
fn zero1_is_fsdp_on_two_ranks() {
    zero1_is_fsdp(2);
}

#[test]
fn zero1_is_fsdp_on_three_ranks() {
    zero1_is_fsdp(3);
}

#[test]
fn policy_changes_no_bit() {
    for recipe in AnyRecipe::all() {
        let [yes, no, pairs] = [
            ReshardAfterForward::Yes,
            ReshardAfterForward::No,
            ReshardAfterForward::Group(2),
        ]
        .map(|policy| train(recipe, 4, policy, 1, 3));
        assert_eq!(yes, no, "{}", recipe.name());
        assert_eq!(yes, pairs, "{}", recipe.name());
        assert!(yes[2] < yes[0], "{}: {yes:?} does not fall", recipe.name());
    }
}

/// Llama's blocks train in every recipe, whole and recomputed, over several ranks and heads that share keys.
#[test]
fn llama_trains() {
    for recipe in AnyRecipe::all() {
        let [one, again] = [false, true].map(|recompute| {
            let passes = Passes {
                micro_batches: 1,
                recompute,
            };
            let setup = Setup {
                arch: Arch::Llama(Llama::new(1)),
                passes,
                steps: 6,
                ..Setup::new(recipe, 2)
            };
            setup.train()
        });
        assert!(one == again, "{}: other bits", recipe.name());
        let losses = one.0;
        assert!(losses[5] < losses[0] - 0.1, "{}: {losses:?}", recipe.name());
    }
}

/// What a block computes again is what it computed before, so every gradient has the same bits.
#[test]
fn recomputed_blocks_train_the_same_bits() {
    let shardings = [
        (Sharding::Fsdp, ReshardAfterForward::Yes),
        (Sharding::Fsdp, ReshardAfterForward::No),
        (Sharding::Fsdp, ReshardAfterForward::Group(1)),
        (Sharding::Zero1, ReshardAfterForward::Yes),
    ];
    for (index, recipe) in AnyRecipe::all().into_iter().enumerate() {
        for (sharding, reshard) in some_for(index, shardings) {
            let [saved, again] = [false, true].map(|recompute| {
                let setup = Setup {
                    sharding,
                    reshard,
                    passes: Passes {
                        micro_batches: 2,
                        recompute,
                    },
                    ..Setup::new(recipe, 2)
                };
                setup.train()
            });
            assert!(
                saved == again,
                "{}: {:?} {:?}",
                recipe.name(),
                saved.0,
                again.0
            );
        }
    }
}

/// Weights are cast from masters in every step, so that casting them once more changes none, also by way of a recipe of other cuts;
/// delayed scales are those of earlier amaxes, and of the values themselves where weights are cast anew.
#[test]
fn a_switch_to_the_same_recipe_changes_no_bit() {
    let all = AnyRecipe::all();
    for (index, &recipe) in all.iter().enumerate() {
        let delayed = recipe.kernel(Orientation::Rowwise).scale.is_delayed();
        let other = |differs: &dyn Fn(&AnyRecipe) -> bool| {
            let mut others = all.iter().cycle().skip(index).take(all.len());
            *others
                .find(|other| differs(other))
                .expect("a recipe of other cuts")
        };
        let quantum = |recipe: &AnyRecipe| recipe.row_quantum(Usage::BOTH);
        let bits = |recipe: &AnyRecipe| {
            let codes = recipe.quantizers(Role::Weight).kernels();
            codes.map(|key| key.element.bits()).into_iter().min()
        };
        for (sharding, by_way) in [
            (
                Sharding::Fsdp,
                other(&|other| quantum(other) != quantum(&recipe)),
            ),
            (
                Sharding::Zero1,
                other(&|other| bits(other) != bits(&recipe)),
            ),
        ] {
            let train = |switch| {
                let setup = Setup {
                    sharding,
                    steps: 4,
                    switch,
                    ..Setup::new(recipe, 3)
                };
                setup.train()
            };
            let stays = train(None);
            for by_way in [recipe, by_way] {
                let switches = train(Some((2, [by_way, recipe])));
                let what = format!("{}: {:?} {:?}", recipe.name(), stays.0, switches.0);
                match delayed {
                    true => assert!((stays.0[3] - switches.0[3]).abs() < 1e-2, "{what}"),
                    false => assert!(stays == switches, "{what}"),
                }
            }
        }
    }
}

/// From every recipe to one of other cuts and back in another run: the masters arrive.
#[test]
fn training_goes_on_in_another_recipe() {
    let all = AnyRecipe::all();
    for (index, &recipe) in all.iter().enumerate() {
        let next = all[(index + 3) % all.len()];
        for sharding in [Sharding::Fsdp, Sharding::Zero1] {
            let setup = Setup {
                sharding,
                steps: 6,
                switch: Some((3, [next; 2])),
                ..Setup::new(recipe, 3)
            };
            let (losses, _) = setup.train();
            let what = format!("{} to {}: {losses:?}", recipe.name(), next.name());
            // One step changes the loss by less than what a new model would begin with.
            assert!(losses[3] < losses[1] && losses[5] < losses[2], "{what}");
        }
    }
}

/// The first loss is that of equal logits: its tokens are summed in f64 and rounded once per part.
/// Later ones follow from gradients summed in another order, which may change a code that lies at
/// the edge to its neighbour: one of the 49,152 weights or its operand moves the loss by 2e-5.
#[test]
fn ranks_and_micro_batches_agree() {
    const CHANGED_CODES: f32 = 1e-4;
    let ulps = |a: f32, b: f32| a.to_bits().abs_diff(b.to_bits());
    for recipe in AnyRecipe::all() {
        let one = train(recipe, 1, true, 1, 3);
        let mut splits = vec![(2, 1), (4, 1)];
        // The amax of a tensor or its columns is that of its micro-batch, so codes differ there, and only the sum
        // of contributions is defined: `micro_batches.rs` of lowp-candle tests its bits.
        let operands = [Role::Activation, Role::Gradient].map(|role| recipe.operand(role));
        let mut kernels = operands
            .iter()
            .flat_map(|operand| operand.quantizers.kernels());
        if !kernels.any(|key| key.scale.waits_for_amax()) {
            splits.extend([(1, 2), (2, 2)]);
        }
        for (world, micro_batches) in splits {
            let other = train(recipe, world, true, micro_batches, 3);
            let what = format!(
                "{}, {world} ranks, {micro_batches} micro-batches: {one:?} {other:?}",
                recipe.name()
            );
            assert!(ulps(one[0], other[0]) <= 1, "{what}");
            let pairs = one.iter().zip(&other).skip(1);
            assert!(
                pairs
                    .into_iter()
                    .all(|(a, b)| (a - b).abs() < CHANGED_CODES),
                "{what}"
            );
        }
    }
}

#[test]
fn delayed_operands_learn_their_scale() {
    let delayed = |r: &AnyRecipe| r.kernel(Orientation::Rowwise).scale.is_delayed();
    let recipe = AnyRecipe::all()
        .into_iter()
        .find(delayed)
        .expect("a delayed recipe");
    // The first backward pass runs with scale 1, under which small gradients vanish.
    let losses = train(recipe, 2, true, 1, 8);
    assert!(losses[7] < losses[0] - 0.1, "{losses:?}");
}
