//! `lowp export` of checkpoints of `lowp train --save`.

use crate::support::{Bench, Contents};
use lowp_checkpoint::{Block, Checkpoint, Dtype, Piece, Saver};
use lowp_format::{AnyRecipe, Recipe, RecipeOptions, Shape, Usage};
use serde_json::json;
use std::fs;
use std::time::Duration;

/// A folder `runs/R-seed0` with the checkpoint of a tiny model of so many ranks.
fn trained(recipe: &str, ranks: usize, state: &str) -> Bench {
    let bench = Bench::new();
    bench.done(&format!(
        "train --no-baseline --recipe {recipe} --steps 2 --dim 32 --layers 1 --heads 1 --seq 16 --batch 4 --world-size {ranks} --optimizer-state {state} --save runs"
    ));
    bench
}

#[test]
fn masters_and_codes_of_a_checkpoint() {
    for (recipe, ranks, target, state) in [
        ("nvfp4-2d", 2, "compressed-tensors", "f32"),
        ("fp8-delayed", 2, "deepseek", "f32"),
        ("fp8-current", 2, "modelopt", "master=bf16"),
        // Of some weights ranks have tiles.
        ("nvfp4-2d", 4, "compressed-tensors", "f32"),
        ("mxfp8", 4, "te", "master=bf16,exp_avg=fp8,exp_avg_sq=fp8"),
    ] {
        let bench = trained(recipe, ranks, state);
        let runs = fs::read_dir(bench.path("runs")).expect("a folder");
        let run = runs
            .map(|entry| entry.expect("an entry").path())
            .find(|path| path.to_string_lossy().contains(recipe))
            .expect("a run");
        let checkpoint = Checkpoint::latest(&run).expect("a checkpoint");
        let run = run.to_string_lossy();
        bench.done(&["export", &run, "-o", "fp32", "--to", "fp32"]);
        let found = Contents::read(&bench.path("fp32/model.safetensors"));
        for (name, saved, shape) in [
            ("block0.qkv.weight", "block0.qkv.master", vec![96, 32]),
            ("block0.out.weight", "block0.out.master", vec![32, 128]),
            ("tokens", "tokens.master", vec![256, 32]),
            ("block0.norm1.gamma", "block0.norm1.gamma.master", vec![32]),
        ] {
            let full = checkpoint.info(saved).expect(saved).shape;
            let is_tiles = full[0] > 1;
            let expected = ranks == 4 && name == "block0.out.weight";
            assert_eq!(is_tiles, expected, "{recipe}: {name}");
            let info = checkpoint.info(saved).expect(saved);
            let master = checkpoint
                .read(saved, info.dtype, full, Block::whole(full))
                .expect(saved);
            let wide = info.dtype.widened(&master);
            let master: Vec<u8> = wide.iter().flat_map(|x| x.to_le_bytes()).collect();
            let (_, dims, bytes) = &found.tensors[name];
            assert_eq!(dims, &shape, "{name}");
            assert!(*bytes == master, "{name}");
        }
        // The codes by way of a target are those under their own names.
        bench.done(&["export", &run, "-o", "te", "--to", "te"]);
        bench.done(&["export", &run, "-o", "hub", "--to", target]);
        bench.done("import hub -o back.safetensors --dtypes u8");
        bench.done("verify te/model.safetensors back.safetensors");
        let name = "block0.qkv.rowwise_data";
        let codes = checkpoint
            .tensors()
            .find(|tensor| tensor.name == name)
            .map(|tensor| tensor.shape);
        let shape = codes.expect("codes");
        let saved = checkpoint
            .read(name, Dtype::U8, shape, Block::whole(shape))
            .expect("codes");
        assert!(
            bench
                .read("back.safetensors")
                .bytes("block0.qkv.weight.rowwise_data")
                == saved,
            "{recipe}"
        );
    }
}

/// A folder `saved` with a checkpoint of one weight, of which its trainer says `about`.
fn saved(about: serde_json::Value, pieces: &[(&str, Dtype, [usize; 2])]) -> Bench {
    let zeros = |&(name, dtype, full): &(_, Dtype, [usize; 2])| {
        piece(
            name,
            dtype,
            full,
            vec![0; full[0] * full[1] * dtype.bytes()],
        )
    };
    saved_pieces(about, pieces.iter().map(zeros).collect())
}

fn piece(name: &str, dtype: Dtype, full: [usize; 2], bytes: Vec<u8>) -> Piece {
    Piece {
        name: name.to_owned(),
        dtype,
        full,
        block: Block::whole(full),
        bytes,
    }
}

fn saved_pieces(about: serde_json::Value, pieces: Vec<Piece>) -> Bench {
    let bench = Bench::new();
    let control = lowp_comm::threads(1, Duration::from_secs(60)).swap_remove(0);
    let mut saver = Saver::new(control, &bench.path("saved"), None).expect("a folder");
    saver.start(1, pieces, about).expect("a checkpoint");
    saver.finish().expect("a checkpoint");
    bench
}

