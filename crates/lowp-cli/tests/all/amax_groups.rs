//! `--amax-group`: layers that engines run as one have one amax, whether they were quantized or trained with it.

use crate::support::{self, Bench, Tensor, bf16s, f32s, values};
use std::fs;

/// Recipes with a scale that follows from the amax of the tensor.
const RECIPES: [&str; 6] = [
    "nvfp4-1d",
    "nvfp4-2d",
    "nvfp4-mxfp8",
    "fp8-current",
    "fp8-delayed",
    "nvfp4-1d+mse",
];

const GROUPS: &str = "--amax-group *.{q,k,v}.weight,*.{gate,up}.weight";

/// Query, key and value of two layers, of different sizes and amaxes, and one more.
fn layers() -> Vec<Tensor> {
    let mut tensors = Vec::new();
    for layer in 0..2u32 {
        for (at, (kind, rows)) in (0..).zip([("q", 64), ("k", 32), ("v", 32), ("o", 48)]) {
            let scale = [0.5, 3.0, 0.01, 7.0][((at + layer) % 4) as usize];
            let values: Vec<f32> = values(rows * 64, 10 * layer + at)
                .iter()
                .map(|x| x * scale)
                .collect();
            let name = format!("layers.{layer}.{kind}.weight");
            tensors.push(match kind {
                "q" => bf16s(&name, &[rows, 64], &values),
                _ => f32s(&name, &[rows, 64], &values),
            });
        }
        tensors.push(f32s(
            &format!("layers.{layer}.gate.weight"),
            &[32, 32],
            &values(1024, 77),
        ));
        tensors.push(f32s(
            &format!("layers.{layer}.up.weight"),
            &[32, 32],
            &[0.0; 1024],
        ));
    }
    tensors
}

/// The members of a group are the parts of the matrix that they are together: row by row, the same codes and scales.
#[test]
fn a_group_is_quantized_as_one_matrix() {
    let bench = Bench::new();
    bench.write("in.safetensors", &layers());
    let joined: Vec<Tensor> = (0..2)
        .map(|layer| {
            let parts = layers();
            let of_layer = |kind: &str| {
                let name = format!("layers.{layer}.{kind}.weight");
                let found = parts
                    .iter()
                    .find(|tensor| tensor.name == name)
                    .expect("a part");
                match kind {
                    "q" => found
                        .bytes
                        .as_chunks::<2>()
                        .0
                        .iter()
                        .flat_map(|x| half::bf16::from_le_bytes(*x).to_f32().to_le_bytes())
                        .collect(),
                    _ => found.bytes.clone(),
                }
            };
            let bytes = ["q", "k", "v"].map(of_layer).concat();
            support::tensor(
                &format!("qkv{layer}"),
                safetensors::tensor::Dtype::F32,
                &[128, 64],
                bytes,
            )
        })
        .collect();
    bench.write("joined.safetensors", &joined);
    for recipe in RECIPES {
        let recipe = format!("--recipe {recipe} --usage rowwise --scales compact");
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors {recipe} {GROUPS}"
        ));
        bench.done(&format!(
            "quantize joined.safetensors -o j.safetensors {recipe}"
        ));
        let (q, j) = (bench.read("q.safetensors"), bench.read("j.safetensors"));
        for layer in 0..2 {
            let part = |kind: &str, field: &str| {
                q.bytes(&format!("layers.{layer}.{kind}.weight.{field}"))
                    .to_vec()
            };
            let whole = |field: &str| j.bytes(&format!("qkv{layer}.{field}")).to_vec();
            let rows = |field: &str| ["q", "k", "v"].map(|kind| part(kind, field)).concat();
            assert!(rows("rowwise_data") == whole("rowwise_data"), "{recipe}");
            let scales = whole("rowwise_scale_inv");
            if scales.len() > 4 {
                assert!(rows("rowwise_scale_inv") == scales, "{recipe}");
            }
            for kind in ["q", "k", "v"] {
                assert_eq!(part(kind, "amax"), whole("amax"), "{recipe} {kind}");
                if scales.len() == 4 {
                    assert_eq!(part(kind, "rowwise_scale_inv"), scales, "{recipe} {kind}");
                }
            }
            assert_ne!(part("o", "amax"), whole("amax"));
            assert_eq!(part("up", "amax"), part("gate", "amax"));
            assert_ne!(part("up", "amax"), [0; 4]);
        }
    }
}

