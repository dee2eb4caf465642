//! Which module of a crate uses which others: the paths in its code, followed through re-exports to where a name is defined.

use std::collections::{BTreeMap, BTreeSet};

use super::lex::library_code;
use crate::tree::Tree;

/// The names on the way from the root of a crate to a module.
pub(super) type Module = Vec<String>;

/// The modules of one crate that have a file, and what each uses.
#[derive(Debug, Default)]
pub(super) struct Imports {
    pub(super) files: BTreeMap<Module, String>,
    pub(super) uses: BTreeMap<Module, BTreeSet<Module>>,
}

/// A module and the names in it that a path goes on with.
type Place = (Module, Vec<String>);

/// The imports of each crate, by the folder of its sources.
pub(super) fn imports(tree: &Tree) -> BTreeMap<String, Imports> {
    let mut sources: BTreeMap<String, BTreeMap<Module, (&str, &str)>> = BTreeMap::new();
    for file in tree.with_extension("rs") {
        let Some((root, path)) = file.path.split_once("/src/") else {
            continue;
        };
        let mut module: Module = path
            .trim_end_matches(".rs")
            .split('/')
            .map(str::to_owned)
            .collect();
        match module.last().map(String::as_str) {
            Some("tests") => continue,
            Some("mod") => drop(module.pop()),
            Some("lib" | "main") if module.len() == 1 => module.clear(),
            _ => {}
        }
        let modules = sources.entry(format!("{root}/src")).or_default();
        modules.insert(module, (&file.path, &file.text));
    }
    sources
        .into_iter()
        .map(|(root, modules)| (root, of_crate(&modules)))
        .collect()
}

fn of_crate(modules: &BTreeMap<Module, (&str, &str)>) -> Imports {
    let known = Known {
        modules: modules.keys().cloned().collect(),
        exports: BTreeMap::new(),
    };
    let paths: BTreeMap<&Module, Paths> = modules
        .iter()
        .map(|(module, (_, text))| (module, Paths::of(text, module, &known)))
        .collect();
    let exports = paths.iter().map(|(&module, paths)| {
        let named = |path: &Vec<String>| {
            let (place, rest) = known.resolve(module, path)?;
            Some((path.last()?.clone(), (place, rest)))
        };
        (
            module.clone(),
            paths.exported.iter().filter_map(named).collect(),
        )
    });
    let known = Known {
        exports: exports.collect(),
        ..known
    };
    let uses = paths.iter().map(|(&module, paths)| {
        let found = paths.used.iter().filter_map(|path| {
            let place = known.resolve(module, path)?;
            Some(known.defined(place))
        });
        let others = found.filter(|other| other != module);
        (module.clone(), others.collect())
    });
    Imports {
        files: modules
            .iter()
            .map(|(module, (path, _))| (module.clone(), (*path).to_owned()))
            .collect(),
        uses: uses.collect(),
    }
}

/// The modules of a crate, and where the names that they export come from.
struct Known {
    modules: BTreeSet<Module>,
    exports: BTreeMap<Module, BTreeMap<String, Place>>,
}

impl Known {
    /// Where `path`, written in `module`, leads.
    fn resolve(&self, module: &Module, path: &[String]) -> Option<Place> {
        let mut at = match path.first()?.as_str() {
            "crate" => Module::new(),
            "self" | "super" => module.clone(),
            child => {
                let mut inside = module.clone();
                inside.push(child.to_owned());
                return self
                    .modules
                    .contains(&inside)
                    .then(|| self.enter(inside, &path[1..]));
            }
        };
        let mut rest = path;
        while let Some(("crate" | "self" | "super", after)) =
            rest.split_first().map(|(first, after)| (&**first, after))
        {
            if rest[0] == "super" {
                at.pop();
            }
            rest = after;
        }
        Some(self.enter(at, rest))
    }

    /// Follows `path` from `at` as long as there are modules.
    fn enter(&self, mut at: Module, path: &[String]) -> Place {
        for (i, name) in path.iter().enumerate() {
            at.push(name.clone());
            if !self.modules.contains(&at) {
                at.pop();
                return (at, path[i..].to_vec());
            }
        }
        (at, Vec::new())
    }

    /// The module that defines what is at `place`.
    fn defined(&self, (mut module, mut rest): Place) -> Module {
        // Re-exports of re-exports are few.
        for _ in 0..8 {
            let exported = rest.first().and_then(|name| {
                let names = self.exports.get(&module)?;
                names.get(name).cloned()
            });
            match exported {
                Some((next, names)) => {
                    rest = if names.is_empty() {
                        rest.split_off(1)
                    } else {
                        names
                    };
                    (module, rest) = self.enter(next, &rest);
                }
                None => break,
            }
        }
        module
    }
}

