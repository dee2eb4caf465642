//! The page of `--report`.

use super::{path, recipes, stdout, tiny};
use std::fs;

fn page(args: &[&str]) -> String {
    let dir = tempfile::tempdir().expect("a folder");
    let file = path(&dir.path().join("out.html"));
    let args = [args, &["--report", &file]].concat();
    stdout(&tiny(&args));
    fs::read_to_string(file).expect("the file of --report")
}

/// The tags of a page in order, `/` in front of closing ones. Panics if they are not nested properly.
fn tags(page: &str) -> Vec<String> {
    const VOID: [&str; 2] = ["meta", "!doctype"];
    let (mut open, mut seen) = (Vec::new(), Vec::new());
    let mut rest = page;
    while let Some((text, tail)) = rest.split_once('<') {
        assert!(
            !text.contains('>') || open.last() == Some(&"style"),
            "a stray > in {text}"
        );
        let (tag, tail) = tail.split_once('>').expect("a closed tag");
        assert!(
            tag.matches('"').count().is_multiple_of(2),
            "an open quote in <{tag}>"
        );
        let name = tag
            .trim_end_matches('/')
            .split_whitespace()
            .next()
            .expect("a name");
        if let Some(closed) = name.strip_prefix('/') {
            assert_eq!(open.pop(), Some(closed), "</{closed}>");
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
        }
        seen.push(name.to_owned());
        rest = tail;
    }
    assert!(open.is_empty(), "never closed: {open:?}");
    seen
}

#[test]
fn self_contained_and_well_formed() {
    let page = page(&["--compare", "all", "--steps", "4", "--seeds", "2"]);
    assert!(page.starts_with("<!doctype html>"));
    let outside = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for reference in [
        "http:", "https:", "src=", "href=", "url(", "@import", "<script", "<link",
    ] {
        assert!(!outside.contains(reference), "{reference}");
    }
    let tags = tags(&page);
    let count = |name: &str| tags.iter().filter(|tag| *tag == name).count();
    let runs = count("tr") - 1;
    assert_eq!(runs, recipes().len() - 1, "all but bf16");
    // The loss of each, the gap of all but the baseline, and two bars of each.
    assert_eq!(count("polyline"), runs + runs - 1);
    assert_eq!(count("rect"), 2 * runs);
    for word in ["NaN", "inf ", "undefined"] {
        assert!(!page.contains(word), "{word}");
    }
    assert!(page.contains("prefers-color-scheme: dark"));
}

#[test]
fn one_run_has_no_gap() {
    let page = page(&["--recipe", "fp32", "--steps", "1"]);
    assert_eq!(
        tags(&page).iter().filter(|tag| *tag == "polyline").count(),
        1
    );
    assert!(!page.contains("Gap of the training loss"));
}
