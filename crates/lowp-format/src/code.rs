//! [`Code`]: how one entry of a buffer is encoded.

use std::fmt;

use crate::codec;

/// The encoding of one buffer entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Code {
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinity ("FN").
    E4M3,
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    E5M2,
    /// 4-bit float, 2 exponent and 1 mantissa bits, no infinity, no NaN; two per byte.
    E2M1,
    /// 8-bit power of two, the scale format of the OCP MX specification.
    E8M0,
    /// bfloat16, little endian.
    Bf16,
    /// IEEE-754 binary32, little endian.
    F32,
}

impl Code {
    /// Every code.
    pub const ALL: [Code; 6] = [
        Code::E4M3,
        Code::E5M2,
        Code::E2M1,
        Code::E8M0,
        Code::Bf16,
        Code::F32,
    ];

    /// Width of one entry in bits.
    pub const fn bits(self) -> usize {
        match self {
            Code::E2M1 => 4,
            Code::E4M3 | Code::E5M2 | Code::E8M0 => 8,
            Code::Bf16 => 16,
            Code::F32 => 32,
        }
    }

    /// Bytes that `entries` consecutive entries occupy; a trailing half byte counts whole.
    pub const fn bytes(self, entries: usize) -> usize {
        (entries * self.bits()).div_ceil(8)
    }

    /// Entries that share one byte: 2 for E2M1, else 1.
    pub const fn entries_per_byte(self) -> usize {
        8usize.div_ceil(self.bits())
    }

    /// The largest finite value.
    pub const fn max_finite(self) -> f32 {
        match self {
            Code::E4M3 => codec::e4m3::MAX,
            Code::E5M2 => codec::e5m2::MAX,
            Code::E2M1 => codec::e2m1::MAX,
            Code::E8M0 => f32::from_bits(0x7F00_0000),
            Code::Bf16 => f32::from_bits(0x7F7F_0000),
            Code::F32 => f32::MAX,
        }
    }

    /// Exponent of the largest finite value (`emax` of the OCP MX specification).
    pub const fn max_exponent(self) -> i32 {
        match self {
            Code::E4M3 => 8,
            Code::E5M2 => 15,
            Code::E2M1 => 2,
            Code::E8M0 | Code::Bf16 | Code::F32 => 127,
        }
    }

    /// Fraction bits of a normal value.
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Code::E4M3 => 3,
            Code::E5M2 => 2,
            Code::E2M1 => 1,
            Code::E8M0 => 0,
            Code::Bf16 => 7,
            Code::F32 => 23,
        }
    }

    /// The name in tables and file metadata.
    pub const fn name(self) -> &'static str {
        match self {
            Code::E4M3 => "E4M3",
            Code::E5M2 => "E5M2",
            Code::E2M1 => "E2M1",
            Code::E8M0 => "E8M0",
            Code::Bf16 => "BF16",
            Code::F32 => "F32",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
