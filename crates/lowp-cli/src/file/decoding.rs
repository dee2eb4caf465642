//! [`Decoding`]: a quantized tensor that is decoded in bands of rows.

use super::behind::Later;
use super::cast::Tensor;
use super::dequantize::{Decoded, Overflows};
use super::names::FloatName;
use super::place::Place;
use super::spare::Turns;
use super::unpack::decode_into;
use super::write::{HELD, Parts, Sink};
use anyhow::{Result, bail};
use lowp_format::{Axis, BufferSpec, Orientation, QuantizedTensor, Shape, lcm};
use lowp_kernels::Backend;
use std::ops::Range;

/// Bytes of f32 in a band, about: they stay in the caches until they are written. Tests have many bands.
const CACHED: usize = if cfg!(test) { 1 << 16 } else { 4 << 20 };

/// A quantized tensor whose bands are decoded when they are asked for.
pub(super) struct Decoding<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) codes: Tensor<B>,
    pub(super) orientation: Orientation,
    pub(super) float: FloatName,
    pub(super) name: &'a str,
    pub(super) overflows: &'a Overflows,
    pub(super) memory: &'a Turns<B::Buffer<f32>>,
}

impl<B: Backend> Decoding<'_, B> {
    /// Rows of a band: whole blocks; all rows where those of a buffer do not follow each other.
    fn rows(&self) -> usize {
        let shape = self.codes.shape();
        let specs = || self.codes.buffers().iter().map(|buffer| buffer.spec);
        if specs().any(|spec| spec.axes[0] != Axis::Rows) {
            return shape.rows;
        }
        let units = specs().filter_map(|spec| rows_of_entry(&spec));
        let unit = units.fold(1, lcm);
        let row = (shape.cols * size_of::<f32>()).max(1);
        (CACHED / row / unit).max(1) * unit
    }

    fn rows_of(&self, band: usize) -> Range<usize> {
        let (rows, all) = (self.rows(), self.codes.shape().rows);
        (band * rows).min(all)..((band + 1) * rows).min(all)
    }
}

/// Matrix rows of a row of entries; `None` where one row serves all.
fn rows_of_entry(spec: &BufferSpec) -> Option<usize> {
    (spec.tile[0] != BufferSpec::WHOLE).then_some(spec.tile[0])
}

impl<B: Backend> Parts for Decoding<'_, B> {
    fn bands(&self) -> usize {
        self.codes.shape().rows.div_ceil(self.rows().max(1)).max(1)
    }

    fn bands_take_turns(&self) -> bool {
        let band = self.rows().saturating_mul(self.codes.shape().cols);
        band.saturating_mul(2 * size_of::<f32>()) <= HELD
    }

    fn band(&self, band: usize) -> Result<Option<Box<dyn Parts + '_>>> {
        let (rows, all) = (self.rows_of(band), self.codes.shape());
        let shape = Shape::new(rows.len(), all.cols);
        let specs = self.codes.buffers().iter().map(|buffer| buffer.spec);
        let codes: Tensor<B> = match rows.len() == all.rows {
            true => self.codes.clone(),
            false => QuantizedTensor::with_buffers(
                self.codes.recipe(),
                shape,
                specs,
                |spec, bytes| -> Result<_> {
                    let storage = &self.codes.buffer(spec.key)?.storage;
                    let entry = rows_of_entry(spec).map_or(0, |unit| rows.start / unit);
                    let start = entry * spec.row_bytes(all);
                    Ok(self.backend.view(storage, start..start + bytes)?)
                },
            )?,
        };
        let len = shape.elements();
        let fits = |values: &B::Buffer<f32>| self.backend.len::<f32>(values) == len;
        let make = || self.backend.alloc::<f32>(len);
        let values = match self.bands_take_turns() {
            true => self.memory.take(fits, make)?,
            false => self.memory.take_one(fits, make)?,
        };
        decode_into(self.backend, &codes, self.orientation, &values)?;
        Ok(Some(Box::new(DecodedRows {
            place: Place::from(rows.start * all.cols * self.float.size()),
            decoded: Decoded {
                backend: self.backend.clone(),
                values,
                float: self.float,
                name: self.name,
                overflows: self.overflows,
            },
        })))
    }

    fn write(&self, _: usize, _: &mut Sink<'_>) -> Result<()> {
        bail!("its bands are written")
    }
}

/// Rows of a decoded tensor.
struct DecodedRows<'a, B: Backend> {
    decoded: Decoded<'a, B>,
    place: Place,
}

impl<B: Backend> Parts for DecodedRows<'_, B> {
    fn write(&self, part: usize, sink: &mut Sink<'_>) -> Result<()> {
        self.decoded.write(part, sink)
    }

    fn later(&self, part: usize) -> Option<Box<dyn Later>> {
        self.decoded.later(part)
    }

    fn place(&self, _: usize) -> Option<Place> {
        Some(self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::spare::Spare;
    use crate::file::unpack::decode;
    use lowp_format::{AnyRecipe, Usage};
    use lowp_kernels::{Cpu, Source};
    use lowp_shard::quantize;

    /// Bands give the values of one decode of all rows, for every recipe and orientation.
    #[test]
    fn bands_are_the_whole() -> Result<()> {
        let shape = Shape::new(1300, 256);
        let value = |i: usize| (i.wrapping_mul(0x9e37_79b9) % 4099) as f32 - 2000.0;
        let source: Vec<f32> = (0..shape.elements()).map(value).collect();
        let mut cut = 0;
        for recipe in AnyRecipe::low_precision() {
            let source = Source::F32(Cpu.upload(&source)?);
            let codes = quantize(&Cpu, recipe, shape, Usage::BOTH, source, None)?;
            for orientation in Orientation::ALL {
                let whole = decode(&Cpu, &codes, orientation, &Spare::default())?;
                let serves = |spec: &&BufferSpec| spec.key.usage.contains(orientation.usage());
                let specs = codes.buffers().iter().map(|buffer| buffer.spec);
                let specs: Vec<_> = specs.filter(|spec| serves(&spec)).collect();
                let decoding = Decoding {
                    backend: &Cpu,
                    codes: QuantizedTensor::with_buffers(recipe, shape, specs, |spec, _| {
                        Ok::<_, anyhow::Error>(codes.buffer(spec.key)?.storage.clone())
                    })?,
                    orientation,
                    float: FloatName::F32,
                    name: "t",
                    overflows: &Overflows::default(),
                    memory: &Turns::default(),
                };
                let mut bytes = Vec::new();
                for band in 0..decoding.bands() {
                    let band = decoding.band(band)?.expect("a band");
                    assert_eq!(band.place(0), Some(Place::from(bytes.len())));
                    band.write(0, &mut |piece| {
                        bytes.extend_from_slice(piece);
                        Ok(())
                    })?;
                }
                let expected: Vec<u8> =
                    whole.read()?.iter().flat_map(|v| v.to_le_bytes()).collect();
                assert!(bytes == expected, "{recipe:?} {orientation}");
                cut += usize::from(decoding.bands() > 1);
            }
        }
        assert!(cut > 8, "{cut} decodes had bands");
        Ok(())
    }
}
