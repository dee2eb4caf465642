//! [`StateDtype`]: how an optimizer stores what it keeps of an element beside the master.

use lowp_format::{STATE_BLOCK, StateBits, StateCode, state_bytes};

use crate::{FloatDtype, StateName};

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

impl StateName {
    /// How the state is encoded in fp8.
    pub const fn code(self) -> StateCode {
        match self {
            Self::ExpAvg | Self::MomentumBuffer => StateCode::E4M3,
            Self::ExpAvgSq => StateCode::UE4M4,
        }
    }
}

/// Elements of a state in fp8 of so many bytes.
pub(crate) fn elements(bytes: usize) -> usize {
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
pub(crate) fn encoded(values: &[f32], code: StateCode) -> Vec<u8> {
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
