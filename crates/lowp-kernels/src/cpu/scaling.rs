//! Scale rules as types: how a block's amax becomes a stored scale and a multiplier.

use std::array;

use lowp_format::codec::e8m0;
use lowp_format::{
    FourOverSix, MxScale, ScaleRule, chooses_four, tensor_scale, two_level_block_factor,
    two_level_block_scale, two_level_encode_scale, two_level_multiplier,
};

use super::element::{E4M3_FLOAT, ElementCode, e2m1_rounded};
use crate::lanes::{LANES, Lanes, Line, Portable};

/// Memory for block scales of every type.
#[derive(Debug, Default)]
pub(crate) struct EntryScratch {
    bytes: Vec<u8>,
    floats: Vec<f32>,
}

/// One stored block scale.
pub(crate) trait ScaleEntry: Copy + Default + Send + Sync + 'static {
    /// Memory for entries of this type.
    fn scratch(scratch: &mut EntryScratch) -> &mut Vec<Self>;
    /// Bytes of one entry.
    const BYTES: usize;
    /// Entries that are bytes.
    fn as_bytes(_entries: &mut [Self]) -> Option<&mut [u8]> {
        None
    }
    /// Writes entries, little endian.
    fn store(entries: &[Self], bytes: &mut [u8]);
    /// Reads entries.
    fn load(bytes: &[u8], entries: &mut [Self]);
}

impl ScaleEntry for u8 {
    fn scratch(scratch: &mut EntryScratch) -> &mut Vec<u8> {
        &mut scratch.bytes
    }
    #[inline(always)]
    fn as_bytes(entries: &mut [u8]) -> Option<&mut [u8]> {
        Some(entries)
    }
    const BYTES: usize = 1;
    #[inline(always)]
    fn store(entries: &[u8], bytes: &mut [u8]) {
        bytes.copy_from_slice(entries);
    }
    #[inline(always)]
    fn load(bytes: &[u8], entries: &mut [u8]) {
        entries.copy_from_slice(bytes);
    }
}

impl ScaleEntry for f32 {
    fn scratch(scratch: &mut EntryScratch) -> &mut Vec<f32> {
        &mut scratch.floats
    }
    const BYTES: usize = 4;
    #[inline(always)]
    fn store(entries: &[f32], bytes: &mut [u8]) {
        for (bytes, entry) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(entries) {
            *bytes = entry.to_le_bytes();
        }
    }
    #[inline(always)]
    fn load(bytes: &[u8], entries: &mut [f32]) {
        for (bytes, entry) in bytes.as_chunks::<4>().0.iter().zip(entries) {
            *entry = f32::from_le_bytes(*bytes);
        }
    }
}

/// The arithmetic of scales. `tensor` is what a job's slot or tensor-scale buffer holds for the tensor or for a line.
pub(crate) trait ScaleKernel: Copy + Send + Sync + 'static {
    /// Whether blocks have scales.
    const BLOCKS: bool;
    /// Whether blocks choose between scales ([`ScaleKernel::choice`]).
    const CHOOSES: bool = false;
    /// One stored block scale.
    type Entry: ScaleEntry;

    /// The kernel of `rule`, if it is one of this kind.
    fn new(rule: ScaleRule, tensor: f32) -> Option<Self>;
    /// The stored scale of a block and the multiplier of its values. Without block scales: the
    /// multiplier of all values.
    fn encode<E: ElementCode>(self, amax: f32) -> (Self::Entry, f32);
    /// [`ScaleKernel::encode`] of sixteen blocks.
    #[inline(always)]
    fn encode_lanes<E: ElementCode, L: Lanes>(
        self,
        lanes: L,
        amaxes: L::F,
        entries: &mut [Self::Entry; LANES],
    ) -> L::F {
        let mut line = [0.0; LANES];
        lanes.store(amaxes, &mut line);
        for (x, entry) in line.iter_mut().zip(entries) {
            (*entry, *x) = self.encode::<E>(*x);
        }
        lanes.load(&line)
    }
    /// The rule that chooses, if it does.
    #[inline(always)]
    fn choice(self) -> Option<ChosenTwoLevel> {
        None
    }
    /// What decoded elements of one block are multiplied by.
    #[inline(always)]
    fn factor(self, entry: Self::Entry) -> f32 {
        let mut line = [0.0; LANES];
        let factors = self.decode_lanes(Portable, &[entry; LANES]);
        Portable.store(factors, &mut line);
        line[0]
    }
    /// What decoded elements of sixteen blocks are multiplied by.
    fn decode_lanes<L: Lanes>(self, lanes: L, entries: &[Self::Entry; LANES]) -> L::F;
}

