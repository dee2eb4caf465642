//! Element codes as types: how one value becomes a code, and how codes lie in bytes.

use half::bf16;
use lowp_format::Code;
use lowp_format::codec::{e2m1, e4m3, e5m2};

use crate::lanes::{LANES, Lanes, Line, Transpose};
use crate::rounding::bf16_bits;

/// How one element is encoded, and how its codes lie in bytes.
pub(crate) trait ElementCode: Copy + Send + Sync + 'static {
    /// The code.
    const CODE: Code;
    /// Whether values are multiplied at all.
    const SCALED: bool = true;
    /// Whether two codes share a byte.
    const PACKED: bool = Self::CODE.bits() < 8;
    /// Whether stochastic rounding exists.
    const STOCHASTIC: bool = false;
    /// One code, unpacked.
    type Bits: CodeBits;

    /// The code of `x`, rounded to nearest.
    fn encode(x: f32) -> Self::Bits;
    /// The code of `x`, rounded by eight random bits where that exists.
    #[inline(always)]
    fn encode_stochastic(x: f32, _random: u8) -> Self::Bits {
        Self::encode(x)
    }
    /// The codes of one vector; `encode` of every lane.
    #[inline(always)]
    fn encode_lanes<L: Lanes>(lanes: L, x: L::F, codes: &mut [Self::Bits; LANES]) {
        let mut line = [0.0; LANES];
        lanes.store(x, &mut line);
        for (code, x) in codes.iter_mut().zip(line) {
            *code = Self::encode(x);
        }
    }
    /// The codes of four vectors.
    #[inline(always)]
    fn encode_four<L: Lanes>(lanes: L, x: [L::F; 4], codes: &mut [Self::Bits; 4 * LANES]) {
        for (x, codes) in x.into_iter().zip(codes.as_chunks_mut::<LANES>().0) {
            Self::encode_lanes(lanes, x, codes);
        }
    }
    /// The values of [`LANES`] codes in `bytes`, exactly; zeros where bytes are missing.
    fn values<L: Lanes>(lanes: L, bytes: &[u8]) -> L::F;
    /// Code `index` of every cell: [`Code::entries_per_byte`] codes share one, as they share a byte.
    fn cell_values<L: Lanes>(lanes: L, cells: &[Self::Bits; LANES], index: usize) -> L::F;
    /// Reads cells from bytes.
    #[inline(always)]
    fn load_cells(bytes: &[u8], cells: &mut [Self::Bits]) {
        Self::unpack(bytes, cells);
    }
    /// Bytes that are unpacked codes themselves.
    #[inline(always)]
    fn codes(_bytes: &mut [u8]) -> Option<&mut [Self::Bits]> {
        None
    }
    /// Writes codes to bytes; the rest of a last byte is 0.
    fn pack<L: Lanes>(lanes: L, codes: &[Self::Bits], bytes: &mut [u8]);
    /// Reads codes from bytes.
    fn unpack(bytes: &[u8], codes: &mut [Self::Bits]);
}

/// The constants of a small float with subnormals that saturates: what its scalar codec does,
/// lane by lane.
pub(crate) struct Minifloat {
    /// Largest code.
    max: u32,
    /// Bits of the smallest normal value.
    normal: u32,
    /// Bits of a power of two whose unit in the last place is the step of subnormal codes.
    magic: u32,
    /// The code of NaN.
    nan: u32,
    /// Values by the low four bits of a code without its sign, where that is no normal number.
    special: Line,
}

/// The table of a codec's codes below 8 and from 0x78 on.
macro_rules! special {
    ($codec:ident) => {{
        let mut table = [0.0; LANES];
        let mut i = 0;
        while i < LANES {
            let code = i as u8;
            table[i] = $codec::decode(if code < 8 { code } else { 0x70 | code });
            i += 1;
        }
        table
    }};
}

