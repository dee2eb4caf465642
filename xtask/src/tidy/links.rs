//! Links between documents lead to files and headings that are there.

use std::collections::BTreeSet;

use super::violation::Violation;
use crate::tree::{SourceFile, Tree};

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let pages = tree.files.iter().filter(|file| is_page(&file.path));
    pages
        .flat_map(|page| {
            links(&page.text).filter_map(|(line, link)| {
                let message = broken(tree, page, link)?;
                Some(Violation::new(&page.path, line, message))
            })
        })
        .collect()
}

fn is_page(path: &str) -> bool {
    path.ends_with(".md")
}

/// The targets of `[text](target)` with their lines, outside of code blocks.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().flat_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        let line = if code || fence { "" } else { line };
        let targets = line.split("](").skip(1);
        targets.filter_map(move |rest| Some((index + 1, rest.split_once(')')?.0)))
    })
}

/// Why a link of `page` leads nowhere. Links to other places are not followed.
fn broken(tree: &Tree, page: &SourceFile, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if path.is_empty() {
        page.path.clone()
    } else {
        resolve(&page.path, path)
    };
    let inside = |file: &&SourceFile| {
        file.path
            .strip_prefix(target.trim_end_matches('/'))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let top = target.split('/').next().unwrap_or_default();
    let known = target == top
        || tree
            .files
            .iter()
            .any(|file| file.path.starts_with(&format!("{top}/")));
    match tree.files.iter().find(inside) {
        // A folder that the tree does not read.
        None if !known => None,
        None => Some(format!("`{link}` leads to {target}, which is not there")),
        Some(file) if !anchor.is_empty() && is_page(&file.path) => (!anchors(&file.text)
            .contains(anchor))
        .then(|| format!("{} has no heading #{anchor}", file.path)),
        Some(_) => None,
    }
}

/// `path` as the page at `from` means it.
fn resolve(from: &str, path: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." => {}
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

/// What GitHub calls the headings of a page.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title
                .chars()
                .filter(|&c| c.is_alphanumeric() || " -_".contains(c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    fn found(link: &str) -> Vec<String> {
        let page = format!("# Page\n\nSee [it]({link}).\n\n```sh\n[no](code)\n```\n");
        places(&check(&Tree::of(&[
            ("docs/a.md", &page),
            ("docs/sub/b.md", "## What it is, in `short`\n"),
            ("README.md", "[a](docs/a.md)"),
        ])))
    }

    #[test]
    fn links_that_lead_somewhere_are_free() {
        for link in [
            "sub/b.md",
            "sub",
            "sub/b.md#what-it-is-in-short",
            "#page",
            "../README.md",
            "https://example.com/x.md",
            "../benches/table.py",
        ] {
            assert_eq!(found(link), [""; 0], "{link}");
        }
    }

    #[test]
    fn links_that_lead_nowhere_are_caught() {
        for link in [
            "b.md",
            "sub/c.md",
            "../LICENCE.md",
            "sub/b.md#what-it-was",
            "#pages",
        ] {
            assert_eq!(found(link), ["docs/a.md:3"], "{link}");
        }
    }
}
