//! Invariants of one file at a time: its length, its first line, its examples, and that nothing in it is half done.

use super::lex::{lex, words};
use super::violation::Violation;
use crate::tree::{SourceFile, Tree};

type Rule = fn(&SourceFile) -> Vec<(usize, String)>;

const RULES: [Rule; 8] = [
    length,
    module_docs,
    crate_example,
    leftovers,
    placeholders,
    pending_snapshot,
    toolchain,
    architectures,
];

/// A longer source file holds two ideas.
const MOST_LINES: usize = 600;

/// Macros that mark unfinished work.
const MACROS: &[&str] = &["todo", "unimplemented", "dbg"];

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let broken = |file: &SourceFile| {
        let found = RULES.iter().flat_map(|rule| rule(file));
        let violation = |(line, message)| Violation::new(&file.path, line, message);
        found.map(violation).collect::<Vec<_>>()
    };
    tree.files.iter().flat_map(broken).collect()
}

/// A violation of the whole file.
fn first_line(broken: bool, message: &str) -> Vec<(usize, String)> {
    broken
        .then(|| (1, message.to_owned()))
        .into_iter()
        .collect()
}

fn length(file: &SourceFile) -> Vec<(usize, String)> {
    let lines = file.text.lines().count();
    let message = format!("{lines} lines; split the file, the limit is {MOST_LINES}");
    let long = file.is_source() && lines > MOST_LINES;
    long.then_some((MOST_LINES + 1, message))
        .into_iter()
        .collect()
}

fn module_docs(file: &SourceFile) -> Vec<(usize, String)> {
    let mut first = file
        .text
        .lines()
        .take(1)
        .filter_map(|line| line.strip_prefix("//!"));
    first_line(
        file.extension() == "rs" && !first.any(|text| !text.trim().is_empty()),
        "the file must begin with `//!` and say what it holds",
    )
}

/// Each library crate is usable alone, and its crate doc shows how, in an example that runs as a doctest.
fn crate_example(file: &SourceFile) -> Vec<(usize, String)> {
    let library = file.path.starts_with("crates/") && file.path.ends_with("/src/lib.rs");
    first_line(
        library && !has_example(&file.text),
        "the crate doc must contain a Rust example between ``` lines",
    )
}

/// Whether the leading `//!` block opens a code block that rustdoc compiles.
fn has_example(text: &str) -> bool {
    let docs = text.lines().map_while(|line| line.strip_prefix("//!"));
    let fences = docs.filter_map(|line| line.trim().strip_prefix("```"));
    let mut openings = fences.step_by(2);
    openings.any(|language| matches!(language.trim(), "" | "rust" | "no_run"))
}

/// No ignored test, no stub, no debug print.
fn leftovers(file: &SourceFile) -> Vec<(usize, String)> {
    if file.extension() != "rs" {
        return Vec::new();
    }
    let of_line = |(index, line): (usize, &String)| {
        let macros = MACROS.iter().filter(|name| calls(line, name));
        let mut found: Vec<_> = macros
            .map(|name| format!("`{name}!` is left over; finish the work or return an error"))
            .collect();
        if line.trim_start().starts_with("#[") && words(line).any(|word| word == "ignore") {
            let message =
                "an ignored test proves nothing; make it fast, or gate it on LOWP_EXHAUSTIVE";
            found.push(message.to_owned());
        }
        found.into_iter().map(move |message| (index + 1, message))
    };
    let bare = lex(&file.text).bare;
    bare.iter().enumerate().flat_map(of_line).collect()
}

/// Whether `line` calls the macro `name`, not one whose name ends the same way.
fn calls(line: &str, name: &str) -> bool {
    line.match_indices(name).any(|(at, _)| {
        let after = &line[at + name.len()..];
        let whole = !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        whole && after.starts_with('!') && !after.starts_with("!=")
    })
}

/// No placeholder of a template, `@NAME@`, is left in a document.
fn placeholders(file: &SourceFile) -> Vec<(usize, String)> {
    let lines = file.text.lines().enumerate();
    let of_documents = lines.filter(|_| file.extension() == "md");
    let named = of_documents.filter_map(|(index, line)| {
        let message = format!("write the value in the place of {}", placeholder(line)?);
        Some((index + 1, message))
    });
    named.collect()
}

/// The first `@NAME@` of a line, in capitals.
fn placeholder(line: &str) -> Option<String> {
    let parts: Vec<&str> = line.split('@').collect();
    let inner = parts.get(1..parts.len().saturating_sub(1))?;
    let is_name = |part: &&&str| {
        let mut letters = part.bytes();
        !part.is_empty() && letters.all(|byte| byte.is_ascii_uppercase() || byte == b'_')
    };
    inner.iter().find(is_name).map(|name| format!("@{name}@"))
}

/// No snapshot waits for review: git ignores them, so one left behind would never be seen again.
fn pending_snapshot(file: &SourceFile) -> Vec<(usize, String)> {
    let ends = [".snap.new", ".pending-snap"];
    first_line(
        ends.iter().any(|end| file.name().ends_with(end)),
        "a changed snapshot; compare it, then rename it to .snap or delete it",
    )
}

