//! Patterns of the names of tensors: which names they match ([`matching`]), and which names differ only in their braces ([`groups`]).
//! A text may hold several, separated by commas.

use crate::export::run_as_one;
use crate::text::shown;
use globset::{Glob, GlobMatcher};
use std::collections::BTreeMap;
use thiserror::Error;

/// What is wrong with a pattern.
#[derive(Debug, Error)]
pub enum PatternError {
    /// It is none.
    #[error("{0}")]
    Syntax(String),
    /// It is of no use for these names.
    #[error("'{pattern}' {why}")]
    NoUse {
        /// The pattern as it is shown.
        pattern: String,
        /// Why.
        why: String,
    },
}

/// One pattern, with its text. `*` matches any characters.
#[derive(Clone, Debug)]
pub struct Pattern {
    /// The text.
    pub text: String,
    glob: GlobMatcher,
}

impl Pattern {
    /// The pattern that `text` is.
    ///
    /// # Errors
    /// It is none.
    pub fn new(text: &str) -> Result<Self, PatternError> {
        let glob = Glob::new(text).map_err(|e| PatternError::Syntax(e.to_string()))?;
        Ok(Self {
            text: text.to_owned(),
            glob: glob.compile_matcher(),
        })
    }

    /// Whether it matches `name`, or that of a weight without its end.
    pub fn matches(&self, name: &str) -> bool {
        spellings(name).any(|name| self.glob.is_match(name))
    }

    fn no_use(text: &str, why: String) -> PatternError {
        PatternError::NoUse {
            pattern: shown(text).to_string(),
            why,
        }
    }
}

/// What the names of weights end in. Patterns may leave it out.
const WEIGHT: &str = ".weight";

/// What a pattern may match of `name`: all of it, or that of a weight without its end.
fn spellings(name: &str) -> impl Iterator<Item = &str> {
    [Some(name), name.strip_suffix(WEIGHT)]
        .into_iter()
        .flatten()
}

/// The name of the weight of `layer`, which may be that already.
pub fn weight_of(layer: &str) -> String {
    format!("{}{WEIGHT}", layer.strip_suffix(WEIGHT).unwrap_or(layer))
}

/// For each of `names`, whether one of the `patterns` matches it. `names_are` says in an error what there is.
///
/// # Errors
/// A pattern that is none, or that matches no name.
pub fn matching(
    patterns: &[String],
    names: &[&str],
    names_are: impl Fn() -> String,
) -> Result<Vec<bool>, PatternError> {
    let mut matched = vec![false; names.len()];
    for text in patterns.iter().flat_map(|text| split(text)) {
        let pattern = Pattern::new(text)?;
        let mut any = false;
        for (matched, name) in matched.iter_mut().zip(names) {
            if pattern.matches(name) {
                (*matched, any) = (true, true);
            }
        }
        if !any {
            return Err(Pattern::no_use(text, format!("matches {}", names_are())));
        }
    }
    Ok(matched)
}