impl Minifloat {
    /// The codes of `x`: `DROP` mantissa bits of binary32 are rounded away, and the sign moves down
    /// by `SIGN` bits.
    #[inline(always)]
    pub(crate) fn encode<const DROP: u32, const SIGN: u32, L: Lanes>(
        &self,
        lanes: L,
        x: L::F,
    ) -> L::U {
        let bits = lanes.bits(x);
        let abs = lanes.and(bits, lanes.usplat(0x7FFF_FFFF));
        let normal = self.normal::<DROP, L>(lanes, abs);
        let magic = lanes.usplat(self.magic);
        let shifted = lanes.add(lanes.value(abs), lanes.value(magic));
        let small = lanes.usub(lanes.bits(shifted), magic);
        let code = lanes.if_above(lanes.usplat(self.normal), abs, small, normal);
        let code = self.sign::<SIGN, L>(lanes, code, bits);
        let infinity = lanes.usplat(0x7F80_0000);
        lanes.if_above(abs, infinity, lanes.usplat(self.nan), code)
    }

    /// The codes of four vectors. Where none of their values is subnormal, zero or NaN, which is
    /// nearly always, half the work is left out.
    #[inline(always)]
    fn encode_four<const DROP: u32, const SIGN: u32, L: Lanes>(
        &self,
        lanes: L,
        x: [L::F; 4],
        codes: &mut [u8; 4 * LANES],
    ) {
        // Loops, because closures would not be compiled for the instruction set.
        let mut abs = [lanes.usplat(0); 4];
        let mut most = lanes.usplat(0);
        for i in 0..4 {
            abs[i] = lanes.and(lanes.bits(x[i]), lanes.usplat(0x7FFF_FFFF));
            most = lanes.umax(most, lanes.usub(abs[i], lanes.usplat(self.normal)));
        }
        let mut out = abs;
        if lanes.any_above(most, 0x7F80_0000 - self.normal) {
            for i in 0..4 {
                out[i] = self.encode::<DROP, SIGN, L>(lanes, x[i]);
            }
        } else {
            for i in 0..4 {
                let code = self.normal::<DROP, L>(lanes, abs[i]);
                out[i] = self.sign::<SIGN, L>(lanes, code, lanes.bits(x[i]));
            }
        }
        lanes.store_narrow(out, codes);
    }

    /// The values of codes, given as signed numbers: `DROP` as in [`Minifloat::encode`].
    ///
    /// No product corrects a bias: with a subnormal number it leaves the fast path of Intel's
    /// processors, and `decode` would depend on the values.
    #[inline(always)]
    pub(crate) fn decode<const DROP: u32, L: Lanes>(&self, lanes: L, codes: L::U) -> L::F {
        let shifted = lanes.shl::<DROP>(codes);
        // Counted from the first normal code, whose exponent is 1; lower ones wrap to the top.
        let first = 1 << 23;
        let above = lanes.usub(shifted, lanes.usplat(first));
        let above = lanes.and(above, lanes.usplat(0x7F << DROP));
        let last = lanes.usplat((self.max << DROP) - first);
        let normal = lanes.uadd(above, lanes.usplat(self.normal));
        let special = lanes.bits(lanes.lookup(codes, &self.special));
        let value = lanes.if_above(above, last, special, normal);
        let sign = lanes.and(shifted, lanes.usplat(0x8000_0000));
        lanes.value(lanes.or(value, sign))
    }

    /// The codes of values that are normal in the code, or larger than it has: rounded to nearest
    /// even and rebiased.
    #[inline(always)]
    fn normal<const DROP: u32, L: Lanes>(&self, lanes: L, abs: L::U) -> L::U {
        let lsb = lanes.and(lanes.shr::<DROP>(abs), lanes.usplat(1));
        let half = lanes.uadd(lsb, lanes.usplat((1 << (DROP - 1)) - 1));
        let rounded = lanes.shr::<DROP>(lanes.uadd(abs, half));
        // The smallest normal value has the code that follows the subnormal ones.
        let rebias = (self.normal >> DROP) - (1 << (23 - DROP));
        lanes.usub(rounded, lanes.usplat(rebias))
    }