/// Of a weight that was trained in bf16 those are the values in bf16, also where its master is as near to another value (docs/numerics.md 23.5).
#[test]
fn a_weight_in_bf16_is_the_one_that_was_trained() {
    let recipe = AnyRecipe::from_name("bf16", &RecipeOptions::default()).expect("a recipe");
    let about = json!({ "weights": {
        "w": lowp_checkpoint::weight_record(&recipe, Shape::new(2, 3)),
        "norm": { "recipe": "fp32", "shape": [6] },
    } });
    // Between 3F80, which is even, and 3F81.
    let (master, trained, even) = ([0, 0x80, 0x80, 0x3F], [0x81, 0x3F], [0x80, 0x3F]);
    let codes = recipe.buffers(Usage::BOTH)[0].key;
    let bench = saved_pieces(
        about,
        vec![
            piece("w.master", Dtype::F32, [2, 3], master.repeat(6)),
            piece(&format!("w.{codes}"), Dtype::U8, [2, 6], trained.repeat(6)),
            piece("norm.master", Dtype::F32, [1, 6], master.repeat(6)),
        ],
    );
    bench.done("export saved -o bf16 --to bf16");
    bench.done("export saved -o fp32 --to fp32");
    let found = bench.read("bf16/model.safetensors");
    assert_eq!(found.tensors["w.weight"].1, [2, 3]);
    assert_eq!(found.tensors["w.weight"].2, trained.repeat(6));
    assert_eq!(found.tensors["norm"].2, even.repeat(6));
    let found = bench.read("fp32/model.safetensors");
    assert_eq!(found.tensors["w.weight"].2, master.repeat(6));
}

/// Weights that no recipe by itself makes: those of the tail of a run, and of modified recipes.
#[test]
fn values_of_mixtures() {
    let bench = Bench::new();
    let train = "train --steps 2 --dim 32 --layers 1 --heads 1 --seq 16 --batch 2 --world-size 2 --no-baseline";
    bench.done(&format!(
        "{train} --recipe mxfp8 --precision-tail 0.5 --save tail"
    ));
    bench.done(&format!(
        "{train} --recipe nvfp4-1d+exact-weights-forward --save mixed"
    ));
    for (run, folder) in [
        ("tail", "mxfp8-seed0"),
        ("mixed", "nvfp4-1d+exact-weights-forward-seed0"),
    ] {
        let message = bench.rejected(
            2,
            &format!("export {run}/{folder} -o x --to compressed-tensors"),
        );
        assert!(
            message.contains("export the values by --to bf16"),
            "{message}"
        );
        bench.done(&format!("export {run}/{folder} -o {run}-fp32 --to fp32"));
        let found = Contents::read(&bench.path(&format!("{run}-fp32/model.safetensors")));
        assert_eq!(found.tensors["block0.qkv.weight"].1, [96, 32]);
    }
}

#[test]
fn checkpoints_that_make_no_sense() {
    let weight = |recipe: &str, shape: serde_json::Value| json!({ "weights": { "w": { "recipe": recipe, "options": {}, "shape": shape, "kernels": "" } } });
    for (about, expected) in [
        (json!({}), "it does not say what its weights are"),
        (
            weight("mxfp9", json!([32, 32])),
            "what it says of 'w' makes no sense: there is no recipe 'mxfp9'",
        ),
        (
            weight("mxfp8", json!([32])),
            "what it says of 'w' makes no sense",
        ),
        (
            weight("mxfp8", json!([32, 31])),
            "what it says of 'w' makes no sense",
        ),
        (
            weight("mxfp8", json!([1u64 << 40, 1u64 << 40])),
            "what it says of 'w' makes no sense",
        ),
        (
            weight("mxfp8", json!([32, 32])),
            "the codes of 'w' are of no recipe as it stands",
        ),
    ] {
        let bench = saved(about, &[("x.master", Dtype::F32, [1, 4])]);
        for to in ["fp32", "compressed-tensors"] {
            let message = bench.rejected(2, &format!("export saved -o hub --to {to}"));
            assert!(message.contains(expected), "{message}");
        }
    }
    // Dimensions that are not those of the values are not believed.
    for dims in [json!([u64::MAX, u64::MAX]), json!([3]), json!("wide")] {
        let about = json!({ "weights": { "x": { "recipe": "fp32", "shape": dims } } });
        let bench = saved(about, &[("x.master", Dtype::F32, [1, 4])]);
        bench.done("export saved -o hub --to fp32");
        assert_eq!(bench.read("hub/model.safetensors").tensors["x"].1, [4]);
    }
}

#[test]
fn a_checkpoint_is_not_quantized() {
    let about = json!({ "weights": {} });
    let bench = saved(about, &[("x.master", Dtype::F32, [1, 4])]);
    let message = bench.rejected(2, "quantize saved --recipe mxfp8 -o codes");
    let remedy = "a checkpoint; `lowp export FOLDER -o DIR --to bf16` makes a model of it";
    assert!(message.contains(remedy), "{message}");
}

#[test]
fn a_checkpoint_without_the_bytes_of_a_weight() {
    let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default()).expect("a recipe");
    let about =
        json!({ "weights": { "w": lowp_checkpoint::weight_record(&recipe, Shape::new(32, 32)) } });
    let bench = saved(about.clone(), &[("w.rowwise_data", Dtype::U8, [32, 32])]);
    let message = bench.rejected(2, "export saved -o hub --to modelopt");
    assert!(message.contains("w.rowwise_scale_inv"), "{message}");
    let message = bench.rejected(2, "export saved -o hub --to bf16");
    assert!(message.contains("it has no 'w.master'"), "{message}");
    // Values of another shape or dtype, and a parameter that was never quantized.
    for (dtype, shape) in [
        (Dtype::F32, [16, 64]),
        (Dtype::F32, [1, 1023]),
        (Dtype::U8, [32, 32]),
    ] {
        let bench = saved(about.clone(), &[("w.master", dtype, shape)]);
        let message = bench.rejected(2, "export saved -o hub --to fp32");
        let expected = format!("'w.master' is {dtype:?} {}x{}, which", shape[0], shape[1]);
        assert!(message.contains(&expected), "{message}");
    }
    let about = json!({ "weights": { "norm": { "recipe": "fp32", "shape": [4] } } });
    let bench = saved(about, &[("x.master", Dtype::F32, [1, 4])]);
    let message = bench.rejected(2, "export saved -o hub --to modelopt");
    assert!(message.contains("it has no 'norm.master'"), "{message}");
}
