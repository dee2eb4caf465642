//! Options whose values are names of what other crates define. Enums of the command line alone derive `ValueEnum`.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// What a value is called, what it means, and the value.
pub(crate) type Named<T> = (&'static str, &'static str, T);

pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    table: &'static [Named<T>],
) -> impl TypedValueParser<Value = T> {
    let named = |&(name, what, value): &Named<T>| (PossibleValue::new(name).help(what), value);
    parser(table.iter().map(named).collect())
}

/// One of `values` by the name that the crate which defines it gives it.
pub(crate) fn by_name<T: Copy + Send + Sync + 'static, const N: usize>(
    values: [T; N],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    parser(values.map(|value| (name(value).into(), value)).into())
}

fn parser<T: Copy + Send + Sync + 'static>(
    values: Vec<(PossibleValue, T)>,
) -> impl TypedValueParser<Value = T> {
    let names: Vec<_> = values.iter().map(|(name, _)| name.clone()).collect();
    PossibleValuesParser::new(names).try_map(move |text| {
        let found = values.iter().find(|(name, _)| name.get_name() == text);
        found.map(|(_, value)| *value).ok_or("no such name")
    })
}