/// Values are stored as they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unscaled;

impl ScaleKernel for Unscaled {
    const BLOCKS: bool = false;
    type Entry = u8;
    fn new(rule: ScaleRule, _: f32) -> Option<Self> {
        matches!(rule, ScaleRule::None).then_some(Self)
    }
    #[inline(always)]
    fn encode<E: ElementCode>(self, _: f32) -> (u8, f32) {
        (0, 1.0)
    }
    #[inline(always)]
    fn decode_lanes<L: Lanes>(self, lanes: L, _: &[u8; LANES]) -> L::F {
        lanes.splat(1.0)
    }
}

/// One scale for the tensor or a line (docs/numerics.md 4, 5 and 18): encoding multiplies by `tensor`, decoding
/// by its own `tensor`, the stored reciprocal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerTensor(f32);

impl ScaleKernel for PerTensor {
    const BLOCKS: bool = false;
    type Entry = u8;
    fn new(rule: ScaleRule, tensor: f32) -> Option<Self> {
        matches!(rule, ScaleRule::Delayed { .. } | ScaleRule::Current { .. })
            .then_some(Self(tensor))
    }
    #[inline(always)]
    fn encode<E: ElementCode>(self, _: f32) -> (u8, f32) {
        (0, self.0)
    }
    #[inline(always)]
    fn decode_lanes<L: Lanes>(self, lanes: L, _: &[u8; LANES]) -> L::F {
        lanes.splat(self.0)
    }
}

/// A power of two per block (docs/numerics.md 6).
#[derive(Clone, Copy, Debug)]
pub(crate) struct PowerOfTwo(MxScale);

impl ScaleKernel for PowerOfTwo {
    const BLOCKS: bool = true;
    type Entry = u8;
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
    fn encode_lanes<E: ElementCode, L: Lanes>(
        self,
        l: L,
        amaxes: L::F,
        entries: &mut [u8; LANES],
    ) -> L::F {
        let code = match self.0 {
            MxScale::Te => {
                let bits = l.bits(l.mul(amaxes, l.splat(1.0 / E::CODE.max_finite())));
                let exponent = l.shr::<23>(bits);
                // What the fraction must exceed to round up; subnormals begin at 2^-127.
                let exact = l.if_above(l.usplat(1), exponent, l.usplat(0x40_0000), l.usplat(0));
                let up = l.if_above(
                    l.and(bits, l.usplat(0x7F_FFFF)),
                    exact,
                    l.usplat(1),
                    l.usplat(0),
                );
                l.umin(l.uadd(exponent, up), l.usplat(0xFE))
            }
            MxScale::OcpFloor | MxScale::Even => {
                let half = match self.0 {
                    MxScale::Even => 1 << (22 - E::CODE.mantissa_bits()),
                    _ => 0,
                };
                let infinite = l.shr::<23>(l.bits(amaxes));
                let rounded = l.uadd(l.bits(amaxes), l.usplat(half));
                let exponent = l.shr::<23>(rounded);
                let emax = l.usplat(E::CODE.max_exponent().cast_unsigned());
                let code = l.if_above(emax, exponent, l.usplat(0), l.usub(exponent, emax));
                l.if_above(infinite, l.usplat(0xFE), l.usplat(0xFF), code)
            }
        };
        l.store_bytes(l.narrow(code), entries);
        let inverse = l.usub(l.usplat(0xFE), code);
        let power = l.if_above(
            l.usplat(1),
            inverse,
            l.usplat(0x40_0000),
            l.shl::<23>(inverse),
        );
        l.value(l.if_above(code, l.usplat(0xFE), l.usplat(f32::NAN.to_bits()), power))
    }
    #[inline(always)]
    fn decode_lanes<L: Lanes>(self, l: L, entries: &[u8; LANES]) -> L::F {
        let exponent = l.and(l.shl::<23>(l.signed(entries)), l.usplat(0x7F80_0000));
        // 2^-127 and NaN are the exponents 0 and 255 with the highest bit of the fraction.
        let after = l.and(l.uadd(exponent, l.usplat(1 << 23)), l.usplat(0x7F80_0000));
        let special = l.if_above(l.usplat(2 << 23), after, l.usplat(0x40_0000), l.usplat(0));
        l.value(l.or(exponent, special))
    }
}

/// An E4M3 scale per block under an amax (docs/numerics.md 7).
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwoLevel {
    amax: f32,
    encode_scale: f32,
    choice: FourOverSix,
}

impl TwoLevel {
    fn under(amax: f32, choice: FourOverSix) -> Self {
        let encode_scale = two_level_encode_scale(amax, choice);
        Self {
            amax,
            encode_scale,
            choice,
        }
    }
}

