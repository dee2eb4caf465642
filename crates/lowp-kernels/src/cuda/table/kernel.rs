//! The entry points of the compiled kernels.

use super::{HISTORY_THREADS, LONG_RING_BYTES, RING_BYTES, THREADS, WIDE_RING_BYTES};

/// One operation of the device: the name of its kernel and the threads of a block. Every kernel
/// takes `(tiles: *const Tile, jobs: *const Job, step: *const Step, flags: u32)`, runs one block per
/// tile and uses no dynamic shared memory but what [`Kernel::shared_bytes`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    Amax,
    AmaxRing,
    History,
    Encode,
    EncodeWideBf16,
    EncodeTransposedBf16,
    EncodeTransposedF32,
    EncodeE8m0Fp4F32,
    EncodeMixedBf16,
    EncodeMixedF32,
    EncodeBlocksBf16,
    EncodeBlocksF32,
    EncodeStreamBf16,
    EncodeStreamF32,
    EncodeRingFp8,
    EncodeRingTwoLevel,
    EncodeRingTwoLevelSquare,
    EncodeRingTwoLevelTransformed,
    EncodeRingTwoLevelRandom,
    EncodeRingE8m0Fp4,
    EncodeRingE8m0Fp8,
    EncodeRingTwoLevelE8m0,
    FlatEncode,
    Decode,
    DecodeBf16,
    Transpose,
    Repack,
    Interleave,
    Adamw,
    AdamwWide,
    AdamwTransposed,
    AdamwE8m0Fp4,
    AdamwOther,
    SumSquares,
    Sum,
    StepScalars,
}

impl Kernel {
    /// Every kernel.
    pub(crate) const ALL: [Kernel; 36] = [
        Kernel::Amax,
        Kernel::AmaxRing,
        Kernel::History,
        Kernel::Encode,
        Kernel::EncodeWideBf16,
        Kernel::EncodeTransposedBf16,
        Kernel::EncodeTransposedF32,
        Kernel::EncodeE8m0Fp4F32,
        Kernel::EncodeMixedBf16,
        Kernel::EncodeMixedF32,
        Kernel::EncodeBlocksBf16,
        Kernel::EncodeBlocksF32,
        Kernel::EncodeStreamBf16,
        Kernel::EncodeStreamF32,
        Kernel::EncodeRingFp8,
        Kernel::EncodeRingTwoLevel,
        Kernel::EncodeRingTwoLevelSquare,
        Kernel::EncodeRingTwoLevelTransformed,
        Kernel::EncodeRingTwoLevelRandom,
        Kernel::EncodeRingE8m0Fp4,
        Kernel::EncodeRingE8m0Fp8,
        Kernel::EncodeRingTwoLevelE8m0,
        Kernel::FlatEncode,
        Kernel::Decode,
        Kernel::DecodeBf16,
        Kernel::Transpose,
        Kernel::Repack,
        Kernel::Interleave,
        Kernel::Adamw,
        Kernel::AdamwWide,
        Kernel::AdamwTransposed,
        Kernel::AdamwE8m0Fp4,
        Kernel::AdamwOther,
        Kernel::SumSquares,
        Kernel::Sum,
        Kernel::StepScalars,
    ];

    /// The entry point in the module.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Kernel::Amax => "lowp_amax",
            Kernel::AmaxRing => "lowp_amax_ring",
            Kernel::History => "lowp_history",
            Kernel::Encode => "lowp_encode",
            Kernel::EncodeWideBf16 => "lowp_encode_wide_bf16",
            Kernel::EncodeTransposedBf16 => "lowp_encode_transposed_bf16",
            Kernel::EncodeTransposedF32 => "lowp_encode_transposed_f32",
            Kernel::EncodeE8m0Fp4F32 => "lowp_encode_e8m0_fp4_f32",
            Kernel::EncodeMixedBf16 => "lowp_encode_mixed_bf16",
            Kernel::EncodeMixedF32 => "lowp_encode_mixed_f32",
            Kernel::EncodeBlocksBf16 => "lowp_encode_blocks_bf16",
            Kernel::EncodeBlocksF32 => "lowp_encode_blocks_f32",
            Kernel::EncodeStreamBf16 => "lowp_encode_stream_bf16",
            Kernel::EncodeStreamF32 => "lowp_encode_stream_f32",
            Kernel::EncodeRingFp8 => "lowp_encode_ring_fp8",
            Kernel::EncodeRingTwoLevel => "lowp_encode_ring_two_level",
            Kernel::EncodeRingTwoLevelSquare => "lowp_encode_ring_two_level_square",
            Kernel::EncodeRingTwoLevelTransformed => "lowp_encode_ring_two_level_transformed",
            Kernel::EncodeRingTwoLevelRandom => "lowp_encode_ring_two_level_random",
            Kernel::EncodeRingE8m0Fp4 => "lowp_encode_ring_e8m0_fp4",
            Kernel::EncodeRingE8m0Fp8 => "lowp_encode_ring_e8m0_fp8",
            Kernel::EncodeRingTwoLevelE8m0 => "lowp_encode_ring_two_level_e8m0",
            Kernel::FlatEncode => "lowp_flat_encode",
            Kernel::Decode => "lowp_decode",
            Kernel::DecodeBf16 => "lowp_decode_bf16",
            Kernel::Transpose => "lowp_transpose",
            Kernel::Repack => "lowp_repack",
            Kernel::Interleave => "lowp_interleave",
            Kernel::Adamw => "lowp_adamw",
            Kernel::AdamwWide => "lowp_adamw_wide",
            Kernel::AdamwTransposed => "lowp_adamw_transposed",
            Kernel::AdamwE8m0Fp4 => "lowp_adamw_e8m0_fp4",
            Kernel::AdamwOther => "lowp_adamw_other",
            Kernel::SumSquares => "lowp_sum_squares",
            Kernel::Sum => "lowp_sum",
            Kernel::StepScalars => "lowp_step_scalars",
        }
    }

    /// Threads of a block.
    pub(crate) const fn threads(self) -> u32 {
        match self {
            Kernel::History => HISTORY_THREADS as u32,
            _ => THREADS as u32,
        }
    }

    /// Bytes of dynamic shared memory of a block.
    pub(crate) const fn shared_bytes(self) -> u32 {
        match self {
            Kernel::EncodeRingFp8 | Kernel::EncodeRingTwoLevelRandom => LONG_RING_BYTES,
            Kernel::EncodeRingTwoLevel
            | Kernel::EncodeRingTwoLevelSquare
            | Kernel::EncodeRingTwoLevelTransformed
            | Kernel::EncodeRingE8m0Fp4
            | Kernel::EncodeRingTwoLevelE8m0 => RING_BYTES,
            Kernel::EncodeRingE8m0Fp8 => WIDE_RING_BYTES,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_distinct_names() {
        let mut names = Kernel::ALL.map(Kernel::name);
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
