//! Nobody outside `recipe/` names a recipe: everything follows from the answers a recipe gives.

use std::collections::BTreeSet;

use super::lex::{library_code, words};
use super::violation::Violation;
use crate::tree::{SourceFile, Tree};

/// The one place that may name recipes.
const HOME: &str = "crates/lowp-format/src/recipe/";

/// What names of recipes contain, in lower case, without `-` and `_`: `Nvfp4TwoD` and `nvfp4-2d`
/// contain `nvfp4`. The types of the recipes themselves are found in the tree and need no entry.
const STEMS: &[&str] = &["fp8delayed", "fp8current", "mxfp8", "nvfp4"];

/// Words, as they are written, that a file may use after all, and why.
type Allowed = (&'static str, &'static [&'static str], &'static str);

const FORMS: &str = "crates/lowp-file/src/interchange/forms.rs";
const HIGH_PRECISION: &str = "parameters that stay in high precision";

/// Keep this short: each entry is a place to visit when a recipe is added.
const ALLOWED: &[Allowed] = &[
    (
        "crates/lowp-fsdp/src/plain_vars.rs",
        &["PlainF32"],
        HIGH_PRECISION,
    ),
    (
        "crates/lowp-train/src/summary.rs",
        &["PlainF32"],
        "the baseline that gaps are measured against",
    ),
    (
        "crates/lowp-cli/src/train/args.rs",
        &["mxfp8"],
        "the default of --recipe, and examples of its help",
    ),
    (
        FORMS,
        &[
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "mxfp8-quantized",
        ],
        "what compressed-tensors calls a form",
    ),
    (
        FORMS,
        &["W4A16_NVFP4", "MXFP8"],
        "what ModelOpt calls a form",
    ),
];

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    check_with(tree, ALLOWED)
}

fn check_with(tree: &Tree, allowed: &[Allowed]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut used = BTreeSet::new();
    let stems = stems(tree);
    for file in tree.sources().filter(|file| is_library(file)) {
        for (line, text) in library_code(&file.text) {
            for word in recipe_words(&text, &stems) {
                let here =
                    |(path, words, _): &&Allowed| *path == file.path && words.contains(&word);
                if allowed.iter().any(|entry| here(&entry)) {
                    used.insert((&*file.path, word.to_owned()));
                    continue;
                }
                let message =
                    format!("`{word}` names a recipe outside {HOME}; ask the recipe value instead");
                violations.push(Violation::new(&file.path, line, message));
            }
        }
    }
    for (path, words, reason) in allowed {
        for word in words
            .iter()
            .filter(|word| !used.contains(&(*path, word.to_string())))
        {
            let message =
                format!("`{word}` is allowed here ({reason}) but not used; remove the entry");
            violations.push(Violation::new(path, 1, message));
        }
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
        .filter(|word| {
            let word = plain(word);
            stems.iter().any(|stem| word.contains(stem))
        })
}

/// A word without its style: lower case, no `-`, no `_`.
fn plain(word: &str) -> String {
    let letters: String = word.chars().filter(char::is_ascii_alphanumeric).collect();
    letters.to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
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
        let allowed: [Allowed; 1] = [(PLAN, &["mxfp8"], "a default value")];
        let with = |text: &str| check_with(&Tree::of(&[(PLAN, text)]), &allowed);
        assert_eq!(with("const DEFAULT: &str = \"mxfp8\";"), []);
        assert_eq!(places(&with("const DEFAULT: &str = \"Mxfp8\";")).len(), 2);
        assert!(with("")[0].message.contains("remove the entry"));
    }
}