/// The workspace builds with the compiler its user has, from `rust-version` on.
fn toolchain(file: &SourceFile) -> Vec<(usize, String)> {
    first_line(
        matches!(file.name(), "rust-toolchain" | "rust-toolchain.toml"),
        "delete the toolchain file; `rust-version` in Cargo.toml says enough",
    )
}

/// What differs between architectures is in one header, which says why.
fn architectures(file: &SourceFile) -> Vec<(usize, String)> {
    if !matches!(file.extension(), "cu" | "cuh") || file.name() == "policy.cuh" {
        return Vec::new();
    }
    let lines = file.text.lines().enumerate();
    let named = lines.filter(|(_, line)| line.contains("__CUDA_ARCH"));
    let message = "ask lowp/policy.cuh what the architecture has";
    named
        .map(|(index, _)| (index + 1, message.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        places(&check(&Tree::of(files)))
    }

    #[test]
    fn the_line_after_the_limit_is_caught() {
        let (full, over) = ("//! x\n".repeat(600), "//! x\n".repeat(601));
        let files = [
            ("a.rs", &*full),
            ("b.rs", &over),
            ("c.cu", &over),
            ("d.cuh", &over),
            ("e.md", &over),
        ];
        assert_eq!(found(&files), ["b.rs:601", "c.cu:601", "d.cuh:601"]);
    }

    #[test]
    fn an_architecture_outside_of_the_policy_is_caught() {
        let text = "int a;\n#if __CUDA_ARCH__ >= 900\n#endif\n";
        let files = [
            ("include/lowp/policy.cuh", text),
            ("a.cu", text),
            ("b.cuh", text),
        ];
        assert_eq!(found(&files), ["a.cu:2", "b.cuh:2"]);
    }

    #[test]
    fn a_file_without_a_heading_is_caught() {
        let files = [
            ("a.rs", "//! Holds a.\nfn a() {}"),
            ("b.rs", "// b\n//! Holds b."),
            ("c.rs", ""),
            ("d.rs", "//!\n"),
            ("e.cu", "__global__ void e();"),
        ];
        assert_eq!(found(&files), ["b.rs:1", "c.rs:1", "d.rs:1"]);
    }

    #[test]
    fn a_crate_doc_without_an_example_is_caught() {
        let libraries = [
            ("crates/a", "//! A.\n//!\n//! ```\n//! use a;\n//! ```\n"),
            ("crates/b", "//! B.\n"),
            ("crates/c", "//! C.\n//! ```text\n//! c\n//! ```\n"),
            (
                "crates/d",
                "//! D.\n\n/// ```\n/// use d;\n/// ```\npub fn d() {}\n",
            ),
            ("tests", "//! Tests.\n"),
        ]
        .map(|(folder, text)| (format!("{folder}/src/lib.rs"), text));
        let mut files: Vec<_> = libraries
            .iter()
            .map(|(path, text)| (&**path, *text))
            .collect();
        files.push(("crates/e/src/main.rs", "//! E.\n"));
        let expected = ["b", "c", "d"].map(|name| format!("crates/{name}/src/lib.rs:1"));
        assert_eq!(found(&files), expected);
    }

    #[test]
    fn each_leftover_is_caught() {
        for line in [
            "#[ignore]",
            "#[ignore = \"slow\"]",
            "#[cfg_attr(miri, ignore)]",
            "    todo!()",
            "unimplemented!(\"later\")",
            "let x = std::dbg!(y);",
        ] {
            let text = format!("//! x\n{line}\n");
            assert_eq!(found(&[("a.rs", &text)]), ["a.rs:2"], "{line}");
        }
    }

    #[test]
    fn words_in_text_and_longer_names_are_free() {
        let text =
            "//! todo!()\nlet a = \"dbg!(x)\";\nmy_todo!();\nlet ignore = 1;\nif todo != 2 {}\n";
        assert_eq!(found(&[("a.rs", text)]), [""; 0]);
    }

    #[test]
    fn a_placeholder_is_caught_in_documents_alone() {
        let text = "fine\nspills @BYTES@ bytes\nuser@example.org and b@c\n";
        let files = [("docs/a.md", text), ("src/lib.rs", "//! `@NAME@`\n")];
        assert_eq!(found(&files), ["docs/a.md:2"]);
    }

    #[test]
    fn files_that_must_not_be_there_are_caught_anywhere() {
        let files = [
            ("rust-toolchain.toml", ""),
            ("tests/rust-toolchain", ""),
            ("tests/snapshots/a.snap.new", ""),
            ("tests/snapshots/a.snap", ""),
            ("Cargo.toml", ""),
        ];
        let expected = [
            "rust-toolchain.toml",
            "tests/rust-toolchain",
            "tests/snapshots/a.snap.new",
        ];
        assert_eq!(found(&files), expected.map(|path| format!("{path}:1")));
    }
}
