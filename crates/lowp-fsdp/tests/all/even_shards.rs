//! Weights of which ranks own rows or tiles, as even as these allow: trained, saved and resumed on any number of ranks they are those of one
//! rank, bit for bit.

use lowp_checkpoint::Checkpoint;
use lowp_comm::{GradWire, Mesh, MeshComm, run_ranks};
use lowp_format::spelling::Variant;
use lowp_format::{AnyRecipe, Recipe, ReshardAfterForward};
use lowp_fsdp::{ModelError, Sharding};
use lowp_kernels::{Cpu, FloatDtype};
use lowp_optim::Rule;

use crate::runs::{
    Model, NARROW, PATIENCE, Run, Trained, in_tiles, linears, recipe, step, train, values,
};

#[test]
fn any_number_of_ranks_trains_what_one_trains() {
    let recipe = recipe("mxfp8");
    let one = train(&Run::new(recipe, 1), (None, None));
    let mut tiles = Vec::new();
    for world in 2..10 {
        let many = train(&Run::new(recipe, world), (None, None));
        assert!(many.values == one.values, "{world} ranks");
        if !many.in_tiles.is_empty() {
            tiles.push(world);
        }
    }
    assert_eq!(tiles, [5, 6, 8, 9]);
}

#[test]
fn every_recipe_trains_on_many_ranks_what_it_trains_on_one() {
    let mut by_rows = Vec::new();
    for recipe in AnyRecipe::low_precision().into_iter().map(Variant::from) {
        let one = train(&Run::new(recipe, 1), (None, None));
        let many = train(&Run::new(recipe, 9), (None, None));
        assert!(many.values == one.values, "{}", recipe.name());
        if many.in_tiles.is_empty() {
            by_rows.push(recipe.name());
        }
    }
    assert_eq!(by_rows, ["fp8-delayed", "fp8-current", "fp8-rowwise"]);
}

/// A matrix is made orthogonal as a whole, whoever has its elements: rows, shard tiles or slices.
#[test]
fn muon_trains_on_many_ranks_what_it_trains_on_one() {
    for (name, rule) in [("mxfp8", Rule::Muon), ("fp8-block", Rule::Moonlight)] {
        let of = |ranks| Run {
            rule,
            ..Run::new(recipe(name), ranks)
        };
        let one = train(&of(1), (None, None));
        for ranks in [2, 3, 5] {
            let many = train(&of(ranks), (None, None));
            assert!(many.values == one.values, "{name}, {ranks} ranks");
        }
        let slices = Run {
            sharding: Sharding::Zero1,
            ..of(3)
        };
        let sliced = train(&slices, (None, None));
        assert!(sliced.values == one.values, "{name}, slices");
        let adamw = Run {
            rule: Rule::AdamW,
            ..of(1)
        };
        assert!(train(&adamw, (None, None)).values != one.values);
    }
}

#[test]
fn gradients_of_the_backend_are_those_of_the_host() {
    for recipe in ["mxfp8", "fp8-block"].map(recipe) {
        let one = train(&Run::new(recipe, 1), (None, None));
        for (dtype, wire) in [
            (FloatDtype::F32, GradWire::F32),
            (FloatDtype::F32, GradWire::Bf16),
            (FloatDtype::Bf16, GradWire::F32),
        ] {
            for micro_batches in [1, 3] {
                let run = Run {
                    written: Some(dtype),
                    wire,
                    micro_batches,
                    ..Run::new(recipe, 9)
                };
                let many = train(&run, (None, None));
                assert!(many.values == one.values, "{run:?}");
                assert!(!many.in_tiles.is_empty(), "{run:?}");
            }
        }
    }
}

#[test]
fn replicas_and_groups_of_ranks_train_what_one_trains() {
    let recipe = recipe("fp8-block");
    let one = train(&Run::new(recipe, 1), (None, None));
    for (replicate, shard, reshard) in [
        (2, 5, ReshardAfterForward::Yes),
        (1, 10, ReshardAfterForward::Group(2)),
        (1, 10, ReshardAfterForward::Group(5)),
        (2, 5, ReshardAfterForward::No),
    ] {
        for written in [None, Some(FloatDtype::F32)] {
            let run = Run {
                mesh: Mesh { replicate, shard },
                reshard,
                written,
                ..Run::new(recipe, 1)
            };
            let many = train(&run, (None, None));
            assert!(many.values == one.values, "{run:?}");
            assert!(!many.in_tiles.is_empty(), "{run:?}");
        }
    }
}

