//! The first difference between two models, in words, or [`Equal`].

use crate::error::FileError;
use crate::fields::{Content, Field};
use crate::meta::Quantized;
use crate::text::{dims, shown};
use lowp_format::{Code, Form, Recipe, ScaleLayout};
use safetensors::Dtype;
use std::collections::BTreeMap;

/// Models that are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Equal {
    /// Tensors that were compared.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: usize,
}

pub(crate) type Kind<'a> = (Dtype, &'a [usize]);

/// Two models by the names that messages give them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair<'a> {
    pub(crate) a: &'a str,
    pub(crate) b: &'a str,
    /// The quantized tensors of the first.
    pub(crate) tensors: &'a BTreeMap<String, Quantized>,
}

impl Pair<'_> {
    /// A tensor that one model has and the other lacks.
    pub(crate) fn only_in(&self, name: &str, with: &str, without: &str) -> FileError {
        let name = shown(name);
        FileError::Differ(format!("'{name}' is in {with} and not in {without}"))
    }

    pub(crate) fn kinds(&self, name: &str, a: Kind<'_>, b: Kind<'_>) -> FileError {
        FileError::Differ(format!(
            "'{}' is {} {} in {} and {} {} in {}",
            shown(name),
            a.0,
            dims(a.1),
            self.a,
            b.0,
            dims(b.1),
            self.b
        ))
    }

    pub(crate) fn bytes(&self, name: &str, byte: Byte) -> FileError {
        let Byte { at, a, b } = byte;
        let position = position(self.tensors, name, at, a ^ b);
        FileError::Differ(format!(
            "'{}' differs first at byte {at}{position}: {a:#04x} in {}, {b:#04x} in {}",
            shown(name),
            self.a,
            self.b
        ))
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Byte {
    pub(crate) at: usize,
    a: u8,
    b: u8,
}

impl Byte {
    /// The first in two pieces of one length that begin at byte `start`.
    pub(crate) fn first(start: usize, a: &[u8], b: &[u8]) -> Option<Self> {
        if a == b {
            return None;
        }
        let at = a.iter().zip(b).position(|(a, b)| a != b)?;
        Some(Self {
            at: start + at,
            a: a[at],
            b: b[at],
        })
    }
}

/// The element and block of byte `at` of the field called `name`, in words.
fn position(tensors: &BTreeMap<String, Quantized>, name: &str, at: usize, changed: u8) -> String {
    let found = tensors.values().find_map(|tensor| {
        let field = tensor
            .fields
            .iter()
            .find(|field| field.name(&tensor.name) == name)?;
        Some((tensor, field))
    });
    let Some((
        tensor,
        Field {
            content: Content::Buffer { orientation, .. },
            layout: Some(layout),
            ..
        },
    )) = found
    else {
        return String::new();
    };
    let Some([row, col]) = element(layout, at, changed) else {
        return " (padding)".to_owned();
    };
    match tensor.recipe.kernel(*orientation).block {
        Some([rows, cols]) => format!(
            " (row {row}, column {col}, in block {},{} of {rows}x{cols})",
            row / rows,
            col / cols
        ),
        None => format!(" (row {row}, column {col})"),
    }
}

/// The first logical element that byte `at` tells of; `None` for padding. `changed` are its bits in question.
fn element(layout: &ScaleLayout, at: usize, changed: u8) -> Option<[usize; 2]> {
    let [_, inner] = layout.padded();
    let [i, j] = match layout.form() {
        Form::Compact | Form::Padded => {
            let width = layout.code().bytes(inner).max(1);
            let within = at % width;
            let entry = match layout.code() {
                Code::E2M1 => within * 2 + usize::from(changed & 0xF == 0),
                code => within / code.bytes(1),
            };
            [at / width, entry]
        }
        Form::Swizzled => {
            let tiles = (inner / 4).max(1);
            let (tile, within) = (at / 512, at % 512);
            let i = tile / tiles * 128 + within % 16 / 4 * 32 + within / 16;
            [i, tile % tiles * 4 + within % 4]
        }
    };
    (i < layout.entries()[0] && j < layout.entries()[1]).then(|| layout.element(i, j))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_format::{AnyRecipe, Orientation, Part, Shape, Usage};

    #[test]
    fn every_entry_of_every_form_is_found_at_its_byte() {
        let shape = Shape::new(300, 320);
        for recipe in AnyRecipe::low_precision() {
            for spec in recipe
                .buffers(Usage::BOTH)
                .iter()
                .filter(|spec| spec.key.part == Part::BlockScale)
            {
                for form in Form::ALL {
                    let o = spec
                        .key
                        .usage
                        .orientations()
                        .next()
                        .unwrap_or(Orientation::Rowwise);
                    let Ok(layout) = ScaleLayout::new(spec, shape, o, form) else {
                        assert!(form == Form::Swizzled && spec.code == Code::F32);
                        continue;
                    };
                    let (mut found, width) = (0, layout.code().bytes(1));
                    for at in (0..layout.bytes()).step_by(width) {
                        if let Some([row, col]) = element(&layout, at, 0xFF) {
                            assert_eq!(layout.offset_of([row, col]) * width, at, "{form:?}");
                            found += 1;
                        }
                    }
                    assert_eq!(found, layout.entries()[0] * layout.entries()[1], "{form:?}");
                }
            }
        }
    }
}
