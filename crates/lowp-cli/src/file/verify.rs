//! `lowp verify`: whether two models hold the same bytes, and where they differ first.

use super::fields::{Content, Field};
use super::meta::{self, Quantized};
use super::model::{Model, PIECE, Tensor};
use super::progress::Progress;
use super::ranks;
use super::refuse::refuse;
use anyhow::{Result, bail};
use lowp_format::{Code, Form, Recipe, ScaleLayout};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Compare two models byte by byte
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp verify q.safetensors gathered.safetensors
  lowp verify ranks other-ranks

Exit code: 0 where every tensor has the same dtype, shape and bytes in both; 1 at the first
difference, which is named with its tensor, block and byte; 2 where an input cannot be read.")]
pub(crate) struct Args {
    /// A .safetensors file, the .safetensors.index.json of a sharded model, or a folder of rank files
    a: PathBuf,

    /// The other
    b: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// The models differ, or cannot be read.
pub(super) fn main(args: &Args) -> Result<()> {
    let (a, b) = (open(&args.a)?, open(&args.b)?);
    if args.a.is_dir() != args.b.is_dir() {
        return Err(refuse(
            "one is a folder of rank files and the other is not; gather the folder with `lowp unshard` first",
        ));
    }
    if a.len() != b.len() {
        bail!(
            "{} has {} ranks and {} has {}",
            args.a.display(),
            a.len(),
            args.b.display(),
            b.len()
        );
    }
    let bytes: usize = a
        .iter()
        .flat_map(Model::tensors)
        .map(|tensor| tensor.len())
        .sum();
    let progress = Progress::new("verify", bytes);
    for (a, b) in a.iter().zip(&b) {
        compare(a, b, &progress)?;
    }
    drop(progress);
    let tensors: usize = a.iter().map(|model| model.tensors().count()).sum();
    crate::output::print(&format!("equal: {tensors} tensors, {bytes} bytes\n"))
}

fn open(path: &Path) -> Result<Vec<Model>> {
    if path.is_dir() {
        ranks::open(path)
    } else {
        Ok(vec![Model::open(path)?])
    }
}

/// Stops at the first difference, in the order of names.
fn compare(a: &Model, b: &Model, progress: &Progress) -> Result<()> {
    let (path_a, path_b) = (a.path().display(), b.path().display());
    // Also refuses quantized tensors that lack a part.
    let quantized = [meta::quantized(a)?, meta::quantized(b)?];
    let names: BTreeSet<&str> = a
        .tensors()
        .chain(b.tensors())
        .map(|tensor| tensor.name)
        .collect();
    for name in names {
        let (x, y) = match (a.get(name), b.get(name)) {
            (Some(x), Some(y)) => (x, y),
            (Some(_), None) => bail!("'{name}' is in {path_a} and not in {path_b}"),
            _ => bail!("'{name}' is in {path_b} and not in {path_a}"),
        };
        if (x.dtype, x.shape) != (y.dtype, y.shape) {
            bail!(
                "'{name}' is {} {:?} in {path_a} and {} {:?} in {path_b}",
                x.dtype,
                x.shape,
                y.dtype,
                y.shape
            );
        }
        if let Some((at, p, q)) = first_difference(&x, &y, progress)? {
            let place = place(&quantized[0], name, at, p ^ q);
            bail!(
                "'{name}' differs first at byte {at}{place}: {p:#04x} in {path_a}, {q:#04x} in {path_b}"
            );
        }
    }
    for (name, x) in &quantized[0] {
        if let Some(y) = quantized[1].get(name).filter(|y| y.text != x.text) {
            let (x, y) = (
                serde_json::to_string(&x.text)?,
                serde_json::to_string(&y.text)?,
            );
            bail!(
                "'{name}' has the same bytes and another meaning: {x} in {path_a}, {y} in {path_b}"
            );
        }
    }
    Ok(())
}

/// The first byte that differs, with its values.
fn first_difference(
    a: &Tensor<'_>,
    b: &Tensor<'_>,
    progress: &Progress,
) -> Result<Option<(usize, u8, u8)>> {
    for start in (0..a.len()).step_by(PIECE) {
        let range = start..a.len().min(start + PIECE);
        let (x, y) = (a.bytes_at(range.clone())?, b.bytes_at(range)?);
        if *x != *y
            && let Some(at) = x.iter().zip(y.iter()).position(|(x, y)| x != y)
        {
            return Ok(Some((start + at, x[at], y[at])));
        }
        progress.add(x.len());
    }
    Ok(None)
}

/// The element and block of byte `at` of the field called `name`, in words.
fn place(tensors: &BTreeMap<String, Quantized>, name: &str, at: usize, changed: u8) -> String {
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
    match tensor.recipe.kernel().block(*orientation) {
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
    let [_, inner] = layout.padded;
    let [i, j] = match layout.form {
        Form::Compact | Form::Padded => {
            let width = layout.code.bytes(inner).max(1);
            let within = at % width;
            let entry = match layout.code {
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
    (i < layout.entries[0] && j < layout.entries[1]).then(|| layout.element(i, j))
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
                    let layout = ScaleLayout::new(spec, shape, o, form).expect("a layout");
                    let mut found = 0;
                    for at in 0..layout.bytes() {
                        if let Some([row, col]) = element(&layout, at, 0xFF) {
                            assert_eq!(layout.offset_of([row, col]), at, "{form:?}");
                            found += 1;
                        }
                    }
                    assert_eq!(found, layout.entries[0] * layout.entries[1], "{form:?}");
                }
            }
        }
    }
}
