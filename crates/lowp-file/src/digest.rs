//! [`Model::digest`]: tells models apart without reading all of their bytes.

use crate::error::Result;
use crate::model::Model;
use std::fmt::Write as _;

/// Places that are read of each tensor.
const PLACES: usize = 4;
/// Bytes of a place.
const BYTES: usize = 4096;

impl Model {
    /// A digest of the metadata, of the names, dtypes and shapes of all tensors, and of bytes of each: all of a short one, and four parts
    /// of a long one, from its first to its last.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn digest(&self) -> Result<String> {
        let mut all = format!("{:?}", self.metadata());
        let mut bytes = Vec::new();
        for tensor in self.tensors() {
            let part = BYTES.min(tensor.len());
            let last = tensor.len() - part;
            bytes.clear();
            for place in 0..PLACES {
                let start = last * place / (PLACES - 1);
                bytes.extend_from_slice(&tensor.bytes_at(start..start + part)?);
            }
            let (name, dtype, shape) = (tensor.name, tensor.dtype, tensor.shape);
            let checksum = lowp_checkpoint::checksum(&bytes);
            let _ = write!(all, "\n{name:?} {dtype:?} {shape:?} {checksum}");
        }
        Ok(lowp_checkpoint::checksum(all.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::{Dtype, TensorView};
    use std::collections::HashMap;

    fn digest(name: &str, shape: &[usize], bytes: &[u8], note: &str) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.safetensors");
        let view = TensorView::new(Dtype::U8, shape.to_vec(), bytes).expect("a tensor");
        let metadata = HashMap::from([("note".to_owned(), note.to_owned())]);
        safetensors::serialize_to_file([(name, view)], Some(metadata), &path).expect("a file");
        let model = Model::open(&path).expect("a model");
        model.digest().expect("a digest")
    }

    #[test]
    fn every_byte_of_a_short_tensor_counts() {
        for len in [1, 7, 4096, 5000, PLACES * BYTES] {
            let mut bytes = vec![3; len];
            let of = |bytes: &[u8]| digest("a", &[len], bytes, "");
            let same = of(&bytes);
            assert_eq!(of(&bytes), same);
            for at in [0, len / 3, len / 2, 4 * len / 5, len - 1] {
                bytes[at] = 4;
                assert_ne!(of(&bytes), same, "byte {at} of {len}");
                bytes[at] = 3;
            }
        }
    }

    #[test]
    fn names_shapes_and_metadata_count() {
        let bytes = [5; 12];
        let same = digest("a", &[3, 4], &bytes, "x");
        assert_ne!(digest("b", &[3, 4], &bytes, "x"), same);
        assert_ne!(digest("a", &[4, 3], &bytes, "x"), same);
        assert_ne!(digest("a", &[3, 4], &bytes, "y"), same);
    }
}
