//! Nothing half done: no ignored test, no stub, no debug print.

use super::lex::{lex, words};
use super::violation::Violation;
use crate::tree::Tree;

/// Macros that mark unfinished work.
const MACROS: &[&str] = &["todo", "unimplemented", "dbg"];

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let mut violations = Vec::new();
    for file in tree.with_extension("rs") {
        for (line, text) in lex(&file.text).bare.iter().enumerate() {
            for message in leftovers(text) {
                violations.push(Violation::new(&file.path, line + 1, message));
            }
        }
    }
    violations
}

fn leftovers(line: &str) -> Vec<String> {
    let mut found: Vec<String> = MACROS
        .iter()
        .filter(|name| calls(line, name))
        .map(|name| format!("`{name}!` is left over; finish the work or return an error"))
        .collect();
    let attribute = line.trim_start().starts_with("#[");
    if attribute && words(line).any(|word| word == "ignore") {
        found.push(
            "an ignored test proves nothing; make it fast, or gate it on LOWP_EXHAUSTIVE".into(),
        );
    }
    found
}

/// Whether `line` calls the macro `name`, not one whose name ends the same way.
fn calls(line: &str, name: &str) -> bool {
    line.match_indices(name).any(|(at, _)| {
        let behind = &line[at + name.len()..];
        let whole = !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        whole && behind.starts_with('!') && !behind.starts_with("!=")
    })
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

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
            assert_eq!(
                places(&check(&Tree::of(&[("a.rs", &text)]))),
                ["a.rs:2"],
                "{line}"
            );
        }
    }

    #[test]
    fn words_in_text_and_longer_names_are_free() {
        let text =
            "//! todo!()\nlet a = \"dbg!(x)\";\nmy_todo!();\nlet ignore = 1;\nif todo != 2 {}\n";
        assert_eq!(check(&Tree::of(&[("a.rs", text)])), []);
    }
}
