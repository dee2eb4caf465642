//! Patterns of names in options that take several, separated by commas.

use crate::output::shown;
use crate::usage::UsageError;
use globset::{Glob, GlobMatcher};
use std::collections::BTreeMap;

/// What the names of weights end in. Patterns may leave it out.
pub(crate) const WEIGHT: &str = ".weight";

/// What a pattern may match of `name`: all of it, or that of a weight without its end.
fn spellings(name: &str) -> impl Iterator<Item = &str> {
    [Some(name), name.strip_suffix(WEIGHT)]
        .into_iter()
        .flatten()
}

/// Whether `glob` matches `name`, or that of a weight without its end.
pub(crate) fn is_match(glob: &GlobMatcher, name: &str) -> bool {
    spellings(name).any(|name| glob.is_match(name))
}

/// The name of the weight of `layer`, which may be that already.
pub(crate) fn weight_of(layer: &str) -> String {
    format!("{}{WEIGHT}", layer.strip_suffix(WEIGHT).unwrap_or(layer))
}

/// For each of `names`, whether one of the `patterns` that `option` gave matches it.
pub(crate) fn matching(
    option: &str,
    patterns: &[String],
    names: &[&str],
    names_are: impl Fn() -> String,
) -> Result<Vec<bool>, UsageError> {
    let mut matched = vec![false; names.len()];
    for text in patterns.iter().flat_map(|text| split(text)) {
        let glob = Glob::new(text).map_err(|e| UsageError::new(format!("{option}: {e}")))?;
        let glob = glob.compile_matcher();
        let mut any = false;
        for (matched, name) in matched.iter_mut().zip(names) {
            if is_match(&glob, name) {
                (*matched, any) = (true, true);
            }
        }
        if !any {
            return Err(UsageError::new(format!(
                "{option} '{}' matches {}",
                shown(text),
                names_are()
            )));
        }
    }
    Ok(matched)
}

/// The groups that the `patterns` which `option` gave make of `names`, as numbers of these: names that one pattern matches and that
/// differ only in what its braces hold. `*` matches any characters, the same ones in all names of a group.
pub(crate) fn groups(
    option: &str,
    patterns: &[String],
    names: &[&str],
    names_are: impl Fn() -> String,
) -> Result<Vec<Vec<usize>>, UsageError> {
    let mut all: Vec<Vec<usize>> = Vec::new();
    let mut taken: BTreeMap<usize, &str> = BTreeMap::new();
    for text in patterns.iter().flat_map(|text| split(text)) {
        let wrong = |why: String| UsageError::new(format!("{option} '{}' {why}", shown(text)));
        if choices(text) > MOST {
            return Err(wrong(format!(
                "stands for more than {MOST} names; write fewer alternatives, or several patterns"
            )));
        }
        let alternatives = expand(text).ok_or_else(|| {
            wrong(
                "is not a valid pattern: use names, * and {a,b}, without braces inside braces"
                    .to_owned(),
            )
        })?;
        let mut found: BTreeMap<Vec<&str>, Vec<usize>> = BTreeMap::new();
        for alternative in &alternatives {
            let mut any = false;
            for (number, name) in names.iter().enumerate() {
                let mut spellings = spellings(name);
                if let Some(stars) = spellings.find_map(|name| starred(alternative, name)) {
                    any = true;
                    let group = found.entry(stars).or_default();
                    if !group.contains(&number) {
                        group.push(number);
                    }
                }
            }
            if !any {
                return Err(wrong(format!(
                    "includes '{}', which matches nothing: {}",
                    shown(alternative),
                    names_are()
                )));
            }
        }
        found.retain(|_, group| group.len() > 1);
        if found.is_empty() {
            return Err(wrong(format!(
                "matches no two names that differ only inside its braces, such as those of '*.{{q,k,v}}_proj.weight' in one layer: {}",
                names_are()
            )));
        }
        for mut group in found.into_values() {
            group.sort_unstable();
            for &number in &group {
                if let Some(other) = taken.insert(number, text) {
                    return Err(wrong(format!(
                        "puts '{}' into a second group, in addition to the group of '{}'; a name can be in only one group",
                        shown(names[number]),
                        shown(other)
                    )));
                }
            }
            all.push(group);
        }
    }
    // The same groups are the same, however they were written.
    all.sort_unstable();
    Ok(all)
}

/// Most names that the braces of a pattern stand for.
const MOST: usize = 4096;

/// How many names the braces of `text` stand for, at least.
fn choices(text: &str) -> usize {
    let braces = text.split('{').skip(1);
    let each = braces.map(|rest| 1 + rest.split('}').next().unwrap_or("").matches(',').count());
    each.fold(1, usize::saturating_mul)
}

/// The patterns without braces that `text` stands for; `None` where braces lie in each other or do not close, or for other signs of
/// patterns.
fn expand(text: &str) -> Option<Vec<String>> {
    if text.contains(['?', '[', ']', '\\']) {
        return None;
    }
    let Some((before, rest)) = text.split_once('{') else {
        return (!text.contains('}')).then(|| vec![text.to_owned()]);
    };
    let (inside, behind) = rest.split_once('}')?;
    if before.contains('}') || inside.contains('{') {
        return None;
    }
    let behind = expand(behind)?;
    let each = inside.split(',').flat_map(|choice| {
        let with = move |behind: &String| format!("{before}{choice}{behind}");
        behind.iter().map(with).collect::<Vec<_>>()
    });
    Some(each.collect())
}