    /// Saturates and adds the sign of `bits`.
    #[inline(always)]
    fn sign<const SIGN: u32, L: Lanes>(&self, lanes: L, code: L::U, bits: L::U) -> L::U {
        let sign = lanes.and(lanes.shr::<SIGN>(bits), lanes.usplat(0x8000_0000 >> SIGN));
        lanes.or(lanes.umin(code, lanes.usplat(self.max)), sign)
    }
}

/// E4M3, which is also the code of two-level block scales.
pub(crate) const E4M3_FLOAT: Minifloat = Minifloat {
    max: 0x7E,
    normal: 0x3C80_0000,
    magic: 0x4680_0000,
    nan: 0x7F,
    special: special!(e4m3),
};
const E5M2_FLOAT: Minifloat = Minifloat {
    max: 0x7B,
    normal: 0x3880_0000,
    magic: 0x4300_0000,
    nan: 0x7F,
    special: special!(e5m2),
};

/// The values of all E2M1 codes.
const E2M1_VALUES: Line = {
    let mut table = [0.0; LANES];
    let mut code = 0;
    while code < LANES {
        table[code] = e2m1::decode(code as u8);
        code += 1;
    }
    table
};

/// E2M1 codes: the steps of the code double at 2 and at 4, so the code is the smallest of the
/// roundings with each of the three steps, counted from where each begins. Adding a power of two
/// rounds to its unit in the last place, to nearest even.
#[inline(always)]
fn e2m1_lanes<L: Lanes>(lanes: L, x: L::F) -> L::U {
    let bits = lanes.bits(x);
    let abs = lanes.and(bits, lanes.usplat(0x7FFF_FFFF));
    let mut code = lanes.usplat(7);
    for (power, start) in [(0x4A80_0000, 0), (0x4B00_0000, 2), (0x4B80_0000, 4)] {
        let shifted = lanes.add(lanes.value(abs), lanes.value(lanes.usplat(power)));
        let rounded = lanes.usub(lanes.bits(shifted), lanes.usplat(power - start));
        code = lanes.umin(code, rounded);
    }
    let sign = lanes.and(lanes.shr::<28>(bits), lanes.usplat(8));
    let code = lanes.or(code, sign);
    lanes.if_above(abs, lanes.usplat(0x7F80_0000), lanes.usplat(7), code)
}

/// `x` rounded to the nearest value that E2M1 has.
#[inline(always)]
pub(crate) fn e2m1_rounded<L: Lanes>(lanes: L, x: L::F) -> L::F {
    lanes.lookup(e2m1_lanes(lanes, x), &E2M1_VALUES)
}

/// Memory for the codes of a chunk, and for as many transposed ones, of every type.
#[derive(Debug, Default)]
pub(crate) struct CodeScratch {
    bytes: [Vec<u8>; 2],
    halves: [Vec<u16>; 2],
    words: [Vec<u32>; 2],
}

/// An unpacked code that a [`CodeScratch`] has room for.
pub(crate) trait CodeBits: Transpose {
    /// Memory for codes of this type.
    fn scratch(scratch: &mut CodeScratch) -> &mut [Vec<Self>; 2];
}

macro_rules! code_bits {
    ($($Bits:ty: $field:ident),+) => {$(
        impl CodeBits for $Bits {
            fn scratch(scratch: &mut CodeScratch) -> &mut [Vec<Self>; 2] {
                &mut scratch.$field
            }
        }
    )+};
}
code_bits!(u8: bytes, u16: halves, u32: words);

