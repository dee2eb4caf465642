//! What the integration tests share.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::ops::Range;

use lowp_format::{AnyRecipe, Axis, BufferSpec, Code, Orientation, Recipe, Role, ScaleRule, Shape};

mod counting;
#[path = "../../../../lowp-comm/tests/all/common/ranks.rs"]
mod ranks;

pub(crate) use counting::*;

pub(crate) use lowp_shard::ShardError as Failure;
pub(crate) use ranks::*;

/// Every recipe, and each with one option at another value: those that quantize weights in another way.
pub(crate) fn variants() -> Vec<AnyRecipe> {
    let weights = |r: &AnyRecipe| (r.name(), r.quantizers(Role::Weight), r.source_rounding());
    let mut found: Vec<AnyRecipe> = Vec::new();
    for default in AnyRecipe::all() {
        let options = AnyRecipe::options_of(default.name()).expect("a recipe");
        let mut values = vec![default.options()];
        for option in options {
            // Numbers have no names.
            for text in (option.names)().iter().chain(&["3", "2.5"]) {
                let mut changed = default.options();
                changed.set(option.name, text);
                values.push(changed);
            }
        }
        let made = values
            .iter()
            .filter_map(|values| AnyRecipe::from_name(default.name(), values).ok());
        for recipe in made {
            if !found.iter().any(|other| weights(other) == weights(&recipe)) {
                found.push(recipe);
            }
        }
    }
    found
}

/// Whether flat slices of masters can be cast: not with four over six, which compares whole blocks.
pub(crate) fn casts_flat(recipe: &AnyRecipe) -> bool {
    let chooses = |o| match recipe.kernel(o).scale {
        ScaleRule::TwoLevel { four_over_six, .. } => four_over_six.is_on(),
        _ => false,
    };
    !Orientation::ALL.into_iter().any(chooses)
}

/// The entries of `rows` cut out of a full Compact buffer, bit by bit from the definition.
pub(crate) fn cut_rows(
    spec: &BufferSpec,
    full: Shape,
    bytes: &[u8],
    rows: Range<usize>,
) -> Vec<u8> {
    let local = full.with_rows(rows.len());
    let [outer, inner] = spec.entries(local);
    let at_full = |i: usize, j: usize| match spec.axes[0] {
        Axis::Rows => (rows.start / spec.tile[0] + i, j),
        Axis::Cols => (i, rows.start / spec.tile[1] + j),
    };
    let mut out = vec![0; spec.bytes(local)];
    for i in 0..outer {
        for j in 0..inner {
            let (fi, fj) = at_full(i, j);
            let from = (fi * spec.row_bytes(full), fj);
            move_entry(
                spec.code,
                bytes,
                from,
                &mut out,
                (i * spec.row_bytes(local), j),
            );
        }
    }
    out
}

/// The transpose of a buffer of `entries`, entry by entry.
pub(crate) fn transposed(code: Code, entries: [usize; 2], bytes: &[u8]) -> Vec<u8> {
    let [outer, inner] = entries;
    let mut out = vec![0; inner * code.bytes(outer)];
    for i in 0..outer {
        for j in 0..inner {
            let to = (j * code.bytes(outer), i);
            move_entry(code, bytes, (i * code.bytes(inner), j), &mut out, to);
        }
    }
    out
}

/// Copies one entry; positions are (byte of the row's start, entry in the row).
fn move_entry(code: Code, from: &[u8], at: (usize, usize), to: &mut [u8], dest: (usize, usize)) {
    if code.bits() == 4 {
        let nibble = from[at.0 + at.1 / 2] >> (4 * (at.1 % 2)) & 15;
        let byte = &mut to[dest.0 + dest.1 / 2];
        let shift = 4 * (dest.1 % 2);
        *byte = *byte & !(15 << shift) | nibble << shift;
    } else {
        let n = code.bytes(1);
        for b in 0..n {
            to[dest.0 + dest.1 * n + b] = from[at.0 + at.1 * n + b];
        }
    }
}
