//! Nobody outside `recipe/` names a recipe: everything follows from the answers a recipe gives.

use super::Violation;
use super::lex::{library_code, words};
use crate::tree::{SourceFile, Tree};

/// The one place that may name recipes.
const HOME: &str = "crates/lowp-format/src/recipe/";

/// What names of recipes contain, in lower case, without `-` and `_`: `Nvfp4TwoD` and `nvfp4-2d`
/// contain `nvfp4`. The types of the recipes themselves are found in the tree and need no entry.
const STEMS: &[&str] = &["fp8delayed", "fp8current", "mxfp8", "nvfp4"];

/// A name that a file may use after all.
#[derive(Debug, Clone, Copy)]
struct Allowed {
    path: &'static str,
    /// The whole word, as written.
    word: &'static str,
    reason: &'static str,
}

/// Keep this short: each entry is a place to visit when a recipe is added.
const ALLOWED: &[Allowed] = &[
    Allowed {
        path: "crates/lowp-fsdp/src/plain_vars.rs",
        word: "PlainF32",
        reason: "parameters that stay in high precision",
    },
    Allowed {
        path: "crates/lowp-fsdp/src/builder.rs",
        word: "PlainF32",
        reason: "parameters that stay in high precision",
    },
    Allowed {
        path: "crates/lowp-train/src/summary.rs",
        word: "PlainF32",
        reason: "the baseline that gaps are measured against",
    },
    Allowed {
        path: "crates/lowp-cli/src/train/args.rs",
        word: "mxfp8",
        reason: "the default of --recipe, and an example of its help",
    },
    Allowed {
        path: "crates/lowp-file/src/interchange/forms.rs",
        word: "nvfp4-pack-quantized",
        reason: "what compressed-tensors calls a form",
    },
    Allowed {
        path: "crates/lowp-file/src/interchange/forms.rs",
        word: "mxfp4-pack-quantized",
        reason: "what compressed-tensors calls a form",
    },
    Allowed {
        path: "crates/lowp-file/src/interchange/forms.rs",
        word: "mxfp8-quantized",
        reason: "what compressed-tensors calls a form",
    },
    Allowed {
        path: "crates/lowp-file/src/interchange/forms.rs",
        word: "W4A16_NVFP4",
        reason: "what ModelOpt calls a form",
    },
    Allowed {
        path: "crates/lowp-file/src/interchange/forms.rs",
        word: "MXFP8",
        reason: "what ModelOpt calls a form",
    },
];

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    check_with(tree, ALLOWED)
}

fn check_with(tree: &Tree, allowed: &[Allowed]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut used = vec![false; allowed.len()];
    let stems = stems(tree);
    for file in tree.sources().filter(|file| is_library(file)) {
        for (line, text) in library_code(&file.text) {
            for word in recipe_words(&text, &stems) {
                let entry = allowed
                    .iter()
                    .position(|a| a.path == file.path && a.word == word);
                match entry {
                    Some(entry) => used[entry] = true,
                    None => violations.push(Violation::new(
                        &file.path,
                        line,
                        format!(
                            "`{word}` names a recipe outside {HOME}; ask the recipe value instead"
                        ),
                    )),
                }
            }
        }
    }
    for (entry, _) in allowed.iter().zip(used).filter(|(_, used)| !used) {
        let message = format!(
            "`{}` is allowed here ({}) but not used; remove the entry",
            entry.word, entry.reason
        );
        violations.push(Violation::new(entry.path, 1, message));
    }
    violations
}

/// Library sources of the crates and kernels, without unit tests in files of their own.
fn is_library(file: &SourceFile) -> bool {
    let path = file.path.as_str();
    let in_crate =
        path.starts_with("crates/") && (path.contains("/src/") || path.contains("/cuda/"));
    let test_only = file.name() == "tests.rs" || path.contains("/tests/");
    in_crate && !test_only && !path.starts_with(HOME)
}

