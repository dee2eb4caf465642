//! Masters and states of an update as they lie in memory, and the random bits that they round by.

use std::ops::Range;

use half::bf16;
use lowp_format::codec::bf16::round_stochastic;
use lowp_format::codec::e8m0;
use lowp_format::codec::remainder::{join, split};
use lowp_format::{Philox, STATE_BLOCK, StateBits, StateCode};

use super::convert::{FloatSlice, narrow};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::lanes::{Isa, Kernel, LANES, Lanes};
use crate::rounding::bf16_value;
use crate::{KernelError, Master, Source, State, UpdateRandom};

/// A master or a state of consecutive elements.
pub(super) enum StoredMut<'v> {
    F32(&'v mut [f32]),
    /// A state, rounded to nearest even.
    Bf16(&'v mut [bf16]),
    /// A master, rounded stochastically.
    StochasticBf16(&'v mut [bf16]),
    /// A master in halves.
    Bf16Plus16 {
        parameter: &'v mut [u8],
        remainder: &'v mut [u8],
    },
    /// In whole blocks, each with a scale.
    Fp8 {
        code: StateCode,
        codes: &'v mut [u8],
        scales: &'v mut [u8],
    },
}

impl<'v> StoredMut<'v> {
    /// All elements of a master.
    pub(super) fn master(
        master: &Master<Cpu>,
        views: &mut AllViews<'v>,
    ) -> Result<Self, KernelError> {
        Ok(match master {
            Master::Values(Source::F32(values)) => Self::F32(views.floats.take(values)?),
            Master::Values(Source::Bf16(values)) => {
                Self::StochasticBf16(views.halves.take(values)?)
            }
            Master::Bf16Plus16 {
                parameter,
                remainder,
            } => Self::Bf16Plus16 {
                parameter: views.bytes.take(parameter)?,
                remainder: views.bytes.take(remainder)?,
            },
        })
    }

    /// All elements of a state, which is encoded as `code` in fp8.
    pub(super) fn take(
        state: &State<Cpu>,
        code: StateCode,
        views: &mut AllViews<'v>,
    ) -> Result<Self, KernelError> {
        Ok(match state {
            State::Values(Source::F32(values)) => Self::F32(views.floats.take(values)?),
            State::Values(Source::Bf16(values)) => Self::Bf16(views.halves.take(values)?),
            State::Fp8(bytes) => {
                let (codes, scales) = views.bytes.take(bytes)?.split_at_mut(state.len(&Cpu));
                Self::Fp8 {
                    code,
                    codes,
                    scales,
                }
            }
        })
    }

    /// Cuts off the first `len` elements.
    pub(super) fn split_off(&mut self, len: usize) -> Self {
        fn cut<'v, T>(slice: &mut &'v mut [T], len: usize) -> &'v mut [T] {
            let (head, tail) = std::mem::take(slice).split_at_mut(len);
            *slice = tail;
            head
        }
        match self {
            Self::F32(state) => Self::F32(cut(state, len)),
            Self::Bf16(state) => Self::Bf16(cut(state, len)),
            Self::StochasticBf16(master) => Self::StochasticBf16(cut(master, len)),
            Self::Bf16Plus16 {
                parameter,
                remainder,
            } => Self::Bf16Plus16 {
                parameter: cut(parameter, 2 * len),
                remainder: cut(remainder, 2 * len),
            },
            Self::Fp8 {
                code,
                codes,
                scales,
            } => Self::Fp8 {
                code: *code,
                codes: cut(codes, len),
                scales: cut(scales, len.div_ceil(STATE_BLOCK)),
            },
        }
    }

    /// The values, where they are neither in blocks nor in halves.
    pub(super) fn values(&self) -> FloatSlice<'_> {
        match self {
            Self::F32(values) => FloatSlice::F32(values),
            Self::Bf16(values) | Self::StochasticBf16(values) => FloatSlice::Bf16(values),
            Self::Fp8 { .. } | Self::Bf16Plus16 { .. } => FloatSlice::F32(&[]),
        }
    }

    /// The values of a range that begins with a block.
    pub(super) fn widen(&self, isa: Isa, range: Range<usize>, wide: &mut [f32]) {
        let state = self;
        isa.run(Widen { state, range, wide });
    }

    /// Replaces them, rounded by the random words of the elements.
    pub(super) fn narrow(&mut self, isa: Isa, range: Range<usize>, wide: &[f32], words: &[u32]) {
        isa.run(Narrow {
            state: self,
            range,
            wide,
            words,
        });
    }
}

struct Widen<'a, 'v> {
    state: &'a StoredMut<'v>,
    range: Range<usize>,
    wide: &'a mut [f32],
}

