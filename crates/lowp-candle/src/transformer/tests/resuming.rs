//! Training goes on from a checkpoint as if it had not stopped, on any ranks.

use super::setup::{Setup, some_for};
use lowp_checkpoint::{Block, Checkpoint};
use lowp_format::{AnyRecipe, Recipe, ReshardAfterForward};
use lowp_fsdp::Sharding;
use std::collections::BTreeMap;
use std::path::Path;

/// The whole tensors of the latest checkpoint of `folder`, and the step.
pub(super) fn content(folder: &Path) -> (u64, BTreeMap<String, Vec<u8>>) {
    let checkpoint = Checkpoint::latest(folder).expect("a checkpoint");
    let whole = |tensor: lowp_checkpoint::TensorInfo<'_>| {
        let block = Block::whole(tensor.shape);
        let bytes = checkpoint.read(tensor.name, tensor.dtype, tensor.shape, block);
        (tensor.name.to_owned(), bytes.expect("a tensor"))
    };
    (checkpoint.step(), checkpoint.tensors().map(whole).collect())
}

/// N steps are N / 2, a checkpoint, and N / 2 more: the same losses, weights, masters, moments and scales, to the bit.
#[test]
fn resumed_training_has_the_same_bits() {
    let settings = [
        (Sharding::Fsdp, ReshardAfterForward::Yes, 3, 1),
        (Sharding::Fsdp, ReshardAfterForward::No, 2, 2),
        (Sharding::Zero1, ReshardAfterForward::Yes, 2, 1),
    ];
    for (index, recipe) in AnyRecipe::all().into_iter().enumerate() {
        for (sharding, reshard, world, replicas) in some_for(index, settings) {
            let folder = tempfile::tempdir().expect("a folder");
            let at = |name: &str| Some(folder.path().join(name));
            let setup = Setup {
                sharding,
                reshard,
                replicas,
                ..Setup::new(recipe, world)
            };
            let whole = Setup {
                steps: 4,
                to: at("whole"),
                ..setup.clone()
            };
            let (losses, weights) = whole.train();
            let half = Setup {
                steps: 2,
                to: at("half"),
                ..setup.clone()
            };
            let (first, _) = half.train();
            let rest = Setup {
                steps: 4,
                from: at("half"),
                to: at("rest"),
                ..setup
            };
            let (last, resumed) = rest.train();
            let what = format!("{}, {sharding:?}, {world} ranks", recipe.name());
            assert_eq!([first, last].concat(), losses, "{what}");
            assert!(resumed == weights, "{what}: other weights");
            let [whole, rest] = ["whole", "rest"].map(|name| content(&folder.path().join(name)));
            assert!(whole == rest, "{what}: other state");
        }
    }
}

/// From four ranks to two, three, eight and one, of either sharding and of replicas: the same bytes on every way.
#[test]
fn any_ranks_load_the_same_state() {
    for recipe in AnyRecipe::all() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |number: usize| Some(folder.path().join(number.to_string()));
        let first = Setup {
            steps: 2,
            to: at(0),
            ..Setup::new(recipe, 4)
        };
        let (_, weights) = first.train();
        let expected = content(&folder.path().join("0"));
        let worlds = [
            (2, 1, Sharding::Fsdp),
            (3, 1, Sharding::Zero1),
            (8, 1, Sharding::Fsdp),
            (4, 2, Sharding::Zero1),
            (1, 1, Sharding::Zero1),
            (6, 3, Sharding::Fsdp),
            (1, 1, Sharding::Fsdp),
        ];
        for (number, (world, replicas, sharding)) in worlds.into_iter().enumerate() {
            // No more steps: loaded and saved.
            let next = Setup {
                sharding,
                replicas,
                steps: 2,
                from: at(number),
                to: at(number + 1),
                ..Setup::new(recipe, world)
            };
            let (_, loaded) = next.train();
            let what = format!("{}, {world} ranks, {sharding:?}", recipe.name());
            assert!(loaded == weights, "{what}: other weights");
            let found = content(&folder.path().join((number + 1).to_string()));
            assert!(found == expected, "{what}: other state");
        }
    }
}

/// A checkpoint of one recipe is where a run of another begins: with its masters, moments and counts.
#[test]
fn a_checkpoint_starts_a_run_of_another_recipe() {
    let all = AnyRecipe::all();
    for (index, &recipe) in all.iter().enumerate() {
        let next = all[(index + 4) % all.len()];
        let folder = tempfile::tempdir().expect("a folder");
        let path = || Some(folder.path().to_owned());
        let setup = Setup {
            steps: 3,
            to: path(),
            ..Setup::new(recipe, 2)
        };
        let (before, _) = setup.train();
        let state = |content: BTreeMap<String, Vec<u8>>| -> Vec<_> {
            let kept = ["master", "exp_avg", "exp_avg_sq", "counts"];
            let kept = |name: &str| kept.iter().any(|end| name.ends_with(end));
            content.into_iter().filter(|(name, _)| kept(name)).collect()
        };
        let saved = state(content(folder.path()).1);
        let other = Setup {
            steps: 3,
            from: path(),
            to: path(),
            ..Setup::new(next, 3)
        };
        other.train();
        assert!(
            state(content(folder.path()).1) == saved,
            "{} to {}",
            recipe.name(),
            next.name()
        );
        let other = Setup {
            steps: 6,
            from: path(),
            ..Setup::new(next, 1)
        };
        let (after, _) = other.train();
        let what = format!("{} to {}: {before:?} {after:?}", recipe.name(), next.name());
        assert!(after[0] < before[1] && after[2] < before[2], "{what}");
    }
}
