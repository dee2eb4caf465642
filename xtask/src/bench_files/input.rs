//! The model that is quantized: tensors of bf16 values.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, json};

const COLS: usize = 8192;

pub(super) fn write(path: &Path, count: usize, bytes: usize) -> Result<()> {
    let mut header = Map::new();
    for tensor in 0..count {
        let offsets = [tensor * bytes, (tensor + 1) * bytes];
        let entry =
            json!({ "dtype": "BF16", "shape": [bytes / 2 / COLS, COLS], "data_offsets": offsets });
        header.insert(format!("layers.{tensor:03}.weight"), entry);
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = File::create(path).with_context(|| format!("making {}", path.display()))?;
    let mut out = BufWriter::new(file);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    let values = values(1 << 20);
    for _ in 0..count {
        for start in (0..bytes).step_by(values.len()) {
            out.write_all(&values[..values.len().min(bytes - start)])?;
        }
    }
    out.flush()?;
    Ok(())
}

/// The bytes of `count` values of both signs, about as normal as a sum of four uniform ones is; one in a thousand is an outlier.
fn values(count: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut bytes = Vec::with_capacity(count * 2);
    for _ in 0..count {
        let normal = (uniform() + uniform() + uniform() + uniform()) * 0.03;
        let value = if uniform() > 0.499 {
            normal * 50.0
        } else {
            normal
        };
        bytes.extend_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_finite_and_of_both_signs() {
        let bytes = values(1 << 12);
        let value =
            |bytes: &[u8]| f32::from_bits(u32::from(bytes[1]) << 24 | u32::from(bytes[0]) << 16);
        let values: Vec<f32> = bytes.chunks_exact(2).map(value).collect();
        assert!(values.iter().all(|value| value.is_finite()));
        let negative = values.iter().filter(|value| **value < 0.0).count();
        assert!((1600..2500).contains(&negative), "{negative}");
    }
}