macro_rules! byte_code {
    ($Name:ident, $codec:ident, $drop:literal, $minifloat:ident) => {
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
            fn encode_lanes<L: Lanes>(lanes: L, x: L::F, codes: &mut [u8; LANES]) {
                lanes.store_bytes(
                    lanes.narrow($minifloat.encode::<$drop, 24, L>(lanes, x)),
                    codes,
                );
            }
            #[inline(always)]
            fn encode_four<L: Lanes>(lanes: L, x: [L::F; 4], codes: &mut [u8; 4 * LANES]) {
                $minifloat.encode_four::<$drop, 24, L>(lanes, x, codes);
            }
            #[inline(always)]
            fn codes(bytes: &mut [u8]) -> Option<&mut [u8]> {
                Some(bytes)
            }
            #[inline(always)]
            fn values<L: Lanes>(lanes: L, bytes: &[u8]) -> L::F {
                Self::cell_values(lanes, &first(bytes), 0)
            }
            #[inline(always)]
            fn cell_values<L: Lanes>(lanes: L, cells: &[u8; LANES], _: usize) -> L::F {
                $minifloat.decode::<$drop, L>(lanes, lanes.signed(cells))
            }
            #[inline(always)]
            fn pack<L: Lanes>(_: L, codes: &[u8], bytes: &mut [u8]) {
                bytes.copy_from_slice(codes);
            }
            #[inline(always)]
            fn unpack(bytes: &[u8], codes: &mut [u8]) {
                codes.copy_from_slice(bytes);
            }
        }
    };
}
byte_code!(E4M3, e4m3, 20, E4M3_FLOAT);
byte_code!(E5M2, e5m2, 21, E5M2_FLOAT);

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
    fn encode_lanes<L: Lanes>(lanes: L, x: L::F, codes: &mut [u8; LANES]) {
        lanes.store_bytes(lanes.narrow(e2m1_lanes(lanes, x)), codes);
    }
    #[inline(always)]
    fn encode_four<L: Lanes>(lanes: L, x: [L::F; 4], codes: &mut [u8; 4 * LANES]) {
        let mut codes_of = [lanes.usplat(0); 4];
        for i in 0..4 {
            codes_of[i] = e2m1_lanes(lanes, x[i]);
        }
        lanes.store_narrow(codes_of, codes);
    }
    #[inline(always)]
    fn encode_stochastic(x: f32, random: u8) -> u8 {
        e2m1::encode_stochastic(x, random)
    }
    #[inline(always)]
    fn values<L: Lanes>(lanes: L, bytes: &[u8]) -> L::F {
        lanes.lookup(lanes.nibbles(&first(bytes)), &E2M1_VALUES)
    }
    #[inline(always)]
    fn cell_values<L: Lanes>(lanes: L, cells: &[u8; LANES], index: usize) -> L::F {
        let bytes = lanes.signed(cells);
        let codes = if index == 0 {
            bytes
        } else {
            lanes.shr::<4>(bytes)
        };
        lanes.lookup(codes, &E2M1_VALUES)
    }
    #[inline(always)]
    fn load_cells(bytes: &[u8], cells: &mut [u8]) {
        cells.copy_from_slice(bytes);
    }
    #[inline(always)]
    fn pack<L: Lanes>(lanes: L, codes: &[u8], bytes: &mut [u8]) {
        let (lines, codes) = codes.as_chunks::<{ 2 * LANES }>();
        let (packed, bytes) = bytes.split_at_mut(lines.len() * LANES);
        for (bytes, line) in packed.as_chunks_mut::<LANES>().0.iter_mut().zip(lines) {
            lanes.pack_nibbles(line, bytes);
        }
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

/// Codes that hold a value itself: `value` of the bits, read by `load`.
macro_rules! value_code {
    ($Name:ident, $Bits:ident, $encode:expr, $value:expr, $load:ident) => {
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $Name;
        impl ElementCode for $Name {
            const CODE: Code = Code::$Name;
            const SCALED: bool = false;
            type Bits = $Bits;
            #[inline(always)]
            fn encode(x: f32) -> $Bits {
                $encode(x)
            }
            #[inline(always)]
            fn values<L: Lanes>(lanes: L, bytes: &[u8]) -> L::F {
                let mut cells = [0; LANES];
                Self::unpack(&first::<{ size_of::<$Bits>() * LANES }>(bytes), &mut cells);
                Self::cell_values(lanes, &cells, 0)
            }
            #[inline(always)]
            fn cell_values<L: Lanes>(lanes: L, cells: &[$Bits; LANES], _: usize) -> L::F {
                let mut line = [$value(0); LANES];
                for (value, &bits) in line.iter_mut().zip(cells) {
                    *value = $value(bits);
                }
                lanes.$load(&line)
            }
            #[inline(always)]
            fn pack<L: Lanes>(_: L, codes: &[$Bits], bytes: &mut [u8]) {
                let (entries, _) = bytes.as_chunks_mut::<{ size_of::<$Bits>() }>();
                for (entry, code) in entries.iter_mut().zip(codes) {
                    *entry = code.to_le_bytes();
                }
            }
            #[inline(always)]
            fn unpack(bytes: &[u8], codes: &mut [$Bits]) {
                let (entries, _) = bytes.as_chunks::<{ size_of::<$Bits>() }>();
                for (entry, code) in entries.iter().zip(codes) {
                    *code = $Bits::from_le_bytes(*entry);
                }
            }
        }
    };
}
value_code!(Bf16, u16, bf16_bits, bf16::from_bits, load_bf16);
value_code!(F32, u32, f32::to_bits, f32::from_bits, load);

/// The first `N` bytes of `bytes`; zeros where it ends.
#[inline(always)]
fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    if let Some(all) = bytes.first_chunk() {
        return *all;
    }
    let mut some = [0; N];
    some[..bytes.len()].copy_from_slice(bytes);
    some
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use super::*;
    use crate::lanes::{Isa, Kernel};

    /// Values of all codes of `E` in `bytes`, row-major and by cells, as bits.
    struct Values<E>(Vec<u8>, PhantomData<E>);

    impl<E: ElementCode> Kernel for Values<E> {
        type Out = [Vec<u32>; 2];
        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> [Vec<u32>; 2] {
            let mut found = [vec![], vec![]];
            let mut keep = |way: usize, x| {
                let mut line = [0.0; LANES];
                lanes.store(x, &mut line);
                found[way].extend(line.map(f32::to_bits));
            };
            for bytes in self.0.chunks(E::CODE.bytes(LANES)) {
                keep(0, E::values(lanes, bytes));
            }
            let per_cell = E::CODE.entries_per_byte();
            for bytes in self.0.chunks(LANES * E::CODE.bytes(per_cell)) {
                let mut cells = [E::Bits::default(); LANES];
                E::load_cells(bytes, &mut cells);
                for index in 0..per_cell {
                    keep(1, E::cell_values(lanes, &cells, index));
                }
            }
            found
        }
    }

    /// Every code of one byte on every instruction set.
    fn check<E: ElementCode>(decode: impl Fn(u8) -> f32) {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        let (per_cell, mask) = match E::CODE.entries_per_byte() {
            1 => (1, 0xFF),
            per_cell => (per_cell, 0xF),
        };
        let code = |byte: u8, index: usize| decode(byte >> (4 * index) & mask).to_bits();
        let each = |byte: &u8| (0..per_cell).map(|i| code(*byte, i)).collect::<Vec<_>>();
        let rows: Vec<u32> = bytes.iter().flat_map(each).collect();
        let lines = bytes.chunks(LANES);
        let cells: Vec<u32> = lines
            .flat_map(|line| (0..per_cell).flat_map(move |i| line.iter().map(move |&b| (b, i))))
            .map(|(byte, i)| code(byte, i))
            .collect();
        for isa in Isa::all() {
            let found = isa.run(Values::<E>(bytes.clone(), PhantomData));
            assert_eq!(found, [rows.clone(), cells.clone()], "{isa:?} {}", E::CODE);
        }
    }

    #[test]
    fn element_decodes_are_the_codecs() {
        check::<E4M3>(e4m3::decode);
        check::<E5M2>(e5m2::decode);
        check::<E2M1>(e2m1::decode);
    }
}
