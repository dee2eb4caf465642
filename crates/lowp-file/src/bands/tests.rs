//! Bands against casts of all rows.

use super::*;
use crate::dtypes::Dtypes;
use crate::fields::{self, Content};
use crate::interchange::hub::Hub;
use crate::model::Model;
use crate::out::Out;
use crate::select::{Choices, Setup};
use crate::source::load;
use lowp_format::{AnyRecipe, Form, Part, RecipeOptions, Usage};
use lowp_kernels::Cpu;
use lowp_shard::quantize;
use std::fs;
use std::path::Path;

/// A file with one tensor of values of all magnitudes, which begin at a multiple of their size, or not.
fn write_model(path: &Path, dtype: &str, shape: Shape, aligned: bool) -> Result<()> {
    let width = if dtype == "F32" { 4 } else { 2 };
    let len = shape.elements() * width;
    let header = format!(
        "{{\"t\":{{\"dtype\":\"{dtype}\",\"shape\":[{},{}],\"data_offsets\":[0,{len}]}}}}",
        shape.rows, shape.cols
    );
    let end = header.len().next_multiple_of(8) + usize::from(!aligned);
    let header = format!("{header:end$}");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    let random = |i: u64| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 & 0xbf;
    file.extend((0..len as u64).map(random));
    Ok(fs::write(path, file)?)
}

/// All fields, put together of the parts of every band. Returns the number of bands, too.
fn written(bands: &Bands<'_, Cpu>) -> Result<(Vec<Vec<u8>>, usize)> {
    let of = |field: &Field| vec![0xee; field.bytes()];
    let mut fields: Vec<Vec<u8>> = bands.cast.fields.iter().map(of).collect();
    for number in 0..bands.bands() {
        let band = bands.band(number)?.expect("a band");
        for (part, field) in fields.iter_mut().enumerate() {
            let Some(region) = band.region(part) else {
                continue;
            };
            let mut done = 0;
            band.write(part, &mut |piece| {
                for (range, at) in region.pieces(done, piece.len()) {
                    field[at..at + range.len()].copy_from_slice(&piece[range]);
                }
                done += piece.len();
                Ok(())
            })?;
        }
    }
    Ok((fields, bands.bands()))
}

/// Bands give the bytes of one cast of all rows: for every recipe, usage and form, of values in the pages of the file and of copies.
#[test]
fn bands_are_the_whole() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("in.safetensors");
    let (mut cut, mut alone) = (0, 0);
    let tall = Shape::new(1300, 256);
    // Bands of few rows, of which some have no room for a second one.
    let wide = Shape::new(200, 8192);
    for (dtype, aligned, shape) in [
        ("BF16", true, tall),
        ("F32", true, tall),
        ("F16", true, tall),
        ("BF16", false, tall),
        ("BF16", true, wide),
        ("BF16", false, wide),
    ] {
        write_model(&path, dtype, shape, aligned)?;
        let model = Model::open(&path)?;
        let tensor = model.tensors().next().expect("a tensor");
        let usages = [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH];
        let ways = usages
            .into_iter()
            .flat_map(|usage| Form::ALL.map(|form| (usage, form)));
        let ways: Vec<_> = ways.collect();
        let mut recipes = AnyRecipe::low_precision();
        // Two-level scales of rows and of columns.
        let mut options = RecipeOptions::default();
        options.set("row_scaled", "true");
        let of_lines = |name: &&str| AnyRecipe::from_name(name, &options).ok();
        recipes.extend(AnyRecipe::names().iter().filter_map(of_lines));
        for (recipe, &(usage, form)) in recipes
            .into_iter()
            .flat_map(|r| ways.iter().map(move |way| (r, way)))
        {
            let specs = recipe.buffers(usage);
            let Ok(of_tensor) = fields::fields(&recipe, &specs, shape, usage, form) else {
                continue;
            };
            let setup = Setup {
                recipe,
                usage,
                form,
                delayed_scale: None,
                dtypes: Dtypes::U8,
            };
            let cast = Cast {
                backend: &Cpu,
                tensor,
                matrix: Matrix { shape, setup },
                fields: of_tensor,
                progress: &(),
            };
            let banded = Bands::new(cast.clone(), None, &Rc::default())?;
            let mut whole = Bands::new(cast, None, &Rc::default())?;
            (whole.rows, whole.alone) = (shape.rows, true);
            let (found, count) = written(&banded)?;
            assert!(
                found == written(&whole)?.0,
                "{recipe:?} {usage} {form:?} {dtype}"
            );
            let in_bands = Needs::of(&recipe, usage) != Needs::All;
            assert_eq!(count > 1, in_bands, "{recipe:?} {usage} {form:?}");
            (cut, alone) = (
                cut + usize::from(in_bands),
                alone + usize::from(!banded.bands_alternate()),
            );
        }
    }
    assert!(cut > 300, "{cut} casts had bands");
    assert!(alone > 20, "{alone} had no room for two");
    Ok(())
}

