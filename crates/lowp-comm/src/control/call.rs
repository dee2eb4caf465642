//! What a rank calls, so that an error can name ranks which call different things.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::error::list_of_ranks;

/// What ranks get of each other in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// What all bring, on every rank.
    AllGather,
    /// What the first rank brings, on every rank.
    Broadcast,
    /// What all bring, on the first rank.
    Gather,
    /// Whether every `ranks` ranks that follow each other bring the same.
    Equal { ranks: usize },
    /// The sum of f64 values in rank order.
    Sum,
    /// Groups of those that bring one color.
    Split,
}

/// One collective call. Ranks that meet must make equal ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    /// What is called, for example `all_gather` or `agree on the mesh`.
    pub(crate) name: String,
    /// Which one of that name, for example `forward of group 2`; empty if there is nothing to say.
    pub(crate) label: String,
    /// Number of items.
    pub(crate) items: usize,
    /// Lengths of all pieces, item by item.
    pub(crate) lengths: Vec<usize>,
    /// Whether it says that the rank is done with what the call before it brought.
    pub(crate) done: bool,
}

impl Call {
    /// A call without items.
    pub(crate) fn named(name: impl Into<String>) -> Self {
        Self::of_kind(Kind::AllGather, name)
    }

    /// The same of another kind.
    pub(crate) fn of_kind(kind: Kind, name: impl Into<String>) -> Self {
        Self {
            kind,
            name: name.into(),
            label: String::new(),
            items: 0,
            lengths: Vec::new(),
            done: false,
        }
    }

    /// The name and the label.
    fn title(&self) -> String {
        match self.label.as_str() {
            "" => self.name.clone(),
            label => format!("{} ({label})", self.name),
        }
    }

    /// The call in words; long lists are cut around `near`.
    pub(crate) fn describe(&self, near: usize) -> String {
        let name = self.title();
        if self.items == 0 {
            return name;
        }
        let from = near.saturating_sub(4).min(self.lengths.len());
        let to = (near + 5).min(self.lengths.len());
        let dots = |cut: bool| if cut { ".. " } else { "" };
        format!(
            "{name} of {} items, {} piece lengths {}{:?}{}",
            self.items,
            self.lengths.len(),
            dots(from > 0),
            &self.lengths[from..to],
            dots(to < self.lengths.len()).trim_end(),
        )
    }

    /// The call with all lengths.
    pub(crate) fn describe_whole(&self) -> String {
        format!(
            "{} of {} items, piece lengths {:?}",
            self.title(),
            self.items,
            self.lengths
        )
    }

    /// The calls in words, around the first length in which one differs from the first call.
    pub(crate) fn describe_all(calls: &[&Call]) -> Vec<String> {
        let near = calls.iter().find_map(|call| {
            let differs = |(a, b): (&usize, &usize)| a != b;
            call.lengths.iter().zip(&calls[0].lengths).position(differs)
        });
        let near = near.unwrap_or(0);
        calls.iter().map(|call| call.describe(near)).collect()
    }
}

/// Descriptions cut to the neighbourhood of their first difference.
pub(crate) fn excerpts(texts: &[&str]) -> Vec<String> {
    const BEFORE: usize = 40;
    const AFTER: usize = 160;
    let common = |text: &str| {
        let pairs = texts[0].chars().zip(text.chars());
        pairs.take_while(|(a, b)| a == b).count()
    };
    let shortest = texts.iter().map(|text| common(text)).min().unwrap_or(0);
    let from = shortest.saturating_sub(BEFORE);
    texts
        .iter()
        .map(|text| {
            let end = text.chars().count();
            let lead = if from > 0 { ".." } else { "" };
            let trail = if end > from + BEFORE + AFTER {
                ".."
            } else {
                ""
            };
            let middle: String = text.chars().skip(from).take(BEFORE + AFTER).collect();
            format!("{lead}{middle}{trail}")
        })
        .collect()
}

/// Most lines of an error that are about ranks.
const LINES: usize = 16;

/// At most [`LINES`] of them.
pub(crate) fn some_lines(mut lines: impl Iterator<Item = String>) -> Vec<String> {
    let mut some: Vec<String> = lines.by_ref().take(LINES).collect();
    match lines.count() {
        0 => {}
        more => some.push(format!("and {more} more")),
    }
    some
}

/// One line for each set of ranks that have the same text, as `ranks [0, 2]: text`.
pub(crate) fn by_ranks(texts: Vec<String>, members: &[usize]) -> Vec<String> {
    let mut sets: Vec<(String, Vec<usize>)> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for (text, &rank) in texts.into_iter().zip(members) {
        let at = *places.entry(text).or_insert_with_key(|text| {
            sets.push((text.clone(), Vec::new()));
            sets.len() - 1
        });
        sets[at].1.push(rank);
    }
    let line =
        |(text, ranks): (String, Vec<usize>)| format!("ranks {}: {text}", list_of_ranks(&ranks));
    some_lines(sets.into_iter().map(line))
}
