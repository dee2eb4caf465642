//! Options whose values are names.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// What a value is called, what it means, and the value.
pub(crate) type Named<T> = (&'static str, &'static str, T);

pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    table: &'static [Named<T>],
) -> impl TypedValueParser<Value = T> {
    let names = table
        .iter()
        .map(|&(name, what, _)| PossibleValue::new(name).help(what));
    PossibleValuesParser::new(names).try_map(|text| {
        let found = table.iter().find(|(name, ..)| *name == text);
        found.map(|(_, _, value)| *value).ok_or("no such name")
    })
}
