//! Statistics of the codes and scales of one orientation, and its error against a reference.

use crate::cast::Tensor;
use crate::error::Result;
use crate::model::Tensor as Source;
use crate::source::each_value;
use crate::unpack::decode;
use lowp_format::{BufferSpec, Code, Orientation, Part, Shape, codec};
use lowp_kernels::Cpu;
use serde::Serialize;

fn value_of(code: Code, bits: u8) -> f32 {
    match code {
        Code::E4M3 => codec::e4m3::decode(bits),
        Code::E5M2 => codec::e5m2::decode(bits),
        Code::E2M1 => codec::e2m1::decode(bits),
        Code::E8M0 => codec::e8m0::decode(bits),
        Code::Bf16 | Code::F32 => f32::NAN,
    }
}

/// What the codes and scales of one orientation look like.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// Number of scales.
    pub scales: usize,
    /// Smallest scale as stored; NaN scales are left out.
    pub min: Option<f32>,
    /// Largest scale as stored.
    pub max: Option<f32>,
    /// Elements that are +-0; `None` where elements are not coded.
    pub zeros: Option<usize>,
    /// Elements at the largest finite magnitude or above.
    pub saturated: Option<usize>,
}

impl Stats {
    pub(crate) fn of(tensor: &Tensor, orientation: Orientation) -> Result<Self> {
        let data = tensor.data(orientation)?;
        let codes = histogram(&data.spec, tensor.shape(), &data.storage.read()?);
        let code = data.spec.code;
        let count = |holds: &dyn Fn(f32) -> bool| {
            let codes = codes.as_ref()?;
            let matching = (0u8..=255)
                .zip(codes)
                .filter(|(bits, _)| holds(value_of(code, *bits)));
            Some(matching.map(|(_, n)| n).sum())
        };
        let zeros = count(&|value| value == 0.0);
        let saturated = count(&|value| value.abs() >= code.max_finite());
        let part = tensor
            .part(orientation, Part::BlockScale)
            .or_else(|| tensor.outer(orientation));
        let (mut scales, mut range) = (0, None::<[f32; 2]>);
        if let Some(scale) = part {
            let bytes = scale.storage.read()?;
            let width = scale.spec.code.bytes(1);
            for bytes in bytes.chunks_exact(width) {
                let value = match bytes {
                    [bits] => value_of(scale.spec.code, *bits),
                    [a, b, c, d] => f32::from_le_bytes([*a, *b, *c, *d]),
                    _ => f32::NAN,
                };
                scales += 1;
                if !value.is_nan() {
                    let [low, high] = range.unwrap_or([value, value]);
                    range = Some([value.min(low), value.max(high)]);
                }
            }
        }
        Ok(Self {
            scales,
            min: range.map(|[low, _]| low),
            max: range.map(|[_, high]| high),
            zeros,
            saturated,
        })
    }
}

fn histogram(spec: &BufferSpec, shape: Shape, bytes: &[u8]) -> Option<[usize; 256]> {
    let mut counts = [0; 256];
    match spec.code.bits() {
        8 => bytes
            .iter()
            .for_each(|&bits| counts[usize::from(bits)] += 1),
        4 => {
            for &byte in bytes {
                counts[usize::from(byte & 0xF)] += 1;
                counts[usize::from(byte >> 4)] += 1;
            }
            // Nibbles that pad a physical row are no elements.
            let [outer, inner] = spec.entries(shape);
            counts[0] -= outer * (inner % 2);
        }
        _ => return None,
    }
    Some(counts)
}

/// How far decoded values are from the reference.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Distance {
    /// Root of the squared error over the squared reference.
    #[serde(rename = "rel_error")]
    pub relative: f64,
    /// Largest absolute error; NaN where a value decodes to NaN.
    #[serde(rename = "max_error")]
    pub largest: f64,
    /// Elements of the reference that are infinite or NaN, which the errors leave out.
    pub non_finite: usize,
}

impl Distance {
    /// Decodes `orientation` and compares it with elements `from..` of `reference`; those that are not finite there are
    /// counted and left out.
    pub(crate) fn of(
        tensor: &Tensor,
        orientation: Orientation,
        reference: &Source<'_>,
        from: usize,
    ) -> Result<Self> {
        let decoded = decode(&Cpu, tensor, orientation)?;
        let decoded = decoded.read()?;
        let (mut error, mut total, mut largest) = (0.0f64, 0.0f64, 0.0f64);
        let mut non_finite = 0;
        each_value(reference, from..from + decoded.len(), |start, reference| {
            for (value, reference) in decoded[start..].iter().zip(reference) {
                if reference.is_finite() {
                    let reference = f64::from(*reference);
                    let off = f64::from(*value) - reference;
                    error += off * off;
                    total += reference * reference;
                    // What is not a number is farther than any error, and stays so.
                    if off.is_nan() || off.abs() > largest {
                        largest = off.abs();
                    }
                } else {
                    non_finite += 1;
                }
            }
            Ok(())
        })?;
        let relative = if error == 0.0 {
            0.0
        } else {
            (error / total).sqrt()
        };
        Ok(Self {
            relative,
            largest,
            non_finite,
        })
    }
}
