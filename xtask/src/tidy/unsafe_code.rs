//! `unsafe` stands only in the files listed here, and `lowp-format` forbids it.

use super::Violation;
use super::lex::{lex, words};
use crate::tree::Tree;

/// Files that may use `unsafe`, with the reason.
const LISTED: &[(&str, &str)] = &[
    (
        "crates/lowp-kernels/src/cpu/bands.rs",
        "threads write disjoint bands of one buffer",
    ),
    (
        "crates/lowp-kernels/src/cpu/isa.rs",
        "calls code compiled for a CPU feature that was detected",
    ),
    (
        "crates/lowp-kernels/src/conformance/cuda.rs",
        "wraps device memory as another library would",
    ),
    (
        "crates/lowp-kernels/src/conformance/fence.rs",
        "puts buffers into the middle of larger device memory",
    ),
    (
        "crates/lowp-kernels/src/conformance/cuda_ranks.rs",
        "calls NCCL on the stream and memory of plans",
    ),
    (
        "crates/lowp-kernels/src/conformance/cuda_streams.rs",
        "wraps streams and device memory as another library would",
    ),
    (
        "crates/lowp-kernels/src/cuda/buffer.rs",
        "device memory: allocation, copies, and memory that others own",
    ),
    (
        "crates/lowp-kernels/src/cuda/cleanup.rs",
        "keeps destructors out of a recording of their thread",
    ),
    (
        "crates/lowp-kernels/src/cuda/device.rs",
        "asks for the driver and its streams, and wraps streams that others own",
    ),
    (
        "crates/lowp-kernels/src/cuda/graph.rs",
        "captures launches and replays them",
    ),
    (
        "crates/lowp-kernels/src/cuda/launch.rs",
        "launches kernels over a table of addresses",
    ),
    (
        "crates/lowp-kernels/src/cuda/module.rs",
        "loads the embedded kernels",
    ),
    (
        "crates/lowp-kernels/src/cuda/plan.rs",
        "launches what it keeps alive",
    ),
    (
        "crates/lowp-kernels/src/cuda/step.rs",
        "page-locked memory that the device copies from",
    ),
    (
        "crates/lowp-kernels/src/cpu/lanes/avx2.rs",
        "vector instructions that were detected",
    ),
    (
        "crates/lowp-kernels/src/cpu/lanes/avx512.rs",
        "vector instructions that were detected",
    ),
    (
        "crates/lowp-kernels/src/cpu/lanes/mod.rs",
        "declares the store past the caches, which its caller fences",
    ),
    (
        "crates/lowp-kernels/src/cpu/lanes/portable.rs",
        "implements the store past the caches as a plain one",
    ),
    (
        "crates/lowp-kernels/src/cpu/lanes/stream.rs",
        "stores past the caches, fenced before anybody reads",
    ),
    (
        "crates/lowp-kernels/src/cpu/memory.rs",
        "asks for zeroed memory, and the system for huge pages",
    ),
    (
        "crates/lowp-kernels/src/cpu/threads.rs",
        "hands work that borrows to a pool, and waits for it",
    ),
    (
        "crates/lowp-candle/src/gemm.rs",
        "the gemm crate takes pointers and strides",
    ),
    (
        "crates/lowp-cli/src/counted.rs",
        "the allocator of the unit tests, which counts",
    ),
    ("crates/lowp-cli/src/file/map.rs", "maps input files"),
    (
        "crates/lowp-cli/src/main.rs",
        "sets an environment variable before any thread exists",
    ),
];

/// The crate that defines correct must be readable without knowing what it may assume.
const FORBIDS: &str = "crates/lowp-format/src/lib.rs";

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let mut violations = check_with(tree, LISTED);
    violations.extend(check_forbid(tree));
    violations
}

fn check_with(tree: &Tree, listed: &[(&str, &str)]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut used = vec![false; listed.len()];
    for file in tree.with_extension("rs") {
        let entry = listed.iter().position(|(path, _)| *path == file.path);
        for (line, text) in lex(&file.text).bare.iter().enumerate() {
            if words(text).all(|word| word != "unsafe") {
                continue;
            }
            match entry {
                Some(entry) => used[entry] = true,
                None => violations.push(Violation::new(
                    &file.path,
                    line + 1,
                    "`unsafe` outside the files listed in xtask/src/tidy/unsafe_code.rs",
                )),
            }
        }
    }
    for ((path, reason), _) in listed.iter().zip(used).filter(|(_, used)| !used) {
        let message = format!("listed for `unsafe` ({reason}) but has none; remove the entry");
        violations.push(Violation::new(path, 1, message));
    }
    violations
}

fn check_forbid(tree: &Tree) -> Option<Violation> {
    let forbids = tree.file(FORBIDS).is_some_and(|file| {
        lex(&file.text)
            .bare
            .iter()
            .any(|line| line.trim() == "#![forbid(unsafe_code)]")
    });
    (!forbids).then(|| Violation::new(FORBIDS, 1, "must contain `#![forbid(unsafe_code)]`"))
}

#[cfg(test)]
mod tests {
    use super::super::testing::places;
    use super::*;

    const BANDS: &[(&str, &str)] = &[("bands.rs", "disjoint bands")];

    #[test]
    fn unsafe_outside_the_list_is_caught() {
        let tree = Tree::of(&[
            ("bands.rs", "//! x\nunsafe impl Send for Bands {}"),
            (
                "a.rs",
                "//! unsafe\n#![deny(unsafe_op_in_unsafe_fn)]\nlet s = \"unsafe\";\nunsafe { f() }",
            ),
            ("b.rs", "pub unsafe fn f() {}"),
        ]);
        assert_eq!(places(&check_with(&tree, BANDS)), ["a.rs:4", "b.rs:1"]);
    }

    #[test]
    fn a_listed_file_without_unsafe_is_caught() {
        assert_eq!(
            places(&check_with(&Tree::of(&[("bands.rs", "//! unsafe")]), BANDS)),
            ["bands.rs:1"]
        );
        assert_eq!(places(&check_with(&Tree::of(&[]), BANDS)), ["bands.rs:1"]);
    }

    #[test]
    fn the_format_crate_must_forbid() {
        let with = |text: &str| check_forbid(&Tree::of(&[(FORBIDS, text)]));
        assert_eq!(with("//! x\n#![forbid(unsafe_code)]\n"), None);
        assert!(with("//! x\n// #![forbid(unsafe_code)]\n").is_some());
        assert!(check_forbid(&Tree::of(&[])).is_some());
    }
}
