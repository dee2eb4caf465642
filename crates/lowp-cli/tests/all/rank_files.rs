//! Shard, then unshard, is quantize: every recipe, awkward shapes, worlds of 1 to 13 ranks.

use crate::support::{Bench, Tensor, bf16s, f16s, f32s, form_of, matrix, recipes, values};

/// Matrices whose rows divide badly, beside tensors that pass through.
fn model() -> Vec<Tensor> {
    vec![
        matrix("one.row", &[1, 32], 1),
        matrix("ragged", &[33, 64], 2),
        matrix("tall", &[259, 32], 3),
        matrix("deep", &[3, 5, 96], 4),
        matrix("empty", &[0, 64], 5),
        f32s("zero", &[17, 32], &[0.0; 17 * 32]),
        bf16s("half", &[47, 64], &values(47 * 64, 6)),
        f16s("ieee", &[16, 32], &values(16 * 32, 7)),
        f32s("norm", &[33], &values(33, 8)),
        bf16s("scalar", &[], &[1.5]),
    ]
}

#[test]
fn unshard_equals_quantize() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    let usages = ["both", "rowwise", "columnwise"];
    let forms = ["padded", "compact", "swizzled"];
    for (r, recipe) in recipes().into_iter().enumerate() {
        // Each recipe meets every usage and form in some of its worlds.
        for world in (1 + r % 2..=13).step_by(2) {
            let (usage, form) = (usages[(world + r) % 3], forms[(world / 3 + r) % 3]);
            let form = form_of(recipe, form);
            let count = world.to_string();
            let options = ["--recipe", recipe, "--usage", usage, "--scales", form];
            let what = format!("{recipe} over {world}, {usage}, {form}");
            let dir = format!("ranks-{recipe}-{world}");
            bench.done(
                &[
                    &["quantize", "in.safetensors", "-o", "q.safetensors"][..],
                    &options,
                ]
                .concat(),
            );
            bench.done(
                &[
                    &[
                        "shard",
                        "in.safetensors",
                        "-o",
                        &dir,
                        "--world-size",
                        &count,
                    ][..],
                    &options,
                ]
                .concat(),
            );
            bench.done(&["unshard", &dir, "-o", "u.safetensors"]);
            let (q, u) = (bench.read("q.safetensors"), bench.read("u.safetensors"));
            assert_eq!(q.names(), u.names(), "{what}");
            for (name, tensor) in &q.tensors {
                assert!(u.tensors[name] == *tensor, "{what}: {name}");
            }
            assert_eq!(q.metadata, u.metadata, "{what}");
            let files = std::fs::read_dir(bench.path(&dir))
                .expect("rank files")
                .count();
            assert_eq!(files, world, "{what}");
        }
    }
}

#[test]
fn rank_files_that_do_not_belong_together() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[f32s("w", &[64, 32], &values(64 * 32, 1))],
    );
    bench.write(
        "other.safetensors",
        &[f32s("w", &[64, 32], &values(64 * 32, 2))],
    );
    let shard = |input: &str, dir: &str, world: &str| {
        bench.done(&format!(
            "shard {input} -o {dir} --world-size {world} --recipe nvfp4-2d"
        ));
    };
    let [first, second] = [
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ];

    shard("in.safetensors", "missing", "2");
    std::fs::remove_file(bench.path("missing").join(second)).expect("a file");
    let message = bench.rejected(2, "unshard missing -o u.safetensors");
    assert!(
        message.contains(second) && message.contains("missing"),
        "{message}"
    );

    shard("in.safetensors", "swapped", "2");
    std::fs::copy(
        bench.path("swapped").join(first),
        bench.path("swapped").join(second),
    )
    .expect("a copy");
    let message = bench.rejected(2, "unshard swapped -o u.safetensors");
    assert!(message.contains("rank 0 of 2"), "{message}");

    shard("in.safetensors", "mixed", "2");
    shard("other.safetensors", "others", "2");
    std::fs::copy(
        bench.path("others").join(second),
        bench.path("mixed").join(second),
    )
    .expect("a copy");
    let message = bench.rejected(2, "unshard mixed -o u.safetensors");
    assert!(message.contains("w.amax"), "{message}");

    shard("in.safetensors", "cut", "2");
    let bytes = std::fs::read(bench.path("cut").join(second)).expect("a file");
    std::fs::write(bench.path("cut").join(second), &bytes[..bytes.len() - 1]).expect("a file");
    bench.rejected(2, "unshard cut -o u.safetensors");

    shard("in.safetensors", "worlds", "2");
    let third = "rank-00000-of-00003.safetensors";
    std::fs::copy(
        bench.path("worlds").join(first),
        bench.path("worlds").join(third),
    )
    .expect("a copy");
    bench.rejected(2, "unshard worlds -o u.safetensors");

    std::fs::create_dir(bench.path("nothing")).expect("a folder");
    bench.rejected(2, "unshard nothing -o u.safetensors");
    bench.rejected(2, "unshard absent -o u.safetensors");
    bench.rejected(
        2,
        "shard in.safetensors -o cut --world-size 2 --recipe mxfp8",
    );
    bench.rejected(
        2,
        "shard in.safetensors -o new --world-size 0 --recipe mxfp8",
    );
}

#[test]
fn a_rank_file_can_be_decoded_and_inspected_by_itself() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[f32s("w", &[70, 32], &values(70 * 32, 1))],
    );
    bench.done("shard in.safetensors -o ranks --world-size 3 --recipe mxfp8-2d");
    bench.done("dequantize ranks/rank-00002-of-00003.safetensors -o d.safetensors");
    assert_eq!(bench.read("d.safetensors").tensors["w"].1, [6, 32]);
    let text = bench.done("inspect ranks --reference in.safetensors");
    assert!(text.contains("70x32 rows 64..70"), "{text}");
    assert!(
        bench
            .done(&["verify", "ranks", "ranks"])
            .starts_with("equal: ")
    );
}