/// Ranks, flat slices, several files and other programs' forms keep it, and `verify` knows of it.
#[test]
fn groups_hold_in_every_command() {
    let bench = Bench::new();
    bench.write("in.safetensors", &layers());
    for recipe in RECIPES {
        let options = format!("--recipe {recipe} {GROUPS}");
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors {options}"
        ));
        bench.done("verify q.safetensors --source in.safetensors");
        bench.done(&format!(
            "quantize in.safetensors -o q {options} --max-shard-size 1B"
        ));
        bench.done("verify q q.safetensors");
        bench.done("verify q --source in.safetensors");
        bench.done(&format!(
            "shard in.safetensors -o ranks {options} --world-size 3"
        ));
        bench.done("unshard ranks -o u.safetensors");
        bench.done("verify u.safetensors q.safetensors");
        if !recipe.contains("mse") {
            bench.done(&format!(
                "quantize in.safetensors -o f.safetensors {options} --flat-cuts 7,1000"
            ));
            bench.done("verify f.safetensors q.safetensors");
        }
        let check = "--amax-group layers.*.{q,k,v}.weight";
        bench.done(&format!(
            "export q.safetensors -o hub --to modelopt {check}"
        ));
        bench.done("import hub -o back.safetensors");
        if recipe != "nvfp4-1d" && recipe != "nvfp4-1d+mse" && recipe != "nvfp4-mxfp8" {
            bench.done("verify back.safetensors q.safetensors");
        }
        bench.done(&format!(
            "quantize in.safetensors -o own.safetensors --recipe {recipe} --amax-group none"
        ));
        let message = bench.rejected(
            2,
            &format!("export own.safetensors -o other --to modelopt {check}"),
        );
        assert!(
            message.contains("'layers.0.q.weight' and 'layers.0.k.weight'")
                || message.contains("'layers.0.k.weight' and 'layers.0.q.weight'"),
            "{message}"
        );
        for folder in ["q", "ranks", "hub"] {
            fs::remove_dir_all(bench.path(folder)).expect("a folder");
        }
    }
}

#[test]
fn groups_that_cannot_be_are_errors() {
    let bench = Bench::new();
    bench.write("in.safetensors", &layers());
    let quantize = "quantize in.safetensors -o q.safetensors";
    for (options, expected) in [
        (
            "--recipe mxfp8 --amax-group *.{q,k}.weight",
            "no scale of mxfp8 depends on the amax of a whole tensor",
        ),
        (
            "--recipe nvfp4-1d --row-scaled --amax-group *.{q,k}.weight",
            "no scale of nvfp4-1d depends",
        ),
        (
            "--recipe nvfp4-1d --amax-group *.q.weight",
            "matches no two names that differ only inside its braces",
        ),
        (
            "--recipe nvfp4-1d --amax-group *.{q,k}.weight --ignore *.q.weight",
            "includes '*.q.weight', which matches nothing",
        ),
        (
            "--recipe nvfp4-1d --amax-group *.{q,k}.weight,*.{k,v}.weight",
            "into a second group",
        ),
        (
            "--recipe nvfp4-1d --amax-group *.[qk].weight",
            "is not a valid pattern",
        ),
    ] {
        let message = bench.rejected(2, &format!("{quantize} {options}"));
        assert!(
            message.contains("--amax-group") && message.contains(expected),
            "{options}: {message}"
        );
    }
    bench.done(&format!("{quantize} --recipe nvfp4-1d"));
    let message = bench.rejected(
        2,
        "export q.safetensors -o hub --to bf16 --amax-group *.{q,k}.weight",
    );
    assert!(
        message.contains("0 weights are written with a scale"),
        "{message}"
    );
    let train = "train --steps 1 --dim 32 --layers 1 --heads 1 --seq 16 --batch 2";
    for (options, expected) in [
        (
            "--recipe mxfp8 --arch llama --amax-group *.{q,k,v}_proj.weight",
            "no scale of fp32 or mxfp8 depends",
        ),
        (
            "--recipe nvfp4-2d --amax-group *.{q,k,v}_proj.weight",
            "they are block0.qkv",
        ),
        (
            "--recipe nvfp4-2d --amax-group *.{qkv,fc} --keep-bf16 *.fc",
            "includes '*.fc', which matches nothing",
        ),
        (
            "--recipe nvfp4-2d+bf16-ends --amax-group *.{qkv,fc}",
            "--amax-group",
        ),
    ] {
        let message = bench.rejected(2, &format!("{train} {options}"));
        assert!(message.contains(expected), "{options}: {message}");
    }
}