/// A layer that stays in bf16 is cut into tiles with its block. They are in order: nothing is rearranged, and its masters are saved as a row.
#[test]
fn a_layer_in_bf16_has_tiles_of_one_row() {
    let of = |ranks, written| Run {
        shapes: &[[128, 1024], [64, 1024]],
        kept: Some([64, 1024]),
        written,
        ..Run::new(recipe("fp8-block"), ranks)
    };
    let folder = tempfile::tempdir().expect("a folder");
    let one = train(&of(1, None), (None, None));
    for written in [None, Some(FloatDtype::F32), Some(FloatDtype::Bf16)] {
        let many = train(&of(9, written), (None, Some(folder.path())));
        assert!(many.values == one.values, "{written:?}");
        assert_eq!(many.in_tiles, [0, 1, 2, 3]);
    }
    let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
    let shape = |name: &str| checkpoint.info(name).expect(name).shape;
    assert_eq!(shape("layer0.master"), [128, 1024]);
    assert_eq!(shape("layer1.master"), [1, 64 * 1024]);
}

#[test]
fn any_number_of_ranks_goes_on_where_others_ended() {
    for name in ["fp8-block", "nvfp4-1d"] {
        let of = |ranks| Run::new(recipe(name), ranks);
        let whole = |ranks| Run {
            sharding: Sharding::Zero1,
            ..of(ranks)
        };
        let [first, second, third] = [(); 3].map(|()| tempfile::tempdir().expect("a folder"));
        let [first, second, third] = [first.path(), second.path(), third.path()];
        train(&of(1), (None, Some(first)));
        let one = train(&of(1), (Some(first), None));
        assert!(!train(&of(9), (None, Some(second))).in_tiles.is_empty());
        train(&whole(3), (None, Some(third)));
        for (folder, runs) in [
            (first, &[of(9)][..]),
            (second, &[of(1), of(5), whole(3)]),
            (third, &[of(9), of(1)]),
        ] {
            for run in runs {
                let many = train(run, (Some(folder), None));
                assert!(many.values == one.values, "{run:?}");
            }
        }
    }
}

/// A step in `recipe`, one in its precision tail, and one in it again.
fn there_and_back(recipe: Variant, ranks: usize) -> Trained {
    let run = Run {
        shapes: NARROW,
        ..Run::new(recipe, ranks)
    };
    let linears = linears(run.shapes);
    let ended = run_ranks(&Cpu, ranks, PATIENCE, |_, comm| {
        let mesh = MeshComm::new(run.mesh, comm)?;
        let options = run.options();
        let mut model = Model::new(&Cpu, &mesh, |_| recipe, &linears, &[], options)?;
        step(&mut model, 0, &run)?;
        let in_tiles = in_tiles(&model);
        let tail = recipe.with_bf16_forward();
        let mut model = model.in_recipes(|_| tail, &linears, &[])?;
        step(&mut model, 1, &run)?;
        let mut model = model.in_recipes(|_| recipe, &linears, &[])?;
        step(&mut model, 2, &run)?;
        let values = values(&model)?;
        Ok::<_, ModelError>(Trained { values, in_tiles })
    });
    let mut ended = ended.expect("ranks that work");
    assert!(ended.iter().all(|rank| rank.values == ended[0].values));
    ended.swap_remove(0)
}

#[test]
fn a_precision_tail_goes_on_with_the_masters_on_any_number_of_ranks() {
    for recipe in ["mxfp8", "nvfp4-1d", "nvfp4-mxfp8"].map(recipe) {
        let one = there_and_back(recipe, 1);
        for world in [3, 9] {
            let many = there_and_back(recipe, world);
            assert!(
                many.values == one.values,
                "{} on {world} ranks",
                recipe.name()
            );
            assert_eq!(many.in_tiles.is_empty(), world == 3, "{}", recipe.name());
        }
    }
}

/// A gradient that was not written is an error, of rows as of tiles.
#[test]
fn gradients_are_pushed_once() {
    for (ranks, again) in [(1, false), (1, true), (9, false), (9, true)] {
        let run = Run {
            written: Some(FloatDtype::F32),
            ..Run::new(recipe("fp8-block"), ranks)
        };
        let ended = run_ranks(&Cpu, ranks, PATIENCE, |_, comm| {
            let mesh = MeshComm::new(run.mesh, comm)?;
            let (linears, options) = (linears(run.shapes), run.options());
            let model = Model::new(&Cpu, &mesh, |_| run.recipe, &linears, &[], options)?;
            assert_eq!(in_tiles(&model).is_empty(), ranks == 1);
            let weight = model.weights().next().expect("a weight");
            if again {
                weight.gradient()?;
                weight.push_gradient()?;
            }
            let error = weight.push_gradient().expect_err("no gradient");
            Ok::<_, ModelError>(error.to_string())
        });
        for error in ended.expect("errors") {
            let expected = "the gradient of 'layer0' has no memory";
            assert!(error.contains(expected), "{error}");
        }
    }
}
