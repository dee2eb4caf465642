//! The table that a launch reads: the mirror of `cuda/include/lowp/jobs.cuh`, field by field.
//!
//! Plain data. A pointer is a device address as `u64`; 0 says that the buffer is absent. What is
//! derived from other fields (paths, tile counts, alignment) is filled by [`super::geometry`].

/// One operation of the device: the name of its kernel and the threads of a block. Every kernel
/// takes `(tiles: *const Tile, jobs: *const Job, step: *const Step, flags: u32)`, runs one block per
/// tile and uses no dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    Amax,
    History,
    Encode,
    EncodeWideBf16,
    EncodeTurnedBf16,
    EncodeTurnedF32,
    FlatEncode,
    Decode,
    Transpose,
    Repack,
    Interleave,
    Adamw,
    SumSquares,
}

impl Kernel {
    /// Every kernel.
    pub(crate) const ALL: [Kernel; 13] = [
        Kernel::Amax,
        Kernel::History,
        Kernel::Encode,
        Kernel::EncodeWideBf16,
        Kernel::EncodeTurnedBf16,
        Kernel::EncodeTurnedF32,
        Kernel::FlatEncode,
        Kernel::Decode,
        Kernel::Transpose,
        Kernel::Repack,
        Kernel::Interleave,
        Kernel::Adamw,
        Kernel::SumSquares,
    ];

    /// The entry point in the module.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Kernel::Amax => "lowp_amax",
            Kernel::History => "lowp_history",
            Kernel::Encode => "lowp_encode",
            Kernel::EncodeWideBf16 => "lowp_encode_wide_bf16",
            Kernel::EncodeTurnedBf16 => "lowp_encode_turned_bf16",
            Kernel::EncodeTurnedF32 => "lowp_encode_turned_f32",
            Kernel::FlatEncode => "lowp_flat_encode",
            Kernel::Decode => "lowp_decode",
            Kernel::Transpose => "lowp_transpose",
            Kernel::Repack => "lowp_repack",
            Kernel::Interleave => "lowp_interleave",
            Kernel::Adamw => "lowp_adamw",
            Kernel::SumSquares => "lowp_sum_squares",
        }
    }

    /// Threads of a block.
    pub(crate) const fn threads(self) -> u32 {
        match self {
            Kernel::History => 32,
            _ => 256,
        }
    }
}

/// Values of `Encode::source_code`, `element` and the like: `lowp_format::Code` in its order.
pub(crate) mod code {
    pub(crate) const E4M3: u8 = 0;
    pub(crate) const E5M2: u8 = 1;
    pub(crate) const E2M1: u8 = 2;
    pub(crate) const E8M0: u8 = 3;
    pub(crate) const BF16: u8 = 4;
    pub(crate) const F32: u8 = 5;
}

/// Values of `rule`.
pub(crate) mod rule {
    pub(crate) const NONE: u8 = 0;
    pub(crate) const TENSOR: u8 = 1;
    pub(crate) const E8M0_TE: u8 = 2;
    pub(crate) const E8M0_FLOOR: u8 = 3;
    pub(crate) const TWO_LEVEL: u8 = 4;
    pub(crate) const BLOCK_F32: u8 = 5;
}

/// Values of `Encode::path`.
pub(crate) mod path {
    pub(crate) const WIDE: u8 = 0;
    pub(crate) const TURNED: u8 = 1;
    pub(crate) const FLAT: u8 = 2;
    pub(crate) const GENERIC: u8 = 3;
}

/// Values of `Encode::forms`.
pub(crate) mod forms {
    pub(crate) const NONE: u8 = 0;
    pub(crate) const SWIZZLED: u8 = 1;
    pub(crate) const ANY: u8 = 2;
}

/// Bits of `Encode::vector`.
pub(crate) mod vector {
    pub(crate) const SOURCE: u8 = 1;
    pub(crate) const ROWS: [u8; 2] = [2, 4];
    pub(crate) const COLUMNS: [u8; 2] = [8, 16];
}

