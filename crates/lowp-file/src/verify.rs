//! Whether two models hold the same bytes, and where they differ first.

use crate::difference::{Byte, Pair};
use crate::error::{FileError, Result};
use crate::meta::{self, Quantized};
use crate::model::{Model, PIECE, Tensor};
use crate::progress::Progress;
use crate::text::shown;
use std::collections::{BTreeMap, BTreeSet};

pub use crate::difference::Equal;
pub use crate::verify_source::verify_source;

/// Compares two models byte by byte, and what their metadata say.
///
/// # Errors
/// [`FileError::Differ`] at the first difference, in the order of names; a model that cannot be read, or was changed meanwhile.
pub fn verify(a: &Model, b: &Model, progress: &dyn Progress) -> Result<Equal> {
    let bytes: usize = a.tensors().map(|tensor| tensor.len()).sum();
    progress.begin(bytes);
    a.steady(b.steady(compare(a, b, progress)))?;
    Ok(Equal {
        tensors: a.tensors().count(),
        bytes,
    })
}

fn compare(a: &Model, b: &Model, progress: &dyn Progress) -> Result<()> {
    // Also rejects quantized tensors that lack a part.
    let quantized = [meta::quantized(a)?, meta::quantized(b)?];
    let pair = Pair {
        a: &a.path().display().to_string(),
        b: &b.path().display().to_string(),
        tensors: &quantized[0],
    };
    let names: BTreeSet<&str> = a
        .tensors()
        .chain(b.tensors())
        .map(|tensor| tensor.name)
        .collect();
    for name in names {
        let (x, y) = match (a.get(name), b.get(name)) {
            (Some(x), Some(y)) => (x, y),
            (Some(_), None) => return Err(pair.only_in_a(name)),
            _ => return Err(pair.only_in_b(name)),
        };
        if (x.dtype, x.shape) != (y.dtype, y.shape) {
            return Err(pair.kinds(name, (x.dtype, x.shape), (y.dtype, y.shape)));
        }
        if let Some(byte) = first_difference(&x, &y, progress)? {
            return Err(pair.bytes(name, byte));
        }
    }
    let names: BTreeSet<&String> = quantized.iter().flat_map(BTreeMap::keys).collect();
    for name in names {
        let text = |of: &BTreeMap<String, Quantized>| -> Result<Option<String>> {
            let found = of
                .get(name)
                .map(|tensor| serde_json::to_string(&tensor.text));
            Ok(found.transpose()?)
        };
        let shown = shown(name);
        let lacks = |with: &str, without: &str| {
            FileError::Differ(format!(
                "'{shown}' has the same bytes, but only {with} says what they mean: {without} lacks its metadata; \
                 copy both, or write that file again"
            ))
        };
        match (text(&quantized[0])?, text(&quantized[1])?) {
            (Some(x), Some(y)) if x != y => {
                return Err(FileError::Differ(format!(
                    "'{shown}' has the same bytes and another meaning: {x} in {}, {y} in {}",
                    pair.a, pair.b
                )));
            }
            (Some(_), None) => return Err(lacks(pair.a, pair.b)),
            (None, Some(_)) => return Err(lacks(pair.b, pair.a)),
            _ => {}
        }
    }
    Ok(())
}

/// The first byte that differs.
fn first_difference(
    a: &Tensor<'_>,
    b: &Tensor<'_>,
    progress: &dyn Progress,
) -> Result<Option<Byte>> {
    for start in (0..a.len()).step_by(PIECE) {
        let range = start..a.len().min(start + PIECE);
        let (x, y) = (a.bytes_at(range.clone())?, b.bytes_at(range)?);
        if let Some(byte) = Byte::first(start, &x, &y) {
            return Ok(Some(byte));
        }
        progress.add(x.len());
    }
    Ok(None)
}
