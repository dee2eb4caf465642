//! Modules inside lowp-kernels use those below them only.

use std::collections::HashMap;

use super::Violation;
use super::lex::library_code;
use crate::tree::Tree;

const SOURCES: &str = "crates/lowp-kernels/src/";

/// From the ground up. A module may use those of lines above its own, and of its own line: backends and jobs
/// name each other.
const ORDER: &[&[&str]] = &[
    &["error"],
    &["element"],
    &["host"],
    &["buffer"],
    &["pending"],
    &["rounding"],
    &["lanes"],
    &["power"],
    &["scalars"],
    &["ingredients"],
    &["sealed"],
    &["backend", "job", "source"],
    &["check"],
    &["from_recipe"],
    &["quantized"],
    &["reference"],
    &["cpu"],
    &["cuda"],
    &["bench"],
    &["conformance"],
];

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let exports = tree
        .sources()
        .find(|file| file.path == format!("{SOURCES}lib.rs"))
        .map(|file| exports(&file.text))
        .unwrap_or_default();
    let mut violations = Vec::new();
    for file in tree.sources() {
        let Some(module) = module_of(&file.path) else {
            continue;
        };
        let Some(level) = level(module) else {
            let message =
                format!("`{module}` has no place in the order of xtask/src/tidy/modules.rs");
            violations.push(Violation::new(&file.path, 1, message));
            continue;
        };
        for (line, name) in used(&file.text) {
            let other = exports.get(&name).unwrap_or(&name);
            if self::level(other).is_some_and(|other| other > level) {
                let message = format!("`{module}` may not use `{other}`, which stands above it");
                violations.push(Violation::new(&file.path, line, message));
            }
        }
    }
    violations
}

/// The module of lowp-kernels that a file belongs to; `lib.rs` belongs to none.
fn module_of(path: &str) -> Option<&str> {
    let first = path.strip_prefix(SOURCES)?.split('/').next()?;
    let name = first.strip_suffix(".rs").unwrap_or(first);
    (name != "lib").then_some(name)
}

fn level(module: &str) -> Option<usize> {
    ORDER.iter().position(|line| line.contains(&module))
}

/// The code of a file as one text, and the line at which each of its bytes stands.
fn code(source: &str) -> (String, Vec<usize>) {
    let (mut text, mut lines) = (String::new(), Vec::new());
    for (line, code) in library_code(source) {
        text.push_str(&code);
        text.push('\n');
        lines.resize(text.len(), line);
    }
    (text, lines)
}

/// The names behind `prefix`: of one path, or of each in braces.
fn names(text: &str) -> Vec<String> {
    let name = |text: &str| -> String {
        let word = |c: &char| c.is_alphanumeric() || *c == '_';
        text.trim_start().chars().take_while(word).collect()
    };
    let Some(list) = text.strip_prefix('{') else {
        return vec![name(text)];
    };
    let (mut depth, mut start, mut found) = (0usize, 0, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                found.push(name(&list[start..at]));
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    found
}

/// What follows each `crate::` in a file, with its line.
fn used(source: &str) -> Vec<(usize, String)> {
    let (text, lines) = code(source);
    let found = text.match_indices("crate::");
    found
        .filter(|(at, _)| {
            !text[..*at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$')
        })
        .flat_map(|(at, prefix)| {
            let line = lines[at];
            names(&text[at + prefix.len()..])
                .into_iter()
                .map(move |name| (line, name))
        })
        .collect()
}

/// The module of each name that the crate's root exports.
fn exports(root: &str) -> HashMap<String, String> {
    let (text, _) = code(root);
    let mut found = HashMap::new();
    for (at, prefix) in text.match_indices("pub use ") {
        let path = &text[at + prefix.len()..];
        if let Some((module, rest)) = path.split_once("::") {
            let exported = names(rest).into_iter();
            found.extend(exported.map(|name| (name, module.to_owned())));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::testing::places;
    use super::*;

    const ROOT: &str = "mod check;\npub use cpu::{Cpu, CpuBuffer};\npub use error::KernelError;\n";

    fn found(path: &str, text: &str) -> Vec<String> {
        let root = format!("{SOURCES}lib.rs");
        let path = format!("{SOURCES}{path}");
        let prefix = format!("{path}:");
        places(&check(&Tree::of(&[(&root, ROOT), (&path, text)])))
            .into_iter()
            .filter_map(|place| place.strip_prefix(&prefix).map(str::to_owned))
            .collect()
    }

    #[test]
    fn down_is_allowed_and_up_is_not() {
        for (text, lines) in [
            ("use crate::error::KernelError;\n", vec![]),
            ("use crate::{KernelError, job::Work};\n", vec![]),
            ("use crate::cpu::touched;\n", vec!["1"]),
            ("use crate::Cpu;\n", vec!["1"]),
            ("use crate::{\n    KernelError, CpuBuffer,\n};\n", vec!["1"]),
            (
                "//! [`crate::Cpu`]\n\nfn f() { crate::cpu::f() }\n",
                vec!["3"],
            ),
            (
                "#[cfg(test)]\nmod tests {\n    use crate::Cpu;\n}\n",
                vec![],
            ),
        ] {
            assert_eq!(found("check/mod.rs", text), lines, "{text}");
        }
        assert_eq!(found("cuda/plan.rs", "use crate::check::check;"), [""; 0]);
        assert_eq!(found("backend.rs", "use crate::job::Work;"), [""; 0]);
    }

    #[test]
    fn a_module_without_a_place_is_caught() {
        assert_eq!(found("extra.rs", ""), ["1"]);
    }
}
