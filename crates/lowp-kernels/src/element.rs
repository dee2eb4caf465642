//! Element codes as types: how one value becomes a code, and how codes lie in bytes.

use lowp_format::Code;
use lowp_format::codec::{e2m1, e4m3, e5m2};

use crate::cpu::Turnable;

/// How one element is encoded, and how its codes lie in bytes.
pub(crate) trait ElementCode: Copy + Send + Sync + 'static {
    /// The code.
    const CODE: Code;
    /// Whether stochastic rounding exists.
    const STOCHASTIC: bool = false;
    /// One code, unpacked.
    type Bits: Turnable;

    /// The code of `x`, rounded to nearest.
    fn encode(x: f32) -> Self::Bits;
    /// The code of `x`, rounded by eight random bits where that exists.
    #[inline(always)]
    fn encode_stochastic(x: f32, _random: u8) -> Self::Bits {
        Self::encode(x)
    }
    /// The value of a code, exactly.
    fn decode(bits: Self::Bits) -> f32;
    /// Writes codes to bytes; the rest of a last byte is 0.
    fn pack(codes: &[Self::Bits], bytes: &mut [u8]);
    /// Reads codes from bytes.
    fn unpack(bytes: &[u8], codes: &mut [Self::Bits]);
}

macro_rules! byte_code {
    ($Name:ident, $codec:ident) => {
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $Name;
        impl ElementCode for $Name {
            const CODE: Code = Code::$Name;
            type Bits = u8;
            #[inline(always)]
            fn encode(x: f32) -> u8 {
                $codec::encode(x)
            }
            #[inline(always)]
            fn decode(bits: u8) -> f32 {
                $codec::decode(bits)
            }
            #[inline(always)]
            fn pack(codes: &[u8], bytes: &mut [u8]) {
                bytes.copy_from_slice(codes);
            }
            #[inline(always)]
            fn unpack(bytes: &[u8], codes: &mut [u8]) {
                codes.copy_from_slice(bytes);
            }
        }
    };
}
byte_code!(E4M3, e4m3);
byte_code!(E5M2, e5m2);

#[derive(Clone, Copy, Debug)]
pub(crate) struct E2M1;

impl ElementCode for E2M1 {
    const CODE: Code = Code::E2M1;
    const STOCHASTIC: bool = true;
    type Bits = u8;
    #[inline(always)]
    fn encode(x: f32) -> u8 {
        e2m1::encode(x)
    }
    #[inline(always)]
    fn encode_stochastic(x: f32, random: u8) -> u8 {
        e2m1::encode_stochastic(x, random)
    }
    /// `e2m1::decode` without its table: exponent and mantissa placed in a binary32, whose bias an
    /// exact product corrects.
    #[inline(always)]
    fn decode(bits: u8) -> f32 {
        let bits = u32::from(bits);
        let magnitude = f32::from_bits((bits & 7) << 22) * f32::from_bits((127 + 126) << 23);
        f32::from_bits(magnitude.to_bits() | ((bits & 8) << 28))
    }
    #[inline(always)]
    fn pack(codes: &[u8], bytes: &mut [u8]) {
        let (pairs, last) = codes.as_chunks::<2>();
        for (byte, &[low, high]) in bytes.iter_mut().zip(pairs) {
            *byte = low | (high << 4);
        }
        if let ([low], Some(byte)) = (last, bytes.last_mut()) {
            *byte = *low;
        }
    }
    #[inline(always)]
    fn unpack(bytes: &[u8], codes: &mut [u8]) {
        let (pairs, last) = codes.as_chunks_mut::<2>();
        for (pair, &byte) in pairs.iter_mut().zip(bytes) {
            *pair = [byte & 0xF, byte >> 4];
        }
        if let ([low], Some(&byte)) = (last, bytes.last()) {
            *low = byte & 0xF;
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16;

impl ElementCode for Bf16 {
    const CODE: Code = Code::Bf16;
    type Bits = u16;
    #[inline(always)]
    fn encode(x: f32) -> u16 {
        bf16_bits(x)
    }
    #[inline(always)]
    fn decode(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }
    #[inline(always)]
    fn pack(codes: &[u16], bytes: &mut [u8]) {
        for (entry, code) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            *entry = code.to_le_bytes();
        }
    }
    #[inline(always)]
    fn unpack(bytes: &[u8], codes: &mut [u16]) {
        for (entry, code) in bytes.as_chunks::<2>().0.iter().zip(codes) {
            *code = u16::from_le_bytes(*entry);
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct F32;

impl ElementCode for F32 {
    const CODE: Code = Code::F32;
    type Bits = u32;
    #[inline(always)]
    fn encode(x: f32) -> u32 {
        x.to_bits()
    }
    #[inline(always)]
    fn decode(bits: u32) -> f32 {
        f32::from_bits(bits)
    }
    #[inline(always)]
    fn pack(codes: &[u32], bytes: &mut [u8]) {
        for (entry, code) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(codes) {
            *entry = code.to_le_bytes();
        }
    }
    #[inline(always)]
    fn unpack(bytes: &[u8], codes: &mut [u32]) {
        for (entry, code) in bytes.as_chunks::<4>().0.iter().zip(codes) {
            *code = u32::from_le_bytes(*entry);
        }
    }
}

/// The bfloat16 bits of `x`, rounded to nearest even; NaN stays a (quiet) NaN.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if bits & 0x7FFF_FFFF > 0x7F80_0000 {
        quiet
    } else {
        rounded
    }) as u16
}

/// `x` rounded to bfloat16.
#[inline(always)]
pub(crate) fn round_bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(bf16_bits(x)) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_decodes_are_the_codecs() {
        for code in 0..16 {
            assert_eq!(E2M1::decode(code).to_bits(), e2m1::decode(code).to_bits());
        }
    }

    #[test]
    fn bf16_rounding_is_that_of_half() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(
                    bf16_bits(x),
                    half::bf16::from_f32(x).to_bits(),
                    "{:08X}",
                    x.to_bits()
                );
            }
        }
    }
}
