//! Imports go one way: at most two files of a crate import each other, and no folder takes part in a circle.

use std::collections::{BTreeMap, BTreeSet};

use super::imports::{Imports, Module, imports};
use super::violation::Violation;
use crate::tree::Tree;

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let crates = imports(tree);
    crates.values().flat_map(check_crate).collect()
}

fn check_crate(imports: &Imports) -> Vec<Violation> {
    let of_files = circles(&imports.uses)
        .into_iter()
        .filter(|circle| circle.len() > 2);
    let levels: BTreeSet<&[String]> = imports
        .files
        .keys()
        .map(|module| &module[..module.len().saturating_sub(1)])
        .collect();
    let of_folders = levels.into_iter().flat_map(|level| {
        let found = circles(&siblings(imports, level));
        found
            .into_iter()
            .filter(|circle| circle.iter().any(|module| is_folder(imports, module)))
    });
    let all: BTreeSet<Vec<Module>> = of_files.chain(of_folders).collect();
    all.into_iter()
        .map(|circle| violation(imports, &circle))
        .collect()
}

fn is_folder(imports: &Imports, module: &Module) -> bool {
    let inside = |other: &Module| other.len() > module.len() && other.starts_with(module);
    imports.files.keys().any(inside)
}

/// What the files and folders in the folder of `parent` use of each other.
fn siblings(imports: &Imports, parent: &[String]) -> BTreeMap<Module, BTreeSet<Module>> {
    let depth = parent.len() + 1;
    let child = |module: &Module| {
        let inside = module.len() >= depth && module.starts_with(parent);
        inside.then(|| module[..depth].to_vec())
    };
    let mut found: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    for (module, others) in &imports.uses {
        let Some(from) = child(module) else { continue };
        let others = others.iter().filter_map(child).filter(|to| *to != from);
        found.entry(from.clone()).or_default().extend(others);
    }
    found
}

/// The sets of modules of which each uses each other, directly or not.
fn circles(uses: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<Vec<Module>> {
    let reached: BTreeMap<&Module, BTreeSet<&Module>> =
        uses.keys().map(|from| (from, reach(uses, from))).collect();
    let mut found: Vec<Vec<Module>> = Vec::new();
    for (&module, others) in &reached {
        let back = |other: &&&Module| reached.get(**other).is_some_and(|o| o.contains(module));
        let circle: Vec<Module> = others
            .iter()
            .filter(back)
            .map(|&other| other.clone())
            .collect();
        if circle.len() > 1 && !found.contains(&circle) {
            found.push(circle);
        }
    }
    found
}

/// The modules that `from` uses, and those that they use.
fn reach<'a>(
    uses: &'a BTreeMap<Module, BTreeSet<Module>>,
    from: &'a Module,
) -> BTreeSet<&'a Module> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        let others = uses.get(module).into_iter().flatten();
        next.extend(others.filter(|&other| seen.insert(other)));
    }
    seen
}

fn violation(imports: &Imports, circle: &[Module]) -> Violation {
    let names: Vec<String> = circle
        .iter()
        .map(|module| match module.is_empty() {
            true => "the root".to_owned(),
            false => module.join("::"),
        })
        .collect();
    let path = circle.iter().find_map(|module| imports.files.get(module));
    Violation::new(
        path.map_or("", |path| path),
        1,
        format!("import each other, directly or not: {}", names.join(", ")),
    )
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        places(&check(&Tree::of(files)))
    }

    #[test]
    fn two_files_may_import_each_other_and_three_may_not() {
        let (root, a) = (("a/src/lib.rs", ""), ("a/src/a.rs", "use crate::b::B;\n"));
        let two = [root, a, ("a/src/b.rs", "use crate::a::A;\n")];
        assert_eq!(found(&two), Vec::<String>::new());
        let b = ("a/src/b.rs", "use crate::c::C;\n");
        let three = [root, a, b, ("a/src/c.rs", "use super::a::A;\n")];
        assert_eq!(found(&three), ["a/src/a.rs:1"]);
        let chain = [root, a, b, ("a/src/c.rs", "use crate::d::D;\n")];
        assert_eq!(found(&chain), Vec::<String>::new());
    }

    #[test]
    fn folders_may_not_import_each_other() {
        let files = [
            ("a/src/lib.rs", "mod b;\nmod c;\n"),
            ("a/src/b/mod.rs", "mod one;\nmod two;\n"),
            ("a/src/b/one.rs", "use crate::c::C;\n"),
            ("a/src/b/two.rs", ""),
            ("a/src/c.rs", "use crate::b::two::Two;\n"),
        ];
        assert_eq!(found(&files), ["a/src/b/mod.rs:1"]);
        assert_eq!(found(&files[..4]), Vec::<String>::new());
    }
}
