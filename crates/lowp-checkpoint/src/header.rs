//! The header of a safetensors file: what the files of checkpoints and of models begin with.

use std::collections::BTreeMap;

use safetensors::Dtype;
use serde::Serialize;

/// Longest header that the safetensors format allows.
pub const MAX_HEADER: usize = 100_000_000;
/// Bytes in front of the header, which say how long it is.
pub const HEADER_LENGTH: usize = 8;

/// The name that the format keeps for the metadata.
const METADATA: &str = "__metadata__";
/// The header ends at a multiple of this.
const ALIGNMENT: usize = 8;

/// One tensor of a file.
#[derive(Clone, Copy, Debug)]
pub struct HeaderEntry<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its dtype.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: &'a [usize],
    /// Bytes that it takes in the file.
    pub bytes: usize,
}

/// What the header holds under one key.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    Tensor {
        data_offsets: [usize; 2],
        dtype: Dtype,
        shape: &'a [usize],
    },
    Metadata(&'a BTreeMap<String, String>),
}

/// The bytes before the first of `tensors`, which follow each other: [`HEADER_LENGTH`], and the header, which its writer checks not to be
/// longer than [`MAX_HEADER`]. Keys are sorted, so that equal contents give equal files.
///
/// # Errors
/// The header cannot be written as JSON.
pub fn header<'a>(
    tensors: impl IntoIterator<Item = HeaderEntry<'a>>,
    metadata: &BTreeMap<String, String>,
) -> serde_json::Result<Vec<u8>> {
    let mut entries: BTreeMap<&str, Entry<'_>> = BTreeMap::new();
    if !metadata.is_empty() {
        entries.insert(METADATA, Entry::Metadata(metadata));
    }
    let mut start = 0;
    for HeaderEntry {
        name,
        dtype,
        shape,
        bytes,
    } in tensors
    {
        let data_offsets = [start, start + bytes];
        [_, start] = data_offsets;
        let entry = Entry::Tensor {
            data_offsets,
            dtype,
            shape,
        };
        entries.insert(name, entry);
    }
    let mut text = serde_json::to_vec(&entries)?;
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    let length = text.len() as u64;
    text.splice(0..0, length.to_le_bytes());
    Ok(text)
}
