//! The header of a safetensors file, checked before any tensor is touched.

use crate::error::{FileError, Result};
use crate::foreign;
use crate::text::shown;
use lowp_checkpoint::{HEADER_LENGTH, MAX_HEADER};
use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, SafeTensorError};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::path::Path;

/// Checks the header of `bytes` and returns it with the position at which the tensors begin.
pub(crate) fn read(path: &Path, bytes: &[u8]) -> Result<(usize, Metadata)> {
    if let Some(what) = foreign::explain(bytes) {
        return Err(FileError::in_file(path, what));
    }
    let begin = begin(bytes).map_err(|why| FileError::in_file(path, why))?;
    check_entries(&bytes[HEADER_LENGTH..begin], bytes.len() - begin)
        .map_err(|why| FileError::in_file(path, why))?;
    // The entries tile the file; what is left are dtypes, shapes and the metadata.
    let (_, metadata) =
        SafeTensors::read_metadata(bytes).map_err(|e| FileError::in_file(path, explain(&e)))?;
    Ok((begin, metadata))
}

fn begin(bytes: &[u8]) -> Result<usize, String> {
    let Some(length) = bytes.first_chunk::<HEADER_LENGTH>() else {
        return Err(format!(
            "{} bytes are too few for a safetensors file; it is cut off or something else (copy it again)",
            bytes.len()
        ));
    };
    let length = u64::from_le_bytes(*length);
    let header = usize::try_from(length).ok().filter(|&n| n <= MAX_HEADER);
    let Some(header) = header else {
        return Err(format!(
            "a header of {length} bytes is longer than the format allows; this is no safetensors file"
        ));
    };
    if HEADER_LENGTH + header > bytes.len() {
        return Err(format!(
            "the header has {header} bytes and the file only {}; it is cut off or no safetensors file (copy it again)",
            bytes.len()
        ));
    }
    Ok(HEADER_LENGTH + header)
}

/// One tensor of the header, as far as its bytes go.
#[derive(serde::Deserialize)]
struct Offsets {
    data_offsets: (u64, u64),
}

#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Entry {
    Tensor(Offsets),
    Object(Entries<String, IgnoredAny>),
    Other(IgnoredAny),
}

/// Finds repeated names, overlaps, gaps and a file that is cut off; the crate's own errors name none of these.
fn check_entries(header: &[u8], data: usize) -> Result<(), String> {
    let Entries(entries) = serde_json::from_slice::<Entries<String, Entry, true>>(header)
        .map_err(|e| json_problem("the header is no valid JSON object", &e))?;
    for (name, entry) in &entries {
        if let Entry::Object(Entries(keys)) = entry {
            let mut seen = BTreeSet::new();
            if let Some((key, _)) = keys.iter().find(|(key, _)| !seen.insert(key.as_str())) {
                return Err(format!(
                    "the key '{}' of '{}' is there twice; write the file again",
                    shown(key),
                    shown(name)
                ));
            }
        }
    }
    let mut places: Vec<(u64, u64, String)> = entries
        .into_iter()
        .filter_map(|(name, entry)| match entry {
            Entry::Tensor(Offsets {
                data_offsets: (start, end),
            }) => Some((start, end, name)),
            Entry::Object(_) | Entry::Other(_) => None,
        })
        .collect();
    places.sort();
    let (mut reached, mut before) = (0, String::new());
    for (start, end, name) in places {
        let shown = shown(&name);
        let wrong = if end < start {
            format!("'{shown}' ends at byte {end}, before it begins at {start}")
        } else if start < reached {
            format!("'{}' and '{shown}' overlap", self::shown(&before))
        } else if start > reached {
            format!("bytes {reached}..{start} in front of '{shown}' belong to no tensor")
        } else {
            (reached, before) = (end, name);
            continue;
        };
        return Err(format!("{wrong}; write the file again"));
    }
    let data = data as u64;
    if reached > data {
        return Err(format!(
            "{} bytes are missing at the end, '{}' among them; the file is cut off (copy it again)",
            reached - data,
            shown(&before)
        ));
    }
    if reached < data {
        return Err(format!(
            "{} bytes after the last tensor belong to nothing; write the file again",
            data - reached
        ));
    }
    Ok(())
}

/// What serde says repeats parts of the file.
fn json_problem(what: &str, error: &serde_json::Error) -> String {
    let error = error.to_string();
    format!("{what}: {}; write the file again", shown(&error))
}

fn explain(error: &SafeTensorError) -> String {
    let what = match error {
        SafeTensorError::InvalidHeaderDeserialization(e) => {
            return json_problem("the header is no safetensors header", e);
        }
        SafeTensorError::TensorInvalidInfo => {
            "a tensor has more or fewer bytes than its shape and dtype need"
        }
        SafeTensorError::ValidationOverflow => {
            "a shape has more elements than this machine can address"
        }
        other => &other.to_string(),
    };
    format!("{what}; write the file again")
}

/// A JSON object, in the order of the text. Where `UNIQUE` a key that is there twice is an error.
pub(crate) struct Entries<K, V, const UNIQUE: bool = false>(pub(crate) Vec<(K, V)>);

impl<'de, K, V, const UNIQUE: bool> Deserialize<'de> for Entries<K, V, UNIQUE>
where
    K: Deserialize<'de> + Display,
    V: Deserialize<'de>,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self(Vec::new()))
    }
}

impl<'de, K, V, const UNIQUE: bool> Visitor<'de> for Entries<K, V, UNIQUE>
where
    K: Deserialize<'de> + Display,
    V: Deserialize<'de>,
{
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        let mut seen = BTreeSet::new();
        while let Some((key, value)) = map.next_entry::<K, V>()? {
            if UNIQUE && !seen.insert(key.to_string()) {
                let twice = format!("'{}' is there twice", shown(&key.to_string()));
                return Err(A::Error::custom(twice));
            }
            self.0.push((key, value));
        }
        Ok(self)
    }
}
