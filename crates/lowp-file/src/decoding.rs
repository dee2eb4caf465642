//! [`Decoding`]: a quantized tensor that is decoded in bands of rows.

use crate::buffer_bytes::{deferred, each_chunk};
use crate::cast::Tensor;
use crate::dtypes::OutputDtype;
use crate::error::{Context, Result};
use crate::meta::Quantized;
use crate::model::Model;
use crate::output::background::Deferred;
use crate::region::Region;
use crate::reuse::DoubleBuffer;
use crate::round::{self, Overflows};
use crate::source::own;
use crate::unpack::{decode_into, orientation, unpack};
use crate::write::{HELD, InRegions, Parts, Sink};
use lowp_format::{Axis, BufferSpec, Orientation, QuantizedTensor, Shape, lcm};
use lowp_kernels::{Backend, CpuBuffer};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of f32 in a band, about: they stay in the caches until they are written. Tests have many bands.
const CACHED: usize = if cfg!(test) { 1 << 16 } else { 4 << 20 };
/// The same where codes are transposed: each column of a band is a run of them.
const LONG: usize = if cfg!(test) { 1 << 18 } else { 64 << 20 };

/// What decodes tensors, one after the other, and what it found.
pub(crate) struct Decoder<B: Backend> {
    backend: B,
    pub(crate) float: OutputDtype,
    pub(crate) overflows: Overflows,
    memory: DoubleBuffer<B::Buffer<f32>>,
}

impl<B: Backend> Decoder<B> {
    pub(crate) fn new(backend: &B, float: OutputDtype) -> Self {
        Self {
            backend: backend.clone(),
            float,
            overflows: Overflows::default(),
            memory: DoubleBuffer::default(),
        }
    }

    /// The values of `tensor` of `model`, as `requested` has them, or the first orientation there is.
    pub(crate) fn tensor<'a>(
        &'a self,
        model: &Model,
        tensor: &'a Quantized,
        requested: Option<Orientation>,
    ) -> Result<Box<dyn Parts + 'a>> {
        let orientation = orientation(model, tensor, requested)?;
        let codes = unpack(&self.backend, model, tensor, Some(orientation))?;
        Ok(self.codes(codes, orientation, &tensor.name))
    }

    /// The values of `codes`, those of tensor `name`, as `orientation` has them.
    pub(crate) fn codes<'a>(
        &'a self,
        codes: Tensor<B>,
        orientation: Orientation,
        name: &'a str,
    ) -> Box<dyn Parts + 'a> {
        Box::new(Decoding {
            to: self,
            codes,
            orientation,
            name,
        })
    }

    /// Appends `values` of tensor `name` to `bytes`, and counts those that became infinite.
    pub(crate) fn append(&self, name: &str, values: &[f32], bytes: &mut Vec<u8>) {
        let overflowed = round::append(self.float, values, bytes);
        self.overflows.add(name, overflowed);
    }
}

/// A quantized tensor whose bands are decoded when they are asked for.
struct Decoding<'a, B: Backend> {
    to: &'a Decoder<B>,
    codes: Tensor<B>,
    orientation: Orientation,
    name: &'a str,
}

impl<B: Backend> Decoding<'_, B> {
    /// Rows of a band: whole blocks and whole bytes; all rows where codes are transposed and not in the memory of the host.
    fn rows(&self) -> usize {
        let shape = self.codes.shape();
        let buffers = || self.codes.buffers().iter();
        let transposed = |spec: &BufferSpec| spec.axes[0] != Axis::Rows;
        let any = buffers().any(|buffer| transposed(&buffer.spec));
        if any && buffers().any(|buffer| on_host::<B>(&buffer.storage).is_none()) {
            return shape.rows;
        }
        let unit = buffers().fold(1, |unit, buffer| lcm(unit, buffer.spec.row_quantum()));
        let row = (shape.cols * size_of::<f32>()).max(1);
        let bytes = if any { LONG } else { CACHED };
        (bytes / row / unit).max(1) * unit
    }

    fn part(&self, spec: &BufferSpec, rows: &Range<usize>, bytes: usize) -> Result<B::Buffer<u8>> {
        let all = self.codes.shape();
        let storage = &self.codes.buffer(spec.key)?.storage;
        let Some(unit) = rows_of_entry(spec) else {
            return Ok(storage.clone());
        };
        let entry = rows.start / unit;
        if spec.axes[0] == Axis::Rows {
            let start = entry * spec.row_bytes(all);
            return Ok(self.to.backend.view(storage, start..start + bytes)?);
        }
        let (stride, start) = (spec.row_bytes(all), spec.code.bytes(entry));
        let run = spec.row_bytes(all.with_rows(rows.len()));
        let from = on_host::<B>(storage).context("codes that are not on the host")?;
        let from = from.read()?;
        let mut part = Vec::with_capacity(bytes);
        for column in from.chunks_exact(stride.max(1)) {
            part.extend_from_slice(&column[start..start + run]);
        }
        own::<u8, B>(CpuBuffer::from_vec(part)).context("codes that are not on the host")
    }

    fn rows_of(&self, band: usize) -> Range<usize> {
        let (rows, all) = (self.rows(), self.codes.shape().rows);
        (band * rows).min(all)..((band + 1) * rows).min(all)
    }
}