/// Values of `Amax::path`.
pub(crate) mod amax_path {
    pub(crate) const FLAT: u8 = 0;
    pub(crate) const TILES: u8 = 1;
    pub(crate) const GENERIC: u8 = 2;
}

/// Values of `Decode::path`.
pub(crate) mod decode_path {
    pub(crate) const GENERIC: u8 = 0;
    pub(crate) const WIDE: u8 = 1;
}

/// Values of `Repack::path`.
pub(crate) mod repack_path {
    pub(crate) const GENERIC: u8 = 0;
    pub(crate) const SWIZZLE: u8 = 1;
    pub(crate) const SWIZZLE_TURNED: u8 = 2;
    pub(crate) const SWIZZLE_SPREAD: u8 = 3;
}

/// Bits of the kernel parameter `flags`.
pub(crate) mod flags {
    /// Do nothing at all if `Step::skip` is not 0. Every launch has it, as a run on the CPU does.
    pub(crate) const HONOR_SKIP: u32 = 1;
}

macro_rules! plain {
    ($(#[$doc:meta])* struct $Name:ident { $($(#[$field_doc:meta])* $field:ident: $Type:ty,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        #[repr(C)]
        pub(crate) struct $Name {
            $($(#[$field_doc])* pub(crate) $field: $Type,)+
        }
    };
}

plain! {
    /// One thread block's work.
    struct Tile {
        job: u32,
        /// Tile within the job.
        index: u32,
    }
}

plain! {
    /// `AdamScalars`.
    struct AdamGroup {
        lr: f32,
        beta1: f32,
        beta2: f32,
        eps: f32,
        weight_decay: f32,
        correction1: f32,
        correction2: f32,
        reserved: u32,
    }
}

plain! {
    /// The header of the step's scalars; `AdamGroup`s follow it directly.
    struct Step {
        random_step: u64,
        grad_scale: f32,
        /// Not 0: launches with [`flags::HONOR_SKIP`] change nothing.
        skip: u32,
        reserved: [u64; 2],
    }
}

plain! {
    /// One part of `AmaxJob::blocks`.
    struct AmaxBlocks {
        /// Entry 0 of the part (`out + start`); 0 for no part.
        out: u64,
        rows: u32,
        cols: u32,
    }
}

plain! {
    /// `AmaxJob`; more than two block shapes make more jobs.
    struct Amax {
        /// Element `start` of the matrix.
        source: u64,
        rows: u64,
        cols: u64,
        start: u64,
        len: u64,
        tensor: u64,
        blocks: [AmaxBlocks; 2],
        first_row: u64,
        tiles_across: u64,
        source_code: u8,
        via_bf16: u8,
        path: u8,
        vector: u8,
        reserved: u32,
    }
}

plain! {
    /// `HistoryJob`.
    struct History {
        /// This job's entry.
        observed: u64,
        /// This job's entry.
        scale: u64,
        history: u64,
        window: u64,
        /// `max_finite * 2^-margin`.
        numerator: f32,
        most_recent: u8,
        reserved: [u8; 3],
    }
}

plain! {
    /// A buffer of block scales in another form than Compact.
    struct Scales {
        to: u64,
        /// Entries along the matrix's rows, padding included.
        rows: u64,
        /// The same along its columns.
        cols: u64,
        /// Elements of an entry: a side of the block, or 1 where its scale is repeated.
        tile_rows: u32,
        tile_cols: u32,
        /// Tiles of 128 x 4; else Padded.
        swizzled: u32,
        reserved: u32,
    }
}

plain! {
    /// The outputs of one quantization: what shares a block shape. Index 0 is row-major, 1
    /// transposed (physical rows follow the matrix's columns).
    struct Pass {
        data: [u64; 2],
        /// Compact.
        scale: [u64; 2],
        /// 0 where blocks have no scale.
        block_rows: u32,
        block_cols: u32,
        unit_rows: u32,
        unit_cols: u32,
        form: [Scales; 2],
    }
}

plain! {
    /// `EncodeJob`; within [`Adamw`] the source is the master. A second target of the same part and
    /// order makes another job.
    struct Encode {
        source: u64,
        rows: u64,
        cols: u64,
        /// The entry of the tensor slot, or 0.
        tensor: u64,
        /// The tensor-scale target, or 0.
        tensor_scale: u64,
        seed: u64,
        stream: u64,
        first: u64,
        pass: [Pass; 2],
        tiles_across: u64,
        tile_rows: u32,
        tile_cols: u32,
        epsilon: f32,
        pow2: u8,
        passes: u8,
        element: u8,
        rule: u8,
        source_code: u8,
        via_bf16: u8,
        stochastic: u8,
        path: u8,
        vector: u8,
        /// `tensor` holds an observed amax: its magnitude counts, and it is spent.
        observed: u8,
        /// Scales in other forms than Compact among the outputs.
        forms: u8,
        reserved: u8,
    }
}

plain! {
    /// `AdamwJob`; without an encode `encode.passes` is 0 and of its fields only `via_bf16` counts (the
    /// rounding of the amax).
    struct Adamw {
        master: u64,
        exp_avg: u64,
        exp_avg_sq: u64,
        grad: u64,
        /// The entry that is raised, or 0.
        amax: u64,
        len: u64,
        group: u32,
        moments_code: u8,
        grad_code: u8,
        l2: u8,
        reserved: u8,
        encode: Encode,
    }
}

plain! {
    /// The outputs of a flat encode that share a block shape.
    struct FlatPass {
        /// Entry 0 of this part of the agreed vector; 0 where blocks have no scale.
        amaxes: u64,
        /// Row-major codes from the first touched byte on, or 0.
        data: u64,
        /// Row-major, transposed.
        scale: [u64; 2],
        block_rows: u32,
        block_cols: u32,
    }
}

plain! {
    /// `FlatEncodeJob`.
    struct FlatEncode {
        /// Element `start`.
        source: u64,
        rows: u64,
        cols: u64,
        start: u64,
        len: u64,
        tensor: u64,
        tensor_scale: u64,
        pass: [FlatPass; 2],
        data_tiles: u64,
        scale_tiles: [u64; 2],
        epsilon: f32,
        pow2: u8,
        passes: u8,
        element: u8,
        rule: u8,
        source_code: u8,
        via_bf16: u8,
        /// As [`Encode::observed`].
        observed: u8,
        reserved: [u8; 5],
    }
}

plain! {
    /// `DecodeJob`.
    struct Decode {
        data: u64,
        scale: u64,
        /// The tensor-scale buffer (4-byte aligned), or 0.
        tensor: u64,
        out: u64,
        rows: u64,
        cols: u64,
        data_pitch: u64,
        scale_pitch: u64,
        tiles_across: u64,
        block_rows: u32,
        block_cols: u32,
        element: u8,
        rule: u8,
        data_transposed: u8,
        scale_transposed: u8,
        vector: u8,
        path: u8,
        reserved: [u8; 2],
    }
}

plain! {
    /// `TransposeJob`.
    struct Transpose {
        from: u64,
        to: u64,
        outer: u64,
        inner: u64,
        from_pitch: u64,
        to_pitch: u64,
        tiles_across: u64,
        bits: u8,
        vector: u8,
        reserved: [u8; 6],
    }
}

plain! {
    /// `lowp_format::ScaleLayout`.
    struct Layout {
        tile: [u64; 2],
        entries: [u64; 2],
        padded: [u64; 2],
        swizzled: u32,
        /// Physical axis 0 follows the columns.
        cols_first: u32,
    }
}

plain! {
    /// `RepackJob`.
    struct Repack {
        from: u64,
        to: u64,
        from_layout: Layout,
        to_layout: Layout,
        tiles_across: u64,
        /// Bytes of `to`.
        bytes: u64,
        bits: u8,
        path: u8,
        vector: u8,
        /// [`repack_path::SWIZZLE_SPREAD`]: outer entries of `to` that share an entry of `from`, as a
        /// power of two.
        spread: u8,
        reserved: [u8; 4],
    }
}

plain! {
    /// One piece of an `InterleaveJob`; pieces of width 0 make no job.
    struct Interleave {
        /// The first byte of the piece.
        from: u64,
        /// Its first byte in the result.
        to: u64,
        outer: u64,
        width: u64,
        /// Bytes of a row of the result.
        pitch: u64,
        vector: u64,
    }
}

plain! {
    /// Scratch: the sum of a run of 4096 elements, or of 4096 such sums.
    struct RunSum {
        sum: f64,
        odd: u64,
    }
}

plain! {
    /// Scratch: the sum of one job.
    struct SumTotal {
        sum: f64,
        odd: u64,
        done: u64,
    }
}

plain! {
    /// `SumSquaresJob`. Scratch of a plan: per job [`RunSum`]s (of its runs, then of runs of them), one
    /// [`SumTotal`] per job, one `u64`. It is zeroed once, when it is allocated; a run leaves it so.
    struct SumSquares {
        source: u64,
        len: u64,
        out: u64,
        /// `RunSum`s of this job.
        runs: u64,
        /// `SumTotal`s of the plan, the same in every job.
        totals: u64,
        /// The `u64` of the plan, the same in every job.
        state: u64,
        /// Jobs of the plan.
        jobs: u64,
        tiles: u32,
        source_code: u8,
        vector: u8,
        reserved: [u8; 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, offset_of, size_of};

    #[test]
    fn sizes_and_offsets_are_those_of_the_device() {
        assert_eq!(
            [size_of::<Tile>(), size_of::<AdamGroup>(), size_of::<Step>()],
            [8, 32, 32]
        );
        assert_eq!([size_of::<Amax>(), offset_of!(Amax, blocks)], [104, 48]);
        assert_eq!(offset_of!(Amax, source_code), 96);
        assert_eq!(
            [
                size_of::<History>(),
                offset_of!(History, most_recent),
                size_of::<Scales>()
            ],
            [40, 36, 40]
        );
        assert_eq!(
            [
                size_of::<Pass>(),
                size_of::<Encode>(),
                offset_of!(Encode, pass)
            ],
            [128, 352, 64]
        );
        assert_eq!(
            [
                offset_of!(Encode, tiles_across),
                offset_of!(Encode, observed)
            ],
            [320, 349]
        );
        assert_eq!([size_of::<Adamw>(), offset_of!(Adamw, encode)], [408, 56]);
        assert_eq!([size_of::<FlatPass>(), size_of::<FlatEncode>()], [40, 176]);
        assert_eq!(offset_of!(FlatEncode, epsilon), 160);
        assert_eq!([size_of::<Decode>(), offset_of!(Decode, element)], [88, 80]);
        assert_eq!(
            [
                size_of::<Transpose>(),
                size_of::<Layout>(),
                size_of::<Repack>()
            ],
            [64, 56, 152]
        );
        assert_eq!(
            [
                size_of::<Interleave>(),
                size_of::<RunSum>(),
                size_of::<SumTotal>()
            ],
            [48, 16, 24]
        );
        assert_eq!(
            [size_of::<SumSquares>(), offset_of!(SumSquares, tiles)],
            [64, 56]
        );
        assert_eq!(
            [align_of::<Encode>(), align_of::<Step>(), align_of::<Tile>()],
            [8, 8, 4]
        );
    }

    #[test]
    fn kernels_have_distinct_names() {
        let mut names = Kernel::ALL.map(Kernel::name);
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
