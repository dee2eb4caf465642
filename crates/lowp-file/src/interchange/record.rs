//! What an exported file says of each weight under a key of its own, so that `lowp import` makes the same file again.

use crate::error::{Result, file_error};
use crate::meta::{Quantized, Text};
use crate::model::Model;
use crate::text::{message, shown};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the key of a tensor begins with; its name follows. Not one of the keys of a file that holds lowp's own tensors.
pub(crate) const PREFIX: &str = "lowp-export.";

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Record {
    tensor: Text,
    /// The amax of the source as the bits of a binary32, where there is one: a quotient does not tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    amax: Option<String>,
    /// The decode scale of the tensor in the same way, where it has one: a tensor without elements has no block to keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scale: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Numbers {
    pub(crate) amax: Option<f32>,
    pub(crate) scale: Option<f32>,
}

/// What a file says of a weight.
#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    pub(crate) tensor: Quantized,
    pub(crate) numbers: Numbers,
}

pub(crate) fn key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

pub(crate) fn is_record(key: &str) -> bool {
    key.starts_with(PREFIX)
}

pub(crate) fn value(text: &Text, numbers: Numbers) -> Result<String> {
    let bits = |number: Option<f32>| number.map(|number| format!("{:08x}", number.to_bits()));
    let record = Record {
        tensor: text.clone(),
        amax: bits(numbers.amax),
        scale: bits(numbers.scale),
    };
    Ok(serde_json::to_string(&record)?)
}

pub(crate) fn records(model: &Model) -> Result<BTreeMap<String, Recorded>> {
    let mut records = BTreeMap::new();
    for (key, json) in model.metadata() {
        let Some(name) = key.strip_prefix(PREFIX) else {
            continue;
        };
        let recorded = read(name, json).map_err(|why| {
            file_error!(
                model.path(),
                "its metadata '{}' make no sense: {}; export the model again",
                shown(key),
                message(&why)
            )
        })?;
        records.insert(name.to_owned(), recorded);
    }
    Ok(records)
}

fn read(name: &str, json: &str) -> Result<Recorded, String> {
    let record: Record = serde_json::from_str(json).map_err(|e| e.to_string())?;
    if record.tensor.shard.is_some() {
        return Err("it is about a part of a tensor".to_owned());
    }
    let bits = |text: String| {
        let digits = text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let bits = u32::from_str_radix(&text, 16).ok().filter(|_| digits);
        bits.map(f32::from_bits)
            .ok_or_else(|| format!("'{text}' is no number of eight hexadecimal digits"))
    };
    let numbers = Numbers {
        amax: record.amax.map(bits).transpose()?,
        scale: record.scale.map(bits).transpose()?,
    };
    Ok(Recorded {
        tensor: Quantized::from_text(name, record.tensor)?,
        numbers,
    })
}