/// The groups that the `patterns` make of `names`, as numbers of these: names that one pattern matches and that
/// differ only in what its braces hold. `*` matches any characters, the same ones in all names of a group.
///
/// # Errors
/// A pattern that is none or makes no group, or groups that have a name in common.
pub fn groups(
    patterns: &[String],
    names: &[&str],
    names_are: impl Fn() -> String,
) -> Result<Vec<Vec<usize>>, PatternError> {
    let mut all: Vec<Vec<usize>> = Vec::new();
    let mut taken: BTreeMap<usize, &str> = BTreeMap::new();
    for text in patterns.iter().flat_map(|text| split(text)) {
        let wrong = |why: String| Pattern::no_use(text, why);
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

/// What stands for the layers of [`run_as_one`], and for no groups. No pattern is one of these: a pattern of groups has braces.
const AUTO: &str = "auto";
const NONE: &str = "none";

/// Whether `texts` of [`amax_groups`] are patterns, which must find something.
pub fn are_patterns(texts: &[String]) -> bool {
    !matches!(texts, [] | [_] if texts.iter().all(|text| text == AUTO || text == NONE))
}

/// The groups of `names` that have one amax, as numbers of these: those of patterns, with `auto` or no text the layers that inference
/// engines run as one, and with `none` no groups.
///
/// # Errors
/// As [`groups`].
pub fn amax_groups(
    texts: &[String],
    names: &[&str],
    names_are: impl Fn() -> String,
) -> Result<Vec<Vec<usize>>, PatternError> {
    if are_patterns(texts) {
        return groups(texts, names, names_are);
    }
    match texts.iter().any(|text| text == NONE) {
        true => Ok(Vec::new()),
        false => Ok(run_as_one(names)),
    }
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
    let (inside, after) = rest.split_once('}')?;
    if before.contains('}') || inside.contains('{') {
        return None;
    }
    let after = expand(after)?;
    let each = inside.split(',').flat_map(|choice| {
        let with = move |after: &String| format!("{before}{choice}{after}");
        after.iter().map(with).collect::<Vec<_>>()
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
        let (star, after) = rest.split_once(part)?;
        stars.push(star);
        rest = after;
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
            let found = matching(&[text.to_owned()], &names, || "nothing".to_owned());
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
        assert_eq!(matched("*.fc,y*"), Err("'y*' matches nothing".to_owned()));
        assert!(
            matching(&["{a".to_owned()], &names, String::new)
                .is_err_and(|error| matches!(error, PatternError::Syntax(_)))
        );
    }

    #[test]
    fn groups_differ_in_braces_alone() {
        let layer = |n: usize| {
            ["q", "k", "v", "o"].map(|kind| format!("layers.{n}.attn.{kind}_proj.weight"))
        };
        let names: Vec<String> = (0..3).flat_map(layer).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let made = |text: &str| {
            let found = groups(&[text.to_owned()], &names, || "none".to_owned());
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
            matching(&[text.to_owned()], &names, none).ok()
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
            let found = groups(&[text.to_owned()], &names[..2], String::new);
            assert_eq!(found.expect("groups"), [[0, 1]], "{text}");
        }
    }

    /// An alternative that begins another one takes nothing from it.
    #[test]
    fn every_alternative_is_tried() {
        let names = ["a1.w", "a11.w", "a2.w", "a1.u"];
        let made = |text: &str| groups(&[text.to_owned()], &names, || "none".to_owned());
        for text in ["a{1,2,11}.w", "a{11,1,2}.w"] {
            assert_eq!(made(text).expect("groups"), [[0, 1, 2]]);
        }
        assert_eq!(made("a{1,2,11}*.w").expect("groups"), [[0, 1, 2]]);
    }

    #[test]
    fn layers_of_one_module_are_a_group() {
        let names = [
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            "model.layers.0.mlp.experts.0.up_proj.weight",
            "model.layers.0.mlp.experts.1.up_proj.weight",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.0.self_attn.o_proj.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.1.mlp.gate_up_proj.weight",
            "model.layers.1.self_attn.q_proj.weight",
            "model.layers.1.block_sparse_moe.experts.3.w1.weight",
            "model.layers.1.block_sparse_moe.experts.3.w2.weight",
            "model.layers.1.block_sparse_moe.experts.3.w3.weight",
            "model.layers.1.self_attn.v_proj",
            "q_proj",
            "v_proj.weight",
        ];
        let expected = [
            vec![0, 1],
            vec![3, 5],
            vec![7, 11],
            vec![8, 10],
            vec![12, 13],
        ];
        let none = || String::new();
        for texts in [&[][..], &["auto"]] {
            let texts: Vec<String> = texts.iter().copied().map(str::to_owned).collect();
            assert_eq!(amax_groups(&texts, &names, none).expect("groups"), expected);
        }
        let texts = ["none".to_owned()];
        assert!(
            amax_groups(&texts, &names, none)
                .expect("groups")
                .is_empty()
        );
        // Beside others they are patterns.
        for texts in ["auto,none", "auto,*.{q,k}_proj"] {
            assert!(amax_groups(&[texts.to_owned()], &names, none).is_err());
        }
        let texts = ["*.{q,v}_proj".to_owned()];
        assert_eq!(
            amax_groups(&texts, &names, none).expect("groups"),
            [[7, 11]]
        );
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
