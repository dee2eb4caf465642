//! Masters and states of an update as they lie in memory, and the random bits that they round by.

use std::ops::Range;

use half::bf16;
use lowp_format::codec::bf16::round_stochastic;
use lowp_format::{STATE_BLOCK, StateBits, StateCode};

use super::convert::{Values, narrow};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::{KernelError, Source, State, UpdateRandom};

/// A master or a state of consecutive elements.
pub(super) enum StateMut<'v> {
    F32(&'v mut [f32]),
    /// A state, rounded to nearest even.
    Bf16(&'v mut [bf16]),
    /// A master, rounded stochastically.
    Master(&'v mut [bf16]),
    /// In whole blocks, each with a scale.
    Fp8 {
        code: StateCode,
        codes: &'v mut [u8],
        scales: &'v mut [u8],
    },
}

impl<'v> StateMut<'v> {
    /// All elements of a master.
    pub(super) fn master(
        master: &Source<Cpu>,
        views: &mut AllViews<'v>,
    ) -> Result<Self, KernelError> {
        Ok(match master {
            Source::F32(values) => Self::F32(views.floats.take(values)?),
            Source::Bf16(values) => Self::Master(views.halves.take(values)?),
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
            Self::Master(master) => Self::Master(cut(master, len)),
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

    /// The values, where they are not in blocks.
    pub(super) fn values(&self) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(values),
            Self::Bf16(values) | Self::Master(values) => Values::Bf16(values),
            Self::Fp8 { .. } => Values::F32(&[]),
        }
    }

    /// The values of a range that begins with a block.
    pub(super) fn widen(&self, range: Range<usize>, wide: &mut [f32]) {
        match self {
            Self::F32(state) => wide.copy_from_slice(&state[range]),
            Self::Bf16(state) | Self::Master(state) => {
                let values = state[range].iter().map(|x| x.to_f32());
                wide.iter_mut().zip(values).for_each(|(to, x)| *to = x);
            }
            Self::Fp8 {
                code,
                codes,
                scales,
            } => {
                let scales = &scales[range.start / STATE_BLOCK..];
                let blocks = codes[range].chunks(STATE_BLOCK).zip(scales);
                for (values, (codes, &scale)) in wide.chunks_mut(STATE_BLOCK).zip(blocks) {
                    code.decode_block(codes, scale, values);
                }
            }
        }
    }

    /// Replaces them, rounded by the random words of the elements.
    pub(super) fn narrow(&mut self, range: Range<usize>, wide: &[f32], words: &[u32]) {
        match self {
            Self::F32(state) => state[range].copy_from_slice(wide),
            Self::Bf16(state) => {
                let state = state[range].iter_mut();
                state.zip(wide).for_each(|(to, &x)| *to = narrow(x));
            }
            Self::Master(master) => {
                let values = wide.iter().zip(words);
                for (to, (&x, &word)) in master[range].iter_mut().zip(values) {
                    *to = round_stochastic(x, StateBits::of_word(word).master);
                }
            }
            Self::Fp8 {
                code,
                codes,
                scales,
            } => {
                let scales = &mut scales[range.start / STATE_BLOCK..];
                let blocks = codes[range].chunks_mut(STATE_BLOCK).zip(scales);
                let values = wide.chunks(STATE_BLOCK).zip(words.chunks(STATE_BLOCK));
                for ((values, words), (codes, scale)) in values.zip(blocks) {
                    let bits = |place| StateBits::of_word(words[place]).of(*code);
                    *scale = code.encode_block(values, bits, codes);
                }
            }
        }
    }
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
    pub(super) fn fill(&self, start: usize, words: &mut [u32]) {
        let philox = self.random.philox(self.step);
        let first = self.first + start;
        let mut rest = words;
        for run in self.random.runs(first..first + rest.len()) {
            let (words, after) = rest.split_at_mut(run.len());
            rest = after;
            // Four elements have the words of one counter.
            let mut at = run.start;
            let mut left = words;
            while !left.is_empty() {
                let place = at % 4;
                let count = (4 - place).min(left.len());
                let (words, after) = left.split_at_mut(count);
                words.copy_from_slice(&philox.block(at as u64 / 4)[place..place + count]);
                (at, left) = (at + count, after);
            }
        }
    }
}