/// What was trained with groups is what `quantize` makes of its masters with the same groups, whatever ranks trained it, in
/// either sharding, and after it went on from a checkpoint of other ranks.
#[test]
fn trained_groups_are_those_of_their_masters() {
    let model = "--dim 32 --layers 2 --heads 2 --kv-heads 1 --seq 16 --batch 4 --eval-batches 1 --arch llama --steps 3";
    let groups = "--amax-group *.{q,k,v}_proj.weight,*.{gate,up}_proj.weight";
    for recipe in ["nvfp4-2d", "fp8-current", "fp8-delayed"] {
        let bench = Bench::new();
        let train = format!("train {model} --no-baseline --recipe {recipe}");
        let run = |name: &str, options: &str| {
            bench.done(&format!(
                "{train} {groups} --save {name} --json {name}.json {options}"
            ));
            let text = fs::read_to_string(bench.path(&format!("{name}.json"))).expect("a file");
            let document: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            let run = format!("{name}/{recipe}-seed0");
            bench.done(&format!("export {run} -o {name}-te --to te {groups}"));
            document["runs"][0]["train_loss"].clone()
        };
        let losses = run("two", "--world-size 2");
        assert_eq!(run("zero", "--world-size 2 --sharding zero1"), losses);
        run("begun", "--world-size 2 --stop-after 2");
        assert_eq!(run("ended", "--world-size 2 --resume begun"), losses);
        for other in ["zero-te", "ended-te"] {
            bench.done(&format!("verify two-te {other}"));
        }
        // Sums over other ranks are other numbers.
        run("three", "--world-size 3 --resume begun");
        let saved = format!("two/{recipe}-seed0");
        for name in ["two", "three"].iter().filter(|_| recipe != "fp8-delayed") {
            // A delayed scale is that of the step before.
            bench.done(&format!(
                "export {name}/{recipe}-seed0 -o {name}-masters --to fp32"
            ));
            bench.done(&format!("verify {name}-te --source {name}-masters"));
        }
        bench.done(&format!(
            "export {saved} -o hub --to compressed-tensors {groups}"
        ));
        bench.done("import hub -o back --dtypes u8");
        bench.done("verify two-te back");
        // Those are the ones that engines run as one, unless others are asked for.
        bench.done(&format!("{train} --save auto --world-size 2"));
        bench.done(&format!(
            "export auto/{recipe}-seed0 -o auto-te --to te {groups}"
        ));
        bench.done("verify two-te auto-te");
        // Without them each has its own, and a run does not go on with others.
        let train = format!("{train} --amax-group none");
        bench.done(&format!("{train} --save own"));
        let message = bench.rejected(
            2,
            &format!("export own/{recipe}-seed0 -o x --to te {groups}"),
        );
        assert!(message.contains("have amaxes of their own"), "{message}");
        let message = bench.rejected(2, &format!("{train} --resume two"));
        assert!(message.contains("was saved with --amax-group"), "{message}");
    }
}
