//! Golden vectors: exact bytes that every public path must reproduce (docs/numerics.md 16).

pub mod recipes;

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use safetensors::SafeTensors;

/// One golden file in memory.
#[derive(Debug)]
pub struct Golden {
    name: String,
    bytes: Vec<u8>,
    metadata: HashMap<String, String>,
    /// Tensors that were read.
    read: Mutex<BTreeSet<String>>,
}

impl Golden {
    /// The file `tests/golden/<name>.safetensors`.
    ///
    /// # Panics
    /// If it cannot be read: a golden test without its vectors has failed.
    pub fn open(name: &str) -> Self {
        let path = folder().join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors header");
        let metadata = header.metadata().clone().unwrap_or_default();
        Self {
            name: name.to_owned(),
            bytes,
            metadata,
            read: Mutex::default(),
        }
    }

    /// The tensors that nothing has read since the file was opened: a vector that no test compares.
    pub fn unread(&self) -> Vec<String> {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names = self.tensors();
        names.retain(|name| !read.contains(name));
        names
    }

    /// The names of all golden files, sorted.
    ///
    /// # Panics
    /// If the folder cannot be read.
    pub fn names() -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(folder())
            .expect("tests/golden")
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter_map(|name| name.strip_suffix(".safetensors").map(str::to_owned))
            .collect();
        names.sort();
        names
    }

    /// The names of the tensors.
    ///
    /// # Panics
    /// If the file is not safetensors.
    pub fn tensors(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .tensors_view()
            .names()
            .into_iter()
            .map(str::to_owned)
            .collect();
        names.sort();
        names
    }

    /// Whether there is a tensor of that name.
    pub fn has(&self, tensor: &str) -> bool {
        self.tensors_view().tensor(tensor).is_ok()
    }

    /// A metadata entry as a number.
    ///
    /// # Panics
    /// If it is absent or no number.
    pub fn number(&self, key: &str) -> f64 {
        self.metadata[key]
            .parse()
            .unwrap_or_else(|e| panic!("{}: {key}: {e}", self.name))
    }

    /// The shape of a tensor.
    ///
    /// # Panics
    /// If it is absent.
    pub fn shape(&self, tensor: &str) -> Vec<usize> {
        self.view(tensor).shape().to_vec()
    }

    /// The raw bytes of a tensor.
    ///
    /// # Panics
    /// If it is absent.
    pub fn bytes(&self, tensor: &str) -> &[u8] {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.insert(tensor.to_owned());
        let view = self.view(tensor);
        let start = view.data().as_ptr() as usize - self.bytes.as_ptr() as usize;
        &self.bytes[start..start + view.data().len()]
    }

    /// The values of an F32 tensor.
    ///
    /// # Panics
    /// If it is absent.
    pub fn f32(&self, tensor: &str) -> Vec<f32> {
        let word = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        self.bytes(tensor).chunks_exact(4).map(word).collect()
    }

    /// The values of an I64 tensor.
    ///
    /// # Panics
    /// If it is absent or has a negative value.
    pub fn usize(&self, tensor: &str) -> Vec<usize> {
        self.bytes(tensor)
            .chunks_exact(8)
            .map(|b| usize::try_from(i64::from_le_bytes(b.try_into().expect("8 bytes"))))
            .map(|v| v.expect("a count"))
            .collect()
    }

    fn tensors_view(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("a safetensors file")
    }

    fn view(&self, tensor: &str) -> safetensors::tensor::TensorView<'_> {
        SafeTensors::deserialize(&self.bytes)
            .expect("a safetensors file")
            .tensor(tensor)
            .unwrap_or_else(|e| panic!("{}: {tensor}: {e}", self.name))
    }
}

/// Where the files are: beside the sources, or in the folder `LOWP_GOLDEN` where there are none.
fn folder() -> PathBuf {
    let moved = std::env::var_os("LOWP_GOLDEN");
    moved.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// The first index at which two f32 vectors differ in bits; two NaNs are equal.
pub fn first_difference(a: &[f32], b: &[f32]) -> Option<usize> {
    if a.len() != b.len() {
        return Some(a.len().min(b.len()));
    }
    let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    a.iter().zip(b).position(|pair| !same(pair))
}
