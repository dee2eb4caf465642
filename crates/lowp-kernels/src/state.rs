//! [`State`]: what an optimizer keeps of the elements of a parameter, as it is stored.

use std::ops::Range;

use half::bf16;
use lowp_format::{STATE_BLOCK, StateBits, StateCode, state_bytes};

use crate::{Backend, FloatDtype, KernelError, Source, StateName};

/// Storage of a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateDtype {
    /// binary32.
    #[default]
    F32,
    /// bfloat16, rounded to nearest even on store.
    Bf16,
    /// Codes of 8 bits with a scale for each block, rounded stochastically on store (docs/numerics.md 23.3).
    Fp8,
}

/// The values of a state, one for each element of a job.
#[derive(Clone, Debug)]
pub enum State<B: Backend> {
    /// High-precision values.
    Values(Source<B>),
    /// Codes, then the scale of each block ([`state_bytes`]).
    Fp8(B::Buffer<u8>),
}

impl StateDtype {
    /// Every dtype.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Fp8];

    /// Bytes of `len` elements.
    pub const fn bytes(self, len: usize) -> usize {
        match self {
            Self::F32 => 4 * len,
            Self::Bf16 => 2 * len,
            Self::Fp8 => state_bytes(len),
        }
    }

    /// `f32`, `bf16` or `fp8`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }

    /// The narrowest dtype that has all of its values.
    pub const fn float(self) -> FloatDtype {
        match self {
            Self::F32 => FloatDtype::F32,
            Self::Bf16 | Self::Fp8 => FloatDtype::Bf16,
        }
    }
}

impl From<FloatDtype> for StateDtype {
    fn from(dtype: FloatDtype) -> Self {
        match dtype {
            FloatDtype::F32 => Self::F32,
            FloatDtype::Bf16 => Self::Bf16,
        }
    }
}

impl<B: Backend> From<Source<B>> for State<B> {
    fn from(values: Source<B>) -> Self {
        Self::Values(values)
    }
}

impl<B: Backend> State<B> {
    /// `len` zeros.
    ///
    /// # Errors
    /// The device has no room.
    pub fn alloc(backend: &B, dtype: StateDtype, len: usize) -> Result<Self, KernelError> {
        let values = |dtype| Source::alloc(backend, dtype, len).map(Self::Values);
        match dtype {
            StateDtype::F32 => values(FloatDtype::F32),
            StateDtype::Bf16 => values(FloatDtype::Bf16),
            StateDtype::Fp8 => Ok(Self::Fp8(backend.alloc(state_bytes(len))?)),
        }
    }

    /// What the values are stored as.
    pub fn dtype(&self) -> StateDtype {
        match self {
            Self::Values(values) => values.dtype().into(),
            Self::Fp8(_) => StateDtype::Fp8,
        }
    }

    /// Number of values.
    pub fn len(&self, backend: &B) -> usize {
        match self {
            Self::Values(values) => values.len(backend),
            Self::Fp8(bytes) => elements(backend.len(bytes)),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self, backend: &B) -> bool {
        self.len(backend) == 0
    }

    /// The addresses of the memory, as [`Backend::span`].
    pub fn span(&self, backend: &B) -> Range<usize> {
        match self {
            Self::Values(values) => values.span(backend),
            Self::Fp8(bytes) => backend.span(bytes),
        }
    }

    /// Checks that the values lie on the device of `backend`.
    ///
    /// # Errors
    /// They lie on another one.
    pub fn owned_by(&self, backend: &B) -> Result<(), KernelError> {
        match self {
            Self::Values(values) => values.owned_by(backend),
            Self::Fp8(bytes) => backend.owns(bytes),
        }
    }

    /// All values of a state of this name, as f32, which is exact.
    ///
    /// # Errors
    /// The device failed, or the host has no room.
    pub fn download(&self, backend: &B, name: StateName) -> Result<Vec<f32>, KernelError> {
        match self {
            Self::Values(values) => values.download(backend),
            Self::Fp8(bytes) => Ok(decoded(&backend.download(bytes)?, name.code())),
        }
    }

    /// Replaces all values of a state of this name, and says whether one was rounded, which is to nearest: what was stored in the same dtype
    /// stays.
    ///
    /// # Errors
    /// Another number of values.
    pub fn upload(
        &self,
        backend: &B,
        name: StateName,
        values: &[f32],
    ) -> Result<bool, KernelError> {
        let stored = match self {
            Self::Values(buffer) => {
                buffer.write(backend, 0, values)?;
                let round = |x: f32| match buffer.dtype() {
                    FloatDtype::F32 => x,
                    FloatDtype::Bf16 => bf16::from_f32(x).to_f32(),
                };
                return Ok(values.iter().any(|&x| round(x) != x));
            }
            Self::Fp8(buffer) => {
                let bytes = encoded(values, name.code());
                backend.write(buffer, 0, &bytes)?;
                decoded(&bytes, name.code())
            }
        };
        Ok(stored != values)
    }
}

impl StateName {
    /// How it is encoded in fp8.
    pub const fn code(self) -> StateCode {
        match self {
            Self::ExpAvg | Self::MomentumBuffer => StateCode::E4M3,
            Self::ExpAvgSq => StateCode::UE4M4,
        }
    }
}

/// Elements of a state in fp8 of so many bytes.
fn elements(bytes: usize) -> usize {
    bytes - bytes.div_ceil(STATE_BLOCK + 1)
}

/// The values of a state in fp8 that was read as it is stored.
pub fn decoded(bytes: &[u8], code: StateCode) -> Vec<f32> {
    let (codes, scales) = bytes.split_at(elements(bytes.len()));
    let mut values = vec![0.0; codes.len()];
    let blocks = codes.chunks(STATE_BLOCK).zip(scales);
    for (values, (codes, &scale)) in values.chunks_mut(STATE_BLOCK).zip(blocks) {
        code.decode_block(codes, scale, values);
    }
    values
}

/// Values as a state in fp8, rounded to nearest.
fn encoded(values: &[f32], code: StateCode) -> Vec<u8> {
    let mut bytes = vec![0; state_bytes(values.len())];
    let (codes, scales) = bytes.split_at_mut(values.len());
    let blocks = codes.chunks_mut(STATE_BLOCK).zip(scales);
    for (values, (codes, scale)) in values.chunks(STATE_BLOCK).zip(blocks) {
        *scale = code.encode_block(values, |_| StateBits::NEAREST.of(code), codes);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_fp8_say_how_many_elements() {
        for len in 0..200 {
            assert_eq!(elements(state_bytes(len)), len);
        }
    }
}
