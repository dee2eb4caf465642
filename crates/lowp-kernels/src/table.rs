//! The only list of kernel ingredients: element codes, scale rules, and which go together.
//!
//! A [`KernelKey`] becomes types here ([`dispatch`]), so that every kernel is compiled for exactly
//! the combinations of the table, and no loop asks what it is made of.

use lowp_format::codec::{e2m1, e4m3, e5m2, e8m0};
use lowp_format::{
    Code, KernelKey, MxScale, ScaleRule, tensor_scale, two_level_block_scale,
    two_level_decode_factor, two_level_encode_scale, two_level_multiplier,
};

use crate::KernelError;

/// How one element is encoded, and how its codes lie in bytes.
pub(crate) trait ElementCode: Copy + Send + Sync + 'static {
    /// The code.
    const CODE: Code;
    /// Whether stochastic rounding exists.
    const STOCHASTIC: bool = false;
    /// One code, unpacked.
    type Bits: Copy + Default + Send + Sync + 'static;

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

/// One stored block scale.
pub(crate) trait ScaleEntry: Copy + Default + Send + Sync + 'static {
    /// Bytes of one entry.
    const BYTES: usize;
    /// Writes entries, little endian.
    fn store(entries: &[Self], bytes: &mut [u8]);
    /// Reads entry `index`.
    fn load(bytes: &[u8], index: usize) -> Self;
}

impl ScaleEntry for u8 {
    const BYTES: usize = 1;
    #[inline(always)]
    fn store(entries: &[u8], bytes: &mut [u8]) {
        bytes.copy_from_slice(entries);
    }
    #[inline(always)]
    fn load(bytes: &[u8], index: usize) -> u8 {
        bytes[index]
    }
}

impl ScaleEntry for f32 {
    const BYTES: usize = 4;
    #[inline(always)]
    fn store(entries: &[f32], bytes: &mut [u8]) {
        for (bytes, entry) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(entries) {
            *bytes = entry.to_le_bytes();
        }
    }
    #[inline(always)]
    fn load(bytes: &[u8], index: usize) -> f32 {
        f32::from_le_bytes(bytes.as_chunks::<4>().0[index])
    }
}

/// The arithmetic of scales. `tensor` is what the job's slot or tensor-scale buffer holds.
pub(crate) trait ScaleKernel: Copy + Send + Sync + 'static {
    /// Whether blocks have scales.
    const BLOCKS: bool;
    /// Whether values are multiplied at all.
    const SCALED: bool = true;
    /// Whether `tensor` is used.
    const TENSOR: bool;
    /// One stored block scale.
    type Entry: ScaleEntry;
    /// The code of a stored block scale.
    const ENTRY: Code;

    /// The kernel of `rule`, if it is one of this kind.
    fn new(rule: ScaleRule, tensor: f32) -> Option<Self>;
    /// The content of the tensor-scale buffer.
    fn tensor_entry(self) -> f32 {
        0.0
    }
    /// The stored scale of a block and the multiplier of its values. Without block scales: the
    /// multiplier of all values.
    fn encode<E: ElementCode>(self, amax: f32) -> (Self::Entry, f32);
    /// What decoded elements of a block are multiplied by.
    fn decode(self, entry: Self::Entry) -> f32;
}

/// Values are stored as they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unscaled;

impl ScaleKernel for Unscaled {
    const BLOCKS: bool = false;
    const SCALED: bool = false;
    const TENSOR: bool = false;
    type Entry = u8;
    const ENTRY: Code = Code::E8M0;
    fn new(rule: ScaleRule, _: f32) -> Option<Self> {
        matches!(rule, ScaleRule::None).then_some(Self)
    }
    #[inline(always)]
    fn encode<E: ElementCode>(self, _: f32) -> (u8, f32) {
        (0, 1.0)
    }
    #[inline(always)]
    fn decode(self, _: u8) -> f32 {
        1.0
    }
}

/// One scale for the tensor (docs/numerics.md 4 and 5): encoding multiplies by `tensor`, decoding
/// by its own `tensor`, the stored reciprocal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerTensor(f32);

impl ScaleKernel for PerTensor {
    const BLOCKS: bool = false;
    const TENSOR: bool = true;
    type Entry = u8;
    const ENTRY: Code = Code::E8M0;
    fn new(rule: ScaleRule, tensor: f32) -> Option<Self> {
        matches!(rule, ScaleRule::Tensor).then_some(Self(tensor))
    }
    fn tensor_entry(self) -> f32 {
        1.0 / self.0
    }
    #[inline(always)]
    fn encode<E: ElementCode>(self, _: f32) -> (u8, f32) {
        (0, self.0)
    }
    #[inline(always)]
    fn decode(self, _: u8) -> f32 {
        self.0
    }
}

/// A power of two per block (docs/numerics.md 6).
#[derive(Clone, Copy, Debug)]
pub(crate) struct PowerOfTwo(MxScale);