/// Matrix rows of an entry; `None` where one serves all.
fn rows_of_entry(spec: &BufferSpec) -> Option<usize> {
    let [rows, _] = spec.block();
    (rows != BufferSpec::WHOLE).then_some(rows)
}

fn on_host<B: Backend>(buffer: &B::Buffer<u8>) -> Option<&CpuBuffer<u8>> {
    let buffer: &dyn Any = buffer;
    buffer.downcast_ref()
}

impl<B: Backend> Parts for Decoding<'_, B> {
    fn bands(&self) -> usize {
        self.codes.shape().rows.div_ceil(self.rows().max(1)).max(1)
    }

    fn bands_alternate(&self) -> bool {
        let band = self.rows().saturating_mul(self.codes.shape().cols);
        band.saturating_mul(2 * size_of::<f32>()) <= HELD
    }

    fn held(&self) -> usize {
        let band = self.rows().saturating_mul(self.codes.shape().cols);
        band.saturating_mul(size_of::<f32>())
    }

    fn band(&self, band: usize) -> Result<Option<Box<dyn Parts + '_>>> {
        let (rows, all) = (self.rows_of(band), self.codes.shape());
        let shape = Shape::new(rows.len(), all.cols);
        let specs = self.codes.buffers().iter().map(|buffer| buffer.spec);
        let codes: Tensor<B> = match rows.len() == all.rows {
            true => self.codes.clone(),
            false => {
                QuantizedTensor::with_buffers(self.codes.recipe(), shape, specs, |spec, bytes| {
                    self.part(spec, &rows, bytes)
                })?
            }
        };
        let (len, backend) = (shape.elements(), &self.to.backend);
        let fits = |values: &B::Buffer<f32>| backend.len::<f32>(values) == len;
        let make = || backend.alloc::<f32>(len);
        let values = self.to.memory.take(self.bands_alternate(), fits, make)?;
        decode_into(backend, &codes, self.orientation, &values)?;
        Ok(Some(Box::new(InRegions {
            regions: vec![Some(Region::from(
                rows.start * all.cols * self.to.float.size(),
            ))],
            parts: Decoded {
                to: self.to,
                values,
                name: self.name,
            },
        })))
    }
}

/// The values of a tensor, its only part.
struct Decoded<'a, B: Backend> {
    to: &'a Decoder<B>,
    /// Held until all of them are written.
    values: Arc<B::Buffer<f32>>,
    name: &'a str,
}

impl<B: Backend> Parts for Decoded<'_, B> {
    fn deferred(&self, _: usize) -> Option<Box<dyn Deferred>> {
        match self.to.float {
            OutputDtype::F32 => deferred::<f32, B, _>(&self.to.backend, &self.values, &self.values),
            OutputDtype::Bf16 | OutputDtype::F16 => None,
        }
    }

    fn write(&self, _: usize, sink: &mut Sink<'_>) -> Result<()> {
        let mut bytes = Vec::new();
        each_chunk::<f32, B>(&self.to.backend, &self.values, |values| {
            bytes.clear();
            self.to.append(self.name, values, &mut bytes);
            sink(&bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::FileError;
    use crate::unpack::decode;
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
                let whole = decode(&Cpu, &codes, orientation)?;
                let serves = |spec: &&BufferSpec| spec.key.usage.contains(orientation.usage());
                let specs = codes.buffers().iter().map(|buffer| buffer.spec);
                let specs: Vec<_> = specs.filter(|spec| serves(&spec)).collect();
                let decoding = Decoding {
                    to: &Decoder::new(&Cpu, OutputDtype::F32),
                    codes: QuantizedTensor::with_buffers(recipe, shape, specs, |spec, _| {
                        Ok::<_, FileError>(codes.buffer(spec.key)?.storage.clone())
                    })?,
                    orientation,
                    name: "t",
                };
                let mut bytes = Vec::new();
                for band in 0..decoding.bands() {
                    let band = decoding.band(band)?.expect("a band");
                    assert_eq!(band.region(0), Some(Region::from(bytes.len())));
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
        assert!(
            cut >= 2 * AnyRecipe::low_precision().len(),
            "{cut} decodes had bands"
        );
        Ok(())
    }
}