struct Paths {
    exported: Vec<Vec<String>>,
    used: Vec<Vec<String>>,
}

impl Paths {
    fn of(source: &str, module: &Module, known: &Known) -> Self {
        let lines = library_code(source).into_iter().map(|(_, line)| line);
        let code = lines.collect::<Vec<_>>().join("\n");
        let (mut exported, mut used, mut body) = (Vec::new(), Vec::new(), String::new());
        for item in code.split_inclusive(';') {
            let mut found = item.match_indices("use ").map(|(at, _)| at);
            let start = found.find(|&at| opens(&item[..at]));
            let Some(at) = start else {
                body.push_str(item);
                continue;
            };
            let before = &item[..at];
            let line = before.rfind('\n').map_or(0, |end| end + 1);
            let public = before[line..].trim_start().starts_with("pub");
            body.push_str(&before[..line]);
            let list = if public { &mut exported } else { &mut used };
            expand(&mut Vec::new(), item[at + 4..].trim_end_matches(';'), list);
        }
        let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':' || c == '$';
        for text in body.split(|c: char| !is_path(c)) {
            let path: Vec<String> = text.split("::").map(str::to_owned).collect();
            let first = &*path[0];
            let inside = || {
                let child = module.iter().cloned().chain([first.to_owned()]);
                known.modules.contains(&child.collect::<Module>())
            };
            if path.len() > 1 && (first == "crate" || first == "super" || inside()) {
                used.push(path);
            }
        }
        Self { exported, used }
    }
}

/// Whether a `use` after `before` begins a statement: only indentation and a visibility stand before it in its line.
fn opens(before: &str) -> bool {
    let line = before.rsplit('\n').next().unwrap_or_default().trim();
    line.is_empty() || line.starts_with("pub") && !line.contains(['=', '{', ';'])
}

/// The paths of a `use`, its braces written out.
fn expand(prefix: &mut Vec<String>, text: &str, found: &mut Vec<Vec<String>>) {
    let (mut depth, mut start) = (0usize, 0);
    for (at, c) in text.char_indices().chain([(text.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                one(prefix, text[start..at].trim(), found);
                start = at + 1;
            }
            _ => {}
        }
    }
}

fn one(prefix: &mut Vec<String>, text: &str, found: &mut Vec<Vec<String>>) {
    let open = text.find('{');
    let path = text[..open.unwrap_or(text.len())].split(" as ").next();
    let length = prefix.len();
    let names = path.unwrap_or_default().split("::").map(str::trim);
    prefix.extend(names.filter(|name| !name.is_empty()).map(str::to_owned));
    match (open, text.rfind('}')) {
        (Some(open), Some(close)) => expand(prefix, &text[open + 1..close], found),
        _ if prefix.len() > length => found.push(prefix.clone()),
        _ => {}
    }
    prefix.truncate(length);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(files: &[(&str, &str)], module: &str) -> Vec<String> {
        let files: Vec<(String, &str)> = files
            .iter()
            .map(|(path, text)| (format!("crates/a/src/{path}"), *text))
            .collect();
        let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (&**path, *text)).collect();
        let found = imports(&Tree::of(&files));
        let module: Module = module.split("::").map(str::to_owned).collect();
        let uses = &found["crates/a/src"].uses[&module];
        uses.iter().map(|module| module.join("::")).collect()
    }

    #[test]
    fn names_are_followed_to_where_they_are_defined() {
        let files = [
            (
                "lib.rs",
                "mod one;\nmod two;\npub use two::{Deep, Other};\n",
            ),
            (
                "two/mod.rs",
                "mod deep;\npub(crate) use deep::Deep;\npub struct Other;\n",
            ),
            ("two/deep.rs", "pub struct Deep;\n"),
            (
                "one.rs",
                "use std::fmt;\n\nuse crate::{\n    Deep,\n    two::Other as O,\n};\n",
            ),
            (
                "three.rs",
                "fn f() { crate::two::f() }\n// crate::one::f()\n",
            ),
            (
                "four.rs",
                "#[cfg(test)]\nmod tests {\n    use crate::one;\n}\n",
            ),
            ("five/mod.rs", "mod six;\nfn f() { six::f(); }\n"),
            (
                "five/six.rs",
                "use super::super::one::{self, {two}};\nlet used = super::g();\n",
            ),
        ];
        for (module, expected) in [
            ("one", vec!["two", "two::deep"]),
            ("three", vec!["two"]),
            ("four", vec![]),
            ("five", vec!["five::six"]),
            ("five::six", vec!["five", "one"]),
        ] {
            assert_eq!(uses(&files, module), expected, "{module}");
        }
    }
}