/// [`STEMS`] and the type of every `impl Recipe for Type` in [`HOME`].
fn stems(tree: &Tree) -> Vec<String> {
    let home = tree
        .with_extension("rs")
        .filter(|file| file.path.starts_with(HOME));
    let types = home
        .flat_map(|file| library_code(&file.text))
        .filter_map(|(_, text)| {
            let name = text.trim().strip_prefix("impl Recipe for ")?;
            words(name).next().map(plain)
        });
    STEMS.iter().map(ToString::to_string).chain(types).collect()
}

/// Names of recipes in a line: a type, a function or constant, or the text of a string.
fn recipe_words<'a>(line: &'a str, stems: &[String]) -> impl Iterator<Item = &'a str> {
    line.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '-'))
        .filter(|word| stems.iter().any(|stem| plain(word).contains(stem)))
}

/// A word without its style: lower case, no `-`, no `_`.
fn plain(word: &str) -> String {
    let letters: String = word.chars().filter(char::is_ascii_alphanumeric).collect();
    letters.to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::super::testing::places;
    use super::*;

    const PLAN: &str = "crates/lowp-shard/src/plan.rs";

    #[test]
    fn types_strings_and_identifiers_are_caught() {
        for line in [
            "match recipe { AnyRecipe::Fp8Delayed(_) => 1 }",
            "use lowp_format::Fp8Current;",
            "let scales = Mxfp8_2d::default();",
            "let scales = Mxfp8TwoD::default();",
            "fn pack_nvfp4_row() {}",
            "const NVFP4_BLOCK: usize = 16;",
            "if recipe.name() == \"fp8-current\" {}",
            "let name = \"nvfp4-1d\"; // why",
            "let name = r#\"fp8_delayed\"#;",
        ] {
            let text = format!("//! x\n{line}\n");
            assert_eq!(
                places(&check_with(&Tree::of(&[(PLAN, &text)]), &[])),
                [format!("{PLAN}:2")],
                "{line}"
            );
        }
    }

    #[test]
    fn a_new_recipe_is_known_by_its_impl() {
        let tree = Tree::of(&[
            (
                "crates/lowp-format/src/recipe/toy.rs",
                "impl Recipe for RowBlock128 {}",
            ),
            (PLAN, "use lowp_format::RowBlock128;"),
        ]);
        assert_eq!(places(&check_with(&tree, &[])), [format!("{PLAN}:1")]);
    }

    #[test]
    fn comments_unit_tests_and_the_home_are_free() {
        let text = "//! mxfp8\n/// Nvfp4\nfn a() {} // fp8-delayed\n#[cfg(test)]\nmod tests {\n    use Mxfp8;\n}\n";
        let tree = Tree::of(&[
            (PLAN, text),
            (
                "crates/lowp-format/src/recipe/mxfp8.rs",
                "pub struct Mxfp8;",
            ),
            ("crates/lowp-shard/tests/gather.rs", "use Mxfp8;"),
            ("crates/lowp-shard/src/plan/tests.rs", "use Mxfp8;"),
            ("tests/tests/laws.rs", "use Mxfp8;"),
        ]);
        assert_eq!(check_with(&tree, &[]), []);
    }

    #[test]
    fn ingredients_are_not_recipes() {
        let text =
            "let a = Code::E4M3; let b = fp8_max; let c = amax - current; let d = delayed_scale;";
        assert_eq!(check_with(&Tree::of(&[(PLAN, text)]), &[]), []);
    }

    #[test]
    fn kernels_are_library_code() {
        let path = "crates/lowp-kernels/cuda/encode.cu";
        let tree = Tree::of(&[(path, "__global__ void encode_mxfp8() {}")]);
        assert_eq!(places(&check_with(&tree, &[])), [format!("{path}:1")]);
    }

    #[test]
    fn an_allowed_name_passes_and_an_unused_entry_does_not() {
        let allowed = [Allowed {
            path: PLAN,
            word: "mxfp8",
            reason: "a default value",
        }];
        let with = |text: &str| check_with(&Tree::of(&[(PLAN, text)]), &allowed);
        assert_eq!(with("const DEFAULT: &str = \"mxfp8\";"), []);
        assert_eq!(places(&with("const DEFAULT: &str = \"Mxfp8\";")).len(), 2);
        assert!(with("")[0].message.contains("remove the entry"));
    }
}