/// The multipliers of blocks whose scales have these codes, under amaxes with these decode scales.
#[inline(always)]
fn multipliers<L: Lanes>(l: L, codes: L::U, decode_scale: L::F) -> L::F {
    let product = l.mul(decoded_scales(l, codes), decode_scale);
    l.min(l.div(l.splat(1.0), product), l.splat(f32::MAX))
}

/// Nonnegative E4M3 codes as values, exactly: exponent and mantissa in place, then the bias.
#[inline(always)]
fn decoded_scales<L: Lanes>(l: L, codes: L::U) -> L::F {
    let bias = l.splat(f32::from_bits((127 + 120) << 23));
    l.mul(l.value(l.shl::<20>(codes)), bias)
}

impl ScaleKernel for TwoLevel {
    const BLOCKS: bool = true;
    type Entry = u8;
    fn new(rule: ScaleRule, amax: f32) -> Option<Self> {
        match rule {
            ScaleRule::TwoLevel {
                four_over_six: choice,
                ..
            } if !choice.is_on() => Some(Self::under(amax, choice)),
            _ => None,
        }
    }
    #[inline(always)]
    fn encode<E: ElementCode>(self, amax: f32) -> (u8, f32) {
        let entry = two_level_block_scale(amax, self.encode_scale);
        (entry, two_level_multiplier(entry, self.encode_scale))
    }
    #[inline(always)]
    fn encode_lanes<E: ElementCode, L: Lanes>(
        self,
        l: L,
        amaxes: L::F,
        entries: &mut [u8; LANES],
    ) -> L::F {
        let largest = l.splat(f32::MAX);
        let scaled = l.mul(amaxes, l.splat(two_level_block_factor(self.encode_scale)));
        let code = E4M3_FLOAT.encode::<20, 24, L>(l, l.min(scaled, largest));
        l.store_bytes(l.narrow(code), entries);
        multipliers(l, code, l.splat(1.0 / self.encode_scale))
    }
    #[inline(always)]
    fn decode_lanes<L: Lanes>(self, l: L, entries: &[u8; LANES]) -> L::F {
        let scale = E4M3_FLOAT.decode::<20, L>(l, l.signed(entries));
        let product = l.mul(scale, l.splat(self.amax));
        l.mul(product, l.splat(1.0 / self.choice.largest()))
    }
}

/// [`TwoLevel`] with a choice of four over six (docs/numerics.md 20.1).
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChosenTwoLevel(TwoLevel);

/// The candidates of sixteen blocks, for 6 and for 4: scales as codes, multipliers, and errors so far.
pub(crate) struct Candidates<L: Lanes> {
    choice: FourOverSix,
    /// Of the tensor, or of the line that each block lies in.
    amax: L::F,
    codes: [L::U; 2],
    multipliers: [L::F; 2],
    decoded: [L::F; 2],
    errors: [L::F; 2],
}

impl ChosenTwoLevel {
    /// The candidates of blocks with these amaxes, block `i` under `rules(i)`.
    #[inline(always)]
    pub(crate) fn candidates<L: Lanes>(
        l: L,
        rules: impl Fn(usize) -> Self,
        amaxes: L::F,
    ) -> Candidates<L> {
        let of_rules = |part: fn(TwoLevel) -> f32| l.load(&array::from_fn(|i| part(rules(i).0)));
        let encode_scale = of_rules(|rule| rule.encode_scale);
        let decode_scale = l.div(l.splat(1.0), encode_scale);
        let base = l.mul(l.div(amaxes, l.splat(6.0)), encode_scale);
        let codes = [base, l.mul(base, l.splat(1.5))]
            .map(|scale| E4M3_FLOAT.encode::<20, 24, L>(l, l.min(scale, l.splat(448.0))));
        Candidates {
            choice: rules(0).0.choice,
            amax: of_rules(|rule| rule.amax),
            codes,
            multipliers: codes.map(|code| multipliers(l, code, decode_scale)),
            decoded: codes.map(|code| decoded_scales(l, code)),
            errors: [l.splat(0.0); 2],
        }
    }

    /// The chosen scales and multipliers; `errors` are those of the candidates.
    #[inline(always)]
    pub(crate) fn chosen<L: Lanes>(
        l: L,
        candidates: &Candidates<L>,
        errors: [Line; 2],
        entries: &mut [u8; LANES],
        multipliers: &mut Line,
    ) {
        let mut codes = [[0; LANES]; 2];
        let mut factors = [[0.0; LANES]; 2];
        for i in 0..2 {
            l.store_bytes(l.narrow(candidates.codes[i]), &mut codes[i]);
            l.store(candidates.multipliers[i], &mut factors[i]);
        }
        let outputs = entries.iter_mut().zip(multipliers).enumerate();
        for (lane, (entry, multiplier)) in outputs {
            let four = usize::from(chooses_four([errors[0][lane], errors[1][lane]]));
            *entry = codes[four][lane];
            *multiplier = factors[four][lane];
        }
    }
}

