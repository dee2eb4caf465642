//! Recipes and small models.

use lowp_file::{NewModel, Setup};
use lowp_format::{AnyRecipe, RecipeOptions};
use std::path::{Path, PathBuf};

/// The shape of every matrix here.
pub(crate) const SHAPE: [usize; 2] = [64, 96];

pub(crate) fn recipe(name: &str) -> AnyRecipe {
    AnyRecipe::from_name(name, &RecipeOptions::default()).expect("a recipe")
}

pub(crate) fn setup(name: &str) -> Setup {
    Setup::new(recipe(name))
}

/// Values that differ from each other.
pub(crate) fn values() -> Vec<f32> {
    let value = |i: usize| (i * 7919 % 4099) as f32 - 2000.0;
    (0..SHAPE[0] * SHAPE[1]).map(value).collect()
}

/// A file of f32 matrices `a` and `b` in `folder`.
pub(crate) fn plain(folder: &Path, name: &str) -> PathBuf {
    let (path, values) = (folder.join(name), values());
    let mut new = NewModel::default();
    for name in ["a.weight", "b.weight"] {
        new.keep(name, &SHAPE, &values).expect("a tensor");
    }
    new.write(&path).expect("a file");
    path
}

/// A file of matrices `a` and `b` in a recipe in `folder`.
pub(crate) fn quantized(folder: &Path, recipe: &str) -> PathBuf {
    let (path, values) = (folder.join("q.safetensors"), values());
    let mut new = NewModel::default();
    for name in ["a.weight", "b.weight"] {
        new.quantize(name, &SHAPE, &values, setup(recipe))
            .expect("a tensor");
    }
    new.write(&path).expect("a file");
    path
}