/// What the stars of `pattern`, which has no other signs, stand for in `name`, each for as little as it can but the last.
fn starred<'n>(pattern: &str, name: &'n str) -> Option<Vec<&'n str>> {
    let mut parts = pattern.split('*');
    let mut rest = name.strip_prefix(parts.next()?)?;
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty().then(Vec::new);
    };
    let mut stars = Vec::new();
    for part in parts {
        let (star, behind) = rest.split_once(part)?;
        stars.push(star);
        rest = behind;
    }
    stars.push(rest.strip_suffix(last)?);
    Some(stars)
}

/// The patterns of `text`, which commas outside of braces separate.
fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0usize;
    text.split(move |c: char| {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_braces_belong_to_the_pattern() {
        let names = ["block0.fc", "block0.out", "block1.fc", "block1.qkv"];
        let matched = |text: &str| {
            let found = matching("--keep", &[text.to_owned()], &names, || {
                "nothing".to_owned()
            });
            found.map_err(|error| error.to_string())
        };
        assert_eq!(
            matched("block0.{fc,out}"),
            Ok(vec![true, true, false, false])
        );
        assert_eq!(
            matched("*.qkv,block0.{fc,x}"),
            Ok(vec![true, false, false, true])
        );
        assert_eq!(
            matched("*.fc,y*"),
            Err("--keep 'y*' matches nothing".to_owned())
        );
        assert!(matched("{a").is_err_and(|error| error.starts_with("--keep: ")));
    }

    #[test]
    fn groups_differ_in_braces_alone() {
        let layer = |n: usize| {
            ["q", "k", "v", "o"].map(|kind| format!("layers.{n}.attn.{kind}_proj.weight"))
        };
        let names: Vec<String> = (0..3).flat_map(layer).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let made = |text: &str| {
            let found = groups("--group", &[text.to_owned()], &names, || "none".to_owned());
            found.map_err(|error| error.to_string())
        };
        let expected = vec![vec![0, 1, 2], vec![4, 5, 6], vec![8, 9, 10]];
        assert_eq!(made("*.{q,k,v}_proj.weight"), Ok(expected.clone()));
        assert_eq!(made("layers.*.attn.{v,q,k}_proj.*"), Ok(expected));
        assert_eq!(
            made("layers.{0,2}.attn.{q,o}_proj.weight"),
            Ok(vec![vec![0, 3, 8, 11]])
        );
        assert_eq!(
            made("*0.*.{q,k}_proj.weight,*1.*.{v,o}_proj.weight"),
            Ok(vec![vec![0, 1], vec![6, 7]])
        );
        for (text, expected) in [
            ("*.q_proj.weight", "matches no two names"),
            ("*.{q,k,x", "is not a valid pattern"),
            (
                "*.{q,k,x}_proj.weight",
                "includes '*.x_proj.weight', which matches nothing: none",
            ),
            (&*"{a,b}".repeat(30), "stands for more than 4096 names"),
            ("*.{q,{k,v}}*", "is not a valid pattern"),
            ("*.[qk]_proj.weight", "is not a valid pattern"),
            (
                "*.{q,k}_proj.weight,*.{k,v}_proj.weight",
                "puts 'layers.0.attn.k_proj.weight' into a second group",
            ),
        ] {
            assert!(
                made(text).is_err_and(|error| error.contains(expected)),
                "{text}"
            );
        }
    }

    /// A pattern may leave out what the names of weights end in; others are matched as they are.
    #[test]
    fn weights_are_matched_with_their_end_and_without() {
        let names = ["a.q.weight", "a.k.weight", "a.norm", "a.q.bias"];
        let matched = |text: &str| {
            let none = || "nothing".to_owned();
            matching("--keep", &[text.to_owned()], &names, none).ok()
        };
        for (one, other, expected) in [
            ("*.q", "*.q.weight", [true, false, false, false]),
            ("a.{q,k}", "a.{q,k}.weight", [true, true, false, false]),
            ("*.[qk]", "*.[qk].weight", [true, true, false, false]),
        ] {
            assert_eq!(matched(one), Some(expected.to_vec()), "{one}");
            assert_eq!(matched(other), Some(expected.to_vec()), "{other}");
        }
        assert_eq!(matched("*.weight"), Some(vec![true, true, false, false]));
        assert_eq!(matched("a.norm.weight"), None);
        assert_eq!(weight_of("a.q"), names[0]);
        assert_eq!(weight_of(names[0]), names[0]);
        for text in ["*.{q,k}", "*.{q,k}.weight", "a.{q,k}*"] {
            let found = groups("--group", &[text.to_owned()], &names[..2], String::new);
            assert_eq!(found.expect("groups"), [[0, 1]], "{text}");
        }
    }

    /// An alternative that begins another one takes nothing from it.
    #[test]
    fn every_alternative_is_tried() {
        let names = ["a1.w", "a11.w", "a2.w", "a1.u"];
        let made = |text: &str| groups("--group", &[text.to_owned()], &names, || "none".to_owned());
        for text in ["a{1,2,11}.w", "a{11,1,2}.w"] {
            assert_eq!(made(text).expect("groups"), [[0, 1, 2]]);
        }
        assert_eq!(made("a{1,2,11}*.w").expect("groups"), [[0, 1, 2]]);
    }

    proptest::proptest! {
        /// What the stars stand for, put back into the pattern, is the name.
        #[test]
        fn stars_stand_for_parts_of_the_name(pattern in "[ab*]{0,6}", name in "[ab]{0,8}") {
            let glob = Glob::new(&pattern).expect("a pattern").compile_matcher();
            let found = starred(&pattern, &name);
            proptest::prop_assert_eq!(found.is_some(), glob.is_match(&name));
            if let Some(stars) = found {
                let mut stars = stars.into_iter();
                let put = |c: char| match c {
                    '*' => stars.next().unwrap_or("?").to_owned(),
                    c => c.to_string(),
                };
                proptest::prop_assert_eq!(pattern.chars().map(put).collect::<String>(), name);
            }
        }
    }
}
