//! What the tests of the file commands share: a folder, the `lowp` command, and safetensors files.

#![allow(dead_code, reason = "every test file uses its own part")]

#[cfg(unix)]
pub(crate) mod hidden;

use lowp_format::{AnyRecipe, Recipe};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize_to_file};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Whether long tests run whole.
pub(crate) fn exhaustive() -> bool {
    std::env::var_os("LOWP_EXHAUSTIVE").is_some_and(|value| value == "1")
}

/// A folder that goes away, and the command in it.
pub(crate) struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self {
            dir: tempfile::tempdir().expect("a folder"),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs `lowp` in the folder.
    pub(crate) fn lowp(&self, args: &(impl Args + ?Sized)) -> Output {
        Command::new(env!("CARGO_BIN_EXE_lowp"))
            .args(args.words())
            .current_dir(self.dir.path())
            .output()
            .expect("lowp runs")
    }

    /// Runs `lowp`, which must succeed, and returns what it printed.
    pub(crate) fn done(&self, args: &(impl Args + ?Sized)) -> String {
        let output = self.lowp(args);
        let args = args.words();
        assert!(
            output.status.success(),
            "{args:?}: {}",
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    /// Runs `lowp`, which must fail with `code`, leave the folder as it was, and print one message.
    pub(crate) fn rejected(&self, code: i32, args: &(impl Args + ?Sized)) -> String {
        let before = self.listing();
        let output = self.lowp(args);
        let args = args.words();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
        assert_eq!(self.listing(), before, "{args:?}: left something behind");
        assert!(
            message.starts_with("error: ") && message.lines().count() == 1,
            "{args:?}: {message}"
        );
        message
    }

    /// The names in the folder.
    pub(crate) fn listing(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path()).expect("a folder");
        let mut names: Vec<String> = entries
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        names.sort();
        names
    }

    pub(crate) fn write(&self, name: &str, tensors: &[Tensor]) {
        self.write_with(name, tensors, &[]);
    }

    pub(crate) fn write_with(&self, name: &str, tensors: &[Tensor], metadata: &[(&str, &str)]) {
        let views = tensors.iter().map(|t| {
            (
                t.name.as_str(),
                TensorView::new(t.dtype, t.shape.clone(), &t.bytes).expect("a tensor"),
            )
        });
        let metadata: HashMap<String, String> = metadata
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        serialize_to_file(views, Some(metadata), &self.path(name)).expect("a file");
    }

    pub(crate) fn read(&self, name: &str) -> Contents {
        Contents::read(&self.path(name))
    }
}

/// The arguments of a command: a line of words, or word by word.
pub(crate) trait Args {
    fn words(&self) -> Vec<&str>;
}

impl Args for str {
    fn words(&self) -> Vec<&str> {
        self.split_whitespace().collect()
    }
}

impl Args for String {
    fn words(&self) -> Vec<&str> {
        self.as_str().words()
    }
}

impl Args for [&str] {
    fn words(&self) -> Vec<&str> {
        self.to_vec()
    }
}

impl<const N: usize> Args for [&str; N] {
    fn words(&self) -> Vec<&str> {
        self.to_vec()
    }
}

impl Args for Vec<&str> {
    fn words(&self) -> Vec<&str> {
        self.clone()
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A tensor to write.
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) fn tensor(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Tensor {
    Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes,
    }
}

pub(crate) fn f32s(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
    tensor(
        name,
        Dtype::F32,
        shape,
        values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    )
}

pub(crate) fn bf16s(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
    let bytes = values
        .iter()
        .flat_map(|&v| half::bf16::from_f32(v).to_le_bytes());
    tensor(name, Dtype::BF16, shape, bytes.collect())
}

pub(crate) fn f16s(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
    let bytes = values
        .iter()
        .flat_map(|&v| half::f16::from_f32(v).to_le_bytes());
    tensor(name, Dtype::F16, shape, bytes.collect())
}

/// Values that differ in sign and size, the same for every run.
pub(crate) fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let unit = (state >> 8) as f32 / 16_777_216.0 - 0.5;
        unit * ((state >> 4 & 7) as f32 - 4.0).exp2()
    };
    (0..count).map(next).collect()
}

/// An f32 tensor of such values.
pub(crate) fn matrix(name: &str, shape: &[usize], seed: u32) -> Tensor {
    f32s(name, shape, &values(shape.iter().product(), seed))
}

/// A file in memory.
pub(crate) struct Contents {
    pub(crate) tensors: HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    pub(crate) metadata: HashMap<String, String>,
}

impl Contents {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let tensors = file.tensors().into_iter().map(|(name, view)| {
            (
                name,
                (view.dtype(), view.shape().to_vec(), view.data().to_vec()),
            )
        });
        Self {
            tensors: tensors.collect(),
            metadata: header.metadata().clone().unwrap_or_default(),
        }
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    pub(crate) fn bytes(&self, name: &str) -> &[u8] {
        &self
            .tensors
            .get(name)
            .unwrap_or_else(|| panic!("no {name} in {:?}", self.names()))
            .2
    }
}

/// `form`, or padded where the block scales of `recipe` are f32, which are not swizzled.
pub(crate) fn form_of<'f>(recipe: &str, form: &'f str) -> &'f str {
    match form {
        "swizzled" if recipe.starts_with("fp8-block") => "padded",
        form => form,
    }
}

/// Every quantizing recipe by name.
pub(crate) fn recipes() -> Vec<&'static str> {
    let recipes = AnyRecipe::low_precision().into_iter();
    recipes.map(|recipe| recipe.name()).collect()
}