impl Kernel for Widen<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { state, range, wide } = self;
        match state {
            StoredMut::F32(values) => wide.copy_from_slice(&values[range]),
            StoredMut::Bf16(values) | StoredMut::StochasticBf16(values) => {
                for (to, &x) in wide.iter_mut().zip(&values[range]) {
                    *to = bf16_value(x);
                }
            }
            StoredMut::Bf16Plus16 {
                parameter,
                remainder,
            } => {
                let parameters = &parameter.as_chunks::<2>().0[range.clone()];
                let remainders = &remainder.as_chunks::<2>().0[range];
                for ((to, &p), &r) in wide.iter_mut().zip(parameters).zip(remainders) {
                    *to = join(bf16::from_le_bytes(p), i16::from_le_bytes(r));
                }
            }
            StoredMut::Fp8 {
                code,
                codes,
                scales,
            } => {
                let scales = &scales[range.start / STATE_BLOCK..];
                let codes = &codes[range];
                match code {
                    StateCode::E4M3 => decode(lanes, StateCode::E4M3, codes, scales, wide),
                    StateCode::UE4M4 => decode(lanes, StateCode::UE4M4, codes, scales, wide),
                }
            }
        }
    }
}

/// Decodes blocks: whole ones by lanes, and the last one as the definition does.
#[inline(always)]
fn decode<L: Lanes>(lanes: L, code: StateCode, codes: &[u8], scales: &[u8], values: &mut [f32]) {
    let (blocks, last) = codes.as_chunks::<STATE_BLOCK>();
    let (wide, last_values) = values.as_chunks_mut::<STATE_BLOCK>();
    for ((codes, values), &scale) in blocks.iter().zip(wide).zip(scales) {
        let scale = lanes.splat(e8m0::decode(scale));
        let lines = codes.as_chunks::<LANES>().0.iter();
        for (codes, line) in lines.zip(values.as_chunks_mut::<LANES>().0) {
            let value = decode_line(lanes, code, codes);
            lanes.store(lanes.mul(value, scale), line);
        }
    }
    if let Some(&scale) = scales.get(blocks.len()) {
        code.decode_block(last, scale, last_values);
    }
}

/// The values of codes without their scale: exponents and mantissas in place, rebiased. Codes below the smallest normal one get its exponent, and
/// its value is subtracted, so that nothing is subnormal (docs/notes/cpu-kernels.md).
#[inline(always)]
fn decode_line<L: Lanes>(lanes: L, code: StateCode, codes: &[u8; LANES]) -> L::F {
    let l = lanes;
    let bits = l.signed(codes);
    match code {
        StateCode::E4M3 => {
            let magnitude = l.and(bits, l.usplat(0x7F));
            let bits_of = l.shl::<20>(magnitude);
            let normal = l.uadd(bits_of, l.usplat((127 - 7) << 23));
            let below = l.value(l.uadd(bits_of, l.usplat((127 - 6) << 23)));
            let below = l.bits(l.add(below, l.splat(-1.0 / 64.0)));
            let value = l.if_above(magnitude, l.usplat(0x07), normal, below);
            let nan = l.usplat(f32::NAN.to_bits());
            let value = l.if_above(magnitude, l.usplat(0x7E), nan, value);
            let sign = l.and(bits, l.usplat(0x8000_0000));
            l.value(l.or(value, sign))
        }
        StateCode::UE4M4 => {
            let magnitude = l.and(bits, l.usplat(0xFF));
            let bits_of = l.shl::<19>(magnitude);
            let normal = l.uadd(bits_of, l.usplat((127 - 15) << 23));
            let below = l.value(l.uadd(bits_of, l.usplat((127 - 14) << 23)));
            let below = l.bits(l.add(below, l.splat(-1.0 / 16384.0)));
            l.value(l.if_above(magnitude, l.usplat(0x0F), normal, below))
        }
    }
}

struct Narrow<'a, 'v> {
    state: &'a mut StoredMut<'v>,
    range: Range<usize>,
    wide: &'a [f32],
    /// A random word for each of the values.
    words: &'a [u32],
}