impl ScaleKernel for PowerOfTwo {
    const BLOCKS: bool = true;
    const TENSOR: bool = false;
    type Entry = u8;
    const ENTRY: Code = Code::E8M0;
    fn new(rule: ScaleRule, _: f32) -> Option<Self> {
        match rule {
            ScaleRule::E8M0(mode) => Some(Self(mode)),
            _ => None,
        }
    }
    #[inline(always)]
    fn encode<E: ElementCode>(self, amax: f32) -> (u8, f32) {
        let entry = self.0.block_scale(amax, E::CODE);
        (entry, e8m0::inverse(entry))
    }
    #[inline(always)]
    fn decode(self, entry: u8) -> f32 {
        e8m0::decode(entry)
    }
}

/// An E4M3 scale per block under the tensor amax (docs/numerics.md 7).
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwoLevel {
    amax: f32,
    encode_scale: f32,
}

impl ScaleKernel for TwoLevel {
    const BLOCKS: bool = true;
    const TENSOR: bool = true;
    type Entry = u8;
    const ENTRY: Code = Code::E4M3;
    fn new(rule: ScaleRule, amax: f32) -> Option<Self> {
        let encode_scale = two_level_encode_scale(amax);
        matches!(rule, ScaleRule::TwoLevel).then_some(Self { amax, encode_scale })
    }
    fn tensor_entry(self) -> f32 {
        self.amax
    }
    #[inline(always)]
    fn encode<E: ElementCode>(self, amax: f32) -> (u8, f32) {
        let entry = two_level_block_scale(amax, self.encode_scale);
        (entry, two_level_multiplier(entry, self.encode_scale))
    }
    #[inline(always)]
    fn decode(self, entry: u8) -> f32 {
        two_level_decode_factor(entry, self.amax)
    }
}

/// An f32 scale per block (docs/numerics.md 8).
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockFloat {
    pow2: bool,
    epsilon: f32,
}

impl ScaleKernel for BlockFloat {
    const BLOCKS: bool = true;
    const TENSOR: bool = false;
    type Entry = f32;
    const ENTRY: Code = Code::F32;
    fn new(rule: ScaleRule, _: f32) -> Option<Self> {
        match rule {
            ScaleRule::BlockF32 { pow2, epsilon } => Some(Self { pow2, epsilon }),
            _ => None,
        }
    }
    #[inline(always)]
    fn encode<E: ElementCode>(self, amax: f32) -> (f32, f32) {
        let scale = tensor_scale(amax, E::CODE, self.pow2, self.epsilon);
        (1.0 / scale, scale)
    }
    #[inline(always)]
    fn decode(self, entry: f32) -> f32 {
        entry
    }
}

/// Something to be compiled for every combination of ingredients.
pub(crate) trait Visit {
    /// What it returns.
    type Out;
    /// Runs it for one combination.
    fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) -> Self::Out;
}

macro_rules! ingredients {
    ($($Element:ident: $($Rule:ident),+;)+) => {
        /// Runs `visitor` with the types that `key` names; `tensor` is the tensor-level scale or
        /// amax, where the rule has one.
        ///
        /// # Errors
        /// [`KernelError::NoKernel`] for a combination outside the table.
        pub(crate) fn dispatch<V: Visit>(
            key: &KernelKey,
            tensor: f32,
            visitor: V,
        ) -> Result<V::Out, KernelError> {
            $($(
                if key.element == $Element::CODE
                    && key.blocks.is_some() == $Rule::BLOCKS
                    && let Some(rule) = $Rule::new(key.scale, tensor)
                {
                    return Ok(visitor.visit::<$Element, $Rule>(rule));
                }
            )+)+
            Err(no_kernel(key))
        }
    };
}

ingredients! {
    F32: Unscaled;
    Bf16: Unscaled;
    E4M3: PerTensor, PowerOfTwo, BlockFloat;
    E5M2: PerTensor, PowerOfTwo, BlockFloat;
    E2M1: PowerOfTwo, TwoLevel;
}

fn no_kernel(key: &KernelKey) -> KernelError {
    let KernelKey {
        element,
        scale,
        blocks,
    } = key;
    let what = match blocks {
        None => format!("{element} elements with {scale:?} scales and no blocks"),
        Some([row, col]) => format!(
            "{element} elements with {scale:?} scales over {}x{} and {}x{} blocks",
            row[0], row[1], col[0], col[1]
        ),
    };
    KernelError::NoKernel { what }
}

/// What a combination of ingredients needs and offers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traits {
    /// Whether a tensor-level scale or amax is used.
    pub(crate) tensor: bool,
    /// The code of a stored block scale, where blocks have scales.
    pub(crate) entry: Option<Code>,
    /// Whether stochastic rounding exists.
    pub(crate) stochastic: bool,
}

/// The traits of `key`.
///
/// # Errors
/// [`KernelError::NoKernel`] for a combination outside the table.
pub(crate) fn traits(key: &KernelKey) -> Result<Traits, KernelError> {
    struct Ask;
    impl Visit for Ask {
        type Out = Traits;
        fn visit<E: ElementCode, R: ScaleKernel>(self, _: R) -> Traits {
            Traits {
                tensor: R::TENSOR,
                entry: R::BLOCKS.then_some(R::ENTRY),
                stochastic: E::STOCHASTIC,
            }
        }
    }
    dispatch(key, 1.0, Ask)
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