/// A file of matrices whose bands have no room with the band before, of the same matrix or of another, has the bytes of casts of all
/// rows.
#[test]
fn files_of_wide_matrices() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("in.safetensors");
    let out = folder.path().join("out.safetensors");
    // Neighbors of one shape have codes of one size, which the writer may still have.
    let shapes = [
        [512, 4096],
        [256, 4096],
        [256, 4096],
        [256, 4096],
        [96, 64],
        [512, 4096],
    ];
    let mut at = 0;
    let mut entries = Vec::new();
    for (number, [rows, cols]) in shapes.into_iter().enumerate() {
        let start = at;
        at += rows * cols * 4;
        entries.push(format!(
            "\"{number}\":{{\"dtype\":\"F32\",\"shape\":[{rows},{cols}],\"data_offsets\":[{start},{at}]}}"
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    let random = |i: u64| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 & 0xbf;
    file.extend((0..at as u64).map(random));
    fs::write(&path, file)?;
    for (name, form, row_scaled) in [
        ("mxfp8", Form::Swizzled, false),
        ("fp8-block", Form::Padded, false),
        ("fp8-current", Form::Compact, false),
        ("fp8-rowwise", Form::Padded, false),
        ("nvfp4-1d", Form::Compact, true),
    ] {
        let mut options = RecipeOptions::default();
        if row_scaled {
            options.set("row_scaled", "true");
        }
        let recipe = AnyRecipe::from_name(name, &options)?;
        let setup = Setup {
            form,
            ..Setup::new(recipe)
        };
        let hub = Hub::open(&path)?;
        let choices = Choices::new(&hub.model, &setup, |_| true)?;
        let to = Out::file(&out, [])?;
        crate::quantize::quantize(&Cpu, &hub, &choices, None, to, &())?;
        let (input, output) = (Model::open(&path)?, Model::open(&out)?);
        for tensor in input.tensors() {
            let all = tensor.len() / size_of::<f32>();
            let shape = Shape::new(tensor.shape[0], tensor.shape[1]);
            let source = load(&Cpu, &tensor, 0..all, &())?;
            let whole = quantize(&Cpu, recipe, shape, Usage::BOTH, source, None)?;
            let specs = recipe.buffers(Usage::BOTH);
            for field in fields::fields(&recipe, &specs, shape, Usage::BOTH, Form::Compact)? {
                let Content::Buffer { key, .. } = field.content else {
                    continue;
                };
                if key.part != Part::Data {
                    continue;
                }
                let name = field.name(tensor.name);
                let found = output.tensors().find(|tensor| tensor.name == name);
                let found = found.expect("a field");
                let mut bytes = Vec::new();
                found.pieces(0..found.len(), |_, piece| {
                    bytes.extend_from_slice(piece);
                    Ok(())
                })?;
                assert!(
                    bytes == Cpu.download(&whole.buffer(key)?.storage)?,
                    "{name}"
                );
            }
        }
    }
    Ok(())
}
