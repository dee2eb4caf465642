//! Scale rules as types: how a block's amax becomes a stored scale and a multiplier.

use lowp_format::codec::e8m0;
use lowp_format::{
    Code, MxScale, ScaleRule, tensor_scale, two_level_block_scale, two_level_decode_factor,
    two_level_encode_scale, two_level_multiplier,
};

use crate::element::ElementCode;

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