impl<L: Lanes> Candidates<L> {
    /// Adds the errors of the next value of each block.
    #[inline(always)]
    pub(crate) fn add(&mut self, l: L, x: L::F) {
        for i in 0..2 {
            let value = e2m1_rounded(l, l.mul(x, self.multipliers[i]));
            let product = l.mul(l.mul(value, self.decoded[i]), self.amax);
            let decoded = l.div(product, l.splat(self.choice.largest()));
            let error = l.add(decoded, l.mul(x, l.splat(-1.0)));
            let term = if self.choice.squares() {
                l.mul(error, error)
            } else {
                l.value(l.and(l.bits(error), l.usplat(0x7FFF_FFFF)))
            };
            self.errors[i] = l.add(self.errors[i], term);
        }
    }

    /// The errors of the blocks so far.
    #[inline(always)]
    pub(crate) fn errors(&self, l: L) -> [Line; 2] {
        let mut lines = [[0.0; LANES]; 2];
        for i in 0..2 {
            l.store(self.errors[i], &mut lines[i]);
        }
        lines
    }
}

impl ScaleKernel for ChosenTwoLevel {
    const BLOCKS: bool = true;
    const CHOOSES: bool = true;
    type Entry = u8;
    fn new(rule: ScaleRule, amax: f32) -> Option<Self> {
        match rule {
            ScaleRule::TwoLevel {
                four_over_six: choice,
                ..
            } if choice.is_on() => Some(Self(TwoLevel::under(amax, choice))),
            _ => None,
        }
    }
    /// Without a choice: for 6.
    #[inline(always)]
    fn encode<E: ElementCode>(self, amax: f32) -> (u8, f32) {
        self.0.encode::<E>(amax)
    }
    #[inline(always)]
    fn choice(self) -> Option<ChosenTwoLevel> {
        Some(self)
    }
    #[inline(always)]
    fn decode_lanes<L: Lanes>(self, l: L, entries: &[u8; LANES]) -> L::F {
        self.0.decode_lanes(l, entries)
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
    type Entry = f32;
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
    fn decode_lanes<L: Lanes>(self, lanes: L, entries: &[f32; LANES]) -> L::F {
        lanes.load(entries)
    }
}

#[cfg(test)]
mod tests {
    use lowp_format::two_level_decode_factor;

    use super::*;
    use crate::lanes::{Isa, Kernel};

    /// The factors of all entries of one byte, as bits.
    struct Factors<R>(R);

    impl<R: ScaleKernel<Entry = u8>> Kernel for Factors<R> {
        type Out = Vec<u32>;
        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Vec<u32> {
            let entries: Vec<u8> = (0..=u8::MAX).collect();
            let mut found = vec![];
            for entries in entries.as_chunks::<LANES>().0 {
                let mut line = [0.0; LANES];
                lanes.store(self.0.decode_lanes(lanes, entries), &mut line);
                found.extend(line.map(f32::to_bits));
            }
            found
        }
    }

    /// One bit pattern for every NaN: arithmetic may choose any.
    fn canonical(bits: Vec<u32>) -> Vec<u32> {
        let nan = |bits: &u32| f32::from_bits(*bits).is_nan();
        let one = |bits| if nan(&bits) { 0x7FC0_0000 } else { bits };
        bits.into_iter().map(one).collect()
    }

    #[test]
    fn factors_are_those_of_the_definition() {
        let all = |decode: &dyn Fn(u8) -> f32| -> Vec<u32> {
            canonical((0..=u8::MAX).map(|x| decode(x).to_bits()).collect())
        };
        for isa in Isa::all() {
            let found = isa.run(Factors(PowerOfTwo(MxScale::Te)));
            assert_eq!(canonical(found), all(&e8m0::decode), "{isa:?}");
            for amax in [0.0, 1e-42, 0.3, 10.0, 1e38, f32::INFINITY, f32::NAN] {
                let rule = TwoLevel::new(ScaleRule::TWO_LEVEL, amax).expect("a rule");
                let expected = all(&|x| two_level_decode_factor(x, amax, FourOverSix::Off));
                assert_eq!(
                    canonical(isa.run(Factors(rule))),
                    expected,
                    "{isa:?} {amax}"
                );
            }
        }
    }
}