impl Kernel for Narrow<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self {
            state,
            range,
            wide,
            words,
        } = self;
        match state {
            StoredMut::F32(values) => values[range].copy_from_slice(wide),
            StoredMut::Bf16(values) => {
                for (to, &x) in values[range].iter_mut().zip(wide) {
                    *to = narrow(x);
                }
            }
            StoredMut::StochasticBf16(values) => {
                for ((to, &x), &word) in values[range].iter_mut().zip(wide).zip(words) {
                    *to = round_stochastic(x, StateBits::of_word(word).master);
                }
            }
            StoredMut::Bf16Plus16 {
                parameter,
                remainder,
            } => {
                let parameters = &mut parameter.as_chunks_mut::<2>().0[range.clone()];
                let remainders = &mut remainder.as_chunks_mut::<2>().0[range];
                for ((p, r), &x) in parameters.iter_mut().zip(remainders).zip(wide) {
                    let (parameter, remainder) = split(x);
                    (*p, *r) = (parameter.to_le_bytes(), remainder.to_le_bytes());
                }
            }
            StoredMut::Fp8 {
                code,
                codes,
                scales,
            } => {
                let scales = &mut scales[range.start / STATE_BLOCK..];
                let codes = &mut codes[range];
                match code {
                    StateCode::E4M3 => encode(lanes, StateCode::E4M3, wide, words, codes, scales),
                    StateCode::UE4M4 => encode(lanes, StateCode::UE4M4, wide, words, codes, scales),
                }
            }
        }
    }
}

/// Encodes blocks: whole ones first, whose loops have a known length.
#[inline(always)]
fn encode<L: Lanes>(
    lanes: L,
    code: StateCode,
    values: &[f32],
    words: &[u32],
    codes: &mut [u8],
    scales: &mut [u8],
) {
    let (blocks, last) = values.as_chunks::<STATE_BLOCK>();
    let (block_words, last_words) = words.as_chunks::<STATE_BLOCK>();
    let (block_codes, last_codes) = codes.as_chunks_mut::<STATE_BLOCK>();
    let mut amaxes = [0.0; 4];
    let all = block_words.iter().zip(block_codes).zip(&mut *scales);
    for (at, ((words, codes), scale)) in all.enumerate() {
        if at % 4 == 0 {
            amaxes = maxima(lanes, &blocks[at..]);
        }
        *scale = code.scale(amaxes[at % 4]);
        let bits = |place: usize| StateBits::of_word(words[place]).of(code);
        code.encode_under(*scale, &blocks[at], bits, codes);
    }
    if !last.is_empty() {
        let bits = |place: usize| StateBits::of_word(last_words[place]).of(code);
        scales[blocks.len()] = code.encode_block(last, bits, last_codes);
    }
}

/// The amaxes of the first four blocks, as far as there are some.
#[inline(always)]
fn maxima<L: Lanes>(lanes: L, blocks: &[[f32; STATE_BLOCK]]) -> [f32; 4] {
    let mut amaxes = [lanes.splat(0.0); 4];
    for (amax, block) in amaxes.iter_mut().zip(blocks) {
        for line in block.as_chunks::<LANES>().0 {
            *amax = lanes.raise(*amax, lanes.load(line));
        }
    }
    lanes.maxima(amaxes)
}

/// The random bits of a part of an update.
pub(super) struct RandomBits {
    pub(super) random: UpdateRandom,
    /// [`crate::StepScalars::random_step`].
    pub(super) step: u64,
    /// The first element of the part.
    pub(super) first: usize,
}

impl RandomBits {
    /// The random words of the elements from `start` of the part on.
    pub(super) fn fill(&self, isa: Isa, start: usize, words: &mut [u32]) {
        let philox = self.random.philox(self.step);
        let first = self.first + start;
        let mut rest = words;
        for run in self.random.runs(first..first + rest.len()) {
            let (words, after) = rest.split_at_mut(run.len());
            rest = after;
            let first = run.start;
            isa.run(Words {
                philox,
                first,
                words,
            });
        }
    }
}

/// The random words of elements of the flattened matrix that follow each other.
struct Words<'a> {
    philox: Philox,
    first: usize,
    words: &'a mut [u32],
}

impl Kernel for Words<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        /// Counter blocks at a time.
        const BLOCKS: usize = 16;
        let Self {
            philox,
            mut first,
            words,
        } = self;
        // Four elements have the words of one counter, of which the first may have begun before.
        let begun = first.next_multiple_of(4) - first;
        let (head, rest) = words.split_at_mut(begun.min(words.len()));
        if !head.is_empty() {
            let block = philox.block(first as u64 / 4);
            head.copy_from_slice(&block[first % 4..][..head.len()]);
            first += head.len();
        }
        let (parts, last) = rest.as_chunks_mut::<{ 4 * BLOCKS }>();
        for part in parts {
            let blocks = philox.blocks::<BLOCKS>(first as u64 / 4);
            for (i, four) in part.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                for (word, block) in four.iter_mut().zip(&blocks) {
                    *word = block[i];
                }
            }
            first += 4 * BLOCKS;
        }
        for four in last.chunks_mut(4) {
            let block = philox.block(first as u64 / 4);
            four.copy_from_slice(&block[..four.len()]);
            first += 4;
        }
    }
}
