//! States of an update as they lie in memory, and the random bits that those in fp8 round by.

use std::ops::Range;

use half::bf16;
use lowp_format::{STATE_BLOCK, StateBits, StateCode};

use super::convert::narrow;
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::{KernelError, Source, State, UpdateRandom};

/// A state of consecutive elements.
pub(super) enum StateMut<'v> {
    F32(&'v mut [f32]),
    Bf16(&'v mut [bf16]),
    /// In whole blocks, each with a scale.
    Fp8 {
        code: StateCode,
        codes: &'v mut [u8],
        scales: &'v mut [u8],
    },
}

impl<'v> StateMut<'v> {
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

    /// The values of a range that begins with a block.
    pub(super) fn widen(&self, range: Range<usize>, wide: &mut [f32]) {
        match self {
            Self::F32(state) => wide.copy_from_slice(&state[range]),
            Self::Bf16(state) => {
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

    /// Replaces them, rounded by the random bits of the elements.
    pub(super) fn narrow(&mut self, range: Range<usize>, wide: &[f32], bits: &[StateBits]) {
        match self {
            Self::F32(state) => state[range].copy_from_slice(wide),
            Self::Bf16(state) => {
                let state = state[range].iter_mut();
                state.zip(wide).for_each(|(to, &x)| *to = narrow(x));
            }
            Self::Fp8 {
                code,
                codes,
                scales,
            } => {
                let scales = &mut scales[range.start / STATE_BLOCK..];
                let blocks = codes[range].chunks_mut(STATE_BLOCK).zip(scales);
                let values = wide.chunks(STATE_BLOCK).zip(bits.chunks(STATE_BLOCK));
                for ((values, bits), (codes, scale)) in values.zip(blocks) {
                    *scale = code.encode_block(values, |place| bits[place].of(*code), codes);
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
    /// Those of the elements from `start` of the part on, where a block begins.
    pub(super) fn fill(&self, start: usize, bits: &mut [StateBits]) {
        let philox = self.random.philox(self.step);
        for (number, block) in bits.chunks_mut(STATE_BLOCK).enumerate() {
            let place = self.random.place(self.first + start + number * STATE_BLOCK);
            // Elements of a block follow each other, four with the words of one counter.
            for (number, four) in (0..).zip(block.chunks_mut(4)) {
                let words = philox.block(place as u64 / 4 + number);
                let words = words.map(StateBits::of_word);
                four.copy_from_slice(&words[..four.len()]);
            }
        }
    }
}
