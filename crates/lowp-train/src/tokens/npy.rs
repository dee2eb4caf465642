//! Token ids in a `.npy` file of NumPy.

use std::io::Read;
use std::path::Path;

use super::shard::{IdDtype, Shard, open, unreadable};
use crate::error::TrainError;

/// Longest header that is read.
const MAX_HEADER: usize = 1 << 16;

/// The ids of the array at `path`, in the order of its elements; it does not say where documents end.
pub(super) fn read(path: &Path) -> Result<Shard, TrainError> {
    let mut file = open(path)?;
    let mut begin = [0; 12];
    file.read_exact(&mut begin)
        .map_err(|e| unreadable(path, e))?;
    let wrong = |why: &str| unreadable(path, format!("{why}; save a one-dimensional array"));
    let (start, len) = match &begin {
        [0x93, b'N', b'U', b'M', b'P', b'Y', 1, _, a, b, ..] => {
            (10, usize::from(u16::from_le_bytes([*a, *b])))
        }
        [0x93, b'N', b'U', b'M', b'P', b'Y', 2 | 3, _, a, b, c, d] => {
            (12, u32::from_le_bytes([*a, *b, *c, *d]) as usize)
        }
        _ => return Err(wrong("it is no .npy file")),
    };
    if len > MAX_HEADER {
        return Err(wrong("its header is too long"));
    }
    let mut header = begin[start..].to_vec();
    let mut rest = vec![0; (start + len).saturating_sub(begin.len())];
    file.read_exact(&mut rest)
        .map_err(|e| unreadable(path, e))?;
    header.extend(rest);
    let header = String::from_utf8_lossy(&header);
    let value = |key: &str| {
        let (_, rest) = header.split_once(&format!("'{key}':"))?;
        Some(rest.trim_start())
    };
    let descr = value("descr").and_then(|text| text.split('\'').nth(1));
    let dtype = match descr {
        Some("|u1") => IdDtype::U8,
        Some("<u2") => IdDtype::U16,
        Some("<i4") => IdDtype::I32,
        Some("<u4") => IdDtype::U32,
        Some("<i8" | "<u8") => IdDtype::I64,
        other => {
            let found = other.unwrap_or("missing");
            let why =
                format!("its dtype is {found}; ids are uint8, uint16, int32, uint32 or int64");
            return Err(unreadable(path, why));
        }
    };
    if value("fortran_order").is_none_or(|text| text.starts_with("True")) {
        return Err(wrong("its elements are in the order of columns"));
    }
    let shape = value("shape").and_then(|text| text.strip_prefix('(')?.split(')').next());
    let shape = shape.ok_or_else(|| wrong("it has no shape"))?;
    let mut tokens = 1u64;
    for dim in shape
        .split(',')
        .map(str::trim)
        .filter(|dim| !dim.is_empty())
    {
        let dim = dim.parse::<u64>().ok();
        let product = dim.and_then(|dim| tokens.checked_mul(dim));
        tokens = product.ok_or_else(|| wrong("its shape makes no sense"))?;
    }
    Shard::open(path, (start + len) as u64, dtype, tokens)
}
