//! Optimizer state in 8 bits: codes in blocks of the flattened matrix, each with a power of two as its scale (docs/numerics.md 23).

use crate::Philox;
use crate::codec::{e4m3, e8m0, ue4m4};
use crate::magnitude;

/// Elements of a block: consecutive ones of the flattened matrix, from a multiple of this many on.
pub const STATE_BLOCK: usize = 32;

/// The smallest scale, 2^-103: all values of a block are values of bfloat16, too.
const SMALLEST_SCALE: u8 = 24;

/// How the values of a state are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateCode {
    /// E4M3, of a mean of gradients.
    E4M3,
    /// UE4M4, of a mean of squares of gradients: what is not zero gives no code of zero.
    UE4M4,
}

/// The random bits of an element: sixteen for its master and for each state, any two of them independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBits {
    /// Random bits of the master.
    pub master: u16,
    /// Random bits of a state in E4M3.
    pub e4m3: u16,
    /// Random bits of a state in UE4M4.
    pub ue4m4: u16,
}

impl StateBits {
    /// Those that round to nearest, halves away from zero.
    pub const NEAREST: Self = Self {
        master: 0x8000,
        e4m3: 0x8000,
        ue4m4: 0x8000,
    };

    /// Those of element `index` of the flattened matrix.
    pub const fn new(random: &Philox, index: u64) -> Self {
        Self::of_word(random.word(index))
    }

    /// Those of a random word: its upper half, the exclusive or of both, and its lower half.
    pub const fn of_word(word: u32) -> Self {
        let (upper, lower) = ((word >> 16) as u16, word as u16);
        Self {
            master: upper,
            e4m3: upper ^ lower,
            ue4m4: lower,
        }
    }

    /// The random bits of a state in `code`.
    pub const fn of(self, code: StateCode) -> u16 {
        match code {
            StateCode::E4M3 => self.e4m3,
            StateCode::UE4M4 => self.ue4m4,
        }
    }
}

impl StateCode {
    /// The E8M0 scale of a block with this amax: the smallest power of two by which the amax is in the range of the code, from 2^-103 on.
    pub const fn scale(self, amax: f32) -> u8 {
        let largest = match self {
            Self::E4M3 => e4m3::MAX,
            Self::UE4M4 => ue4m4::MAX,
        };
        let scale = e8m0::encode_ceil(amax * (1.0 / largest));
        if scale < SMALLEST_SCALE {
            SMALLEST_SCALE
        } else {
            scale
        }
    }

    /// The code of `x` under `scale`, rounded stochastically.
    #[inline(always)]
    pub const fn encode(self, x: f32, scale: u8, random: u16) -> u8 {
        let scaled = x * e8m0::inverse(scale);
        match self {
            Self::E4M3 => e4m3::encode_stochastic(scaled, random),
            // A product that underflows is not zero either.
            Self::UE4M4 if x != 0.0 => {
                let code = ue4m4::encode_stochastic(scaled, random);
                if code == 0 { 1 } else { code }
            }
            Self::UE4M4 => ue4m4::encode_stochastic(scaled, random),
        }
    }

    /// The value of a code under `scale`, exactly.
    #[inline(always)]
    pub const fn decode(self, code: u8, scale: u8) -> f32 {
        let value = match self {
            Self::E4M3 => e4m3::decode(code),
            Self::UE4M4 => ue4m4::decode(code),
        };
        value * e8m0::decode(scale)
    }

    /// Encodes the values of a block into as many codes, and returns its scale. `bits` are those of the value of a place in the block.
    ///
    /// Rounding: stochastic; a NaN does not count for the scale. In E4M3 it stays, and infinities become the largest value; UE4M4 has
    /// neither. Source: docs/numerics.md 23.
    #[inline(always)]
    pub fn encode_block(self, values: &[f32], bits: impl Fn(usize) -> u16, codes: &mut [u8]) -> u8 {
        let amax = values.iter().fold(0, |amax, &x| magnitude(x).max(amax));
        let scale = self.scale(f32::from_bits(amax));
        self.encode_under(scale, values, bits, codes);
        scale
    }

    /// Encodes a block under a scale that is known, as [`StateCode::encode_block`] does.
    #[inline(always)]
    pub fn encode_under(
        self,
        scale: u8,
        values: &[f32],
        bits: impl Fn(usize) -> u16,
        codes: &mut [u8],
    ) {
        for (place, (code, &x)) in codes.iter_mut().zip(values).enumerate() {
            *code = self.encode(x, scale, bits(place));
        }
    }

    /// Decodes the codes of a block into as many values, exactly.
    #[inline(always)]
    pub fn decode_block(self, codes: &[u8], scale: u8, values: &mut [f32]) {
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = self.decode(code, scale);
        }
    }
}

/// Bytes of a state of `len` elements: the codes, then the scale of each block.
pub const fn state_bytes(len: usize) -> usize {
    len + len.div_ceil(STATE_BLOCK)
}
