//! The structs of the table: jobs as the device reads them.
//!
//! A pointer is a device address as `u64`; 0 says that the buffer is absent. What follows from other
//! fields (paths, tile counts, alignment) is filled by `Job::lay_out` of `ops`.

use super::declare::{Field, Shared, structs, structure};

structs! {
    /// One thread block's work.
    struct Tile {
        job: u32,
        /// Tile within the job.
        index: u32,
    }

    /// The scalars of one parameter group (numerics 12).
    struct GroupScalars {
        lr: f32,
        beta1: f32,
        beta2: f32,
        eps: f32,
        weight_decay: f32,
        correction1: f32,
        correction2: f32,
        /// Not 0: lowp_step_scalars makes the corrections of the betas.
        bias_correction: u32,
    }

    /// What changes from run to run. The `GroupScalars`s follow this header directly.
    struct Step {
        /// Separates the random numbers of this run from those of others.
        random_step: u64,
        /// Gradients are multiplied by this before use.
        grad_scale: f32,
        /// Not 0: launches with FLAG_HONOR_SKIP change nothing.
        skip: u32,
        /// lowp_step_scalars scales gradients of a larger norm down to it.
        max_norm: f32,
        /// Groups that follow.
        groups: u32,
        reserved: u64,
    }

    /// One part of `AmaxJob::blocks`.
    struct AmaxBlocks {
        /// float*: entry 0 of the row-major array of this part; 0: no such part.
        out: u64,
        /// Sides of a block.
        rows: u32,
        cols: u32,
    }

    /// `AmaxJob`: out = max(out, amax) for a tensor and for blocks of up to two shapes, over the elements
    /// start .. start + len of a flattened matrix. More block shapes make more jobs.
    struct Amax {
        /// Element `start` of the matrix.
        source: u64,
        rows: u64,
        cols: u64,
        start: u64,
        len: u64,
        /// float* or 0.
        tensor: u64,
        /// The same of values after the Hadamard transform of groups of 16 rows; with it there are no blocks.
        transformed: u64,
        blocks: [AmaxBlocks; 2],
        /// AMAX_TILES: the row that tile 0 begins at, a multiple of AMAX_ROWS.
        first_row: u64,
        /// AMAX_TILES: tiles along the columns.
        tiles_across: u64,
        /// F32 or BF16.
        source_code: u8,
        /// Round the source to bf16 first.
        via_bf16: u8,
        /// AmaxPath.
        path: u8,
        /// 16-byte loads stay aligned.
        vector: u8,
        reserved: [u8; 4],
    }

    /// `HistoryJob`: one warp each.
    struct History {
        /// float*: this job's entry.
        observed: u64,
        /// float*: this job's entry.
        scale: u64,
        /// float*.
        history: u64,
        /// Entries of the history.
        window: u64,
        /// f32(max_finite * 2^-margin).
        numerator: f32,
        most_recent: u8,
        reserved: [u8; 3],
    }

    /// A buffer of block scales in another form than Compact.
    struct Scales {
        /// 0: none.
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

    /// What one orientation is made of: `lowp_format::KernelKey`, and what is known of its tensor or lines.
    struct Ingredients {
        /// float*: encode scales or amaxes of the tensor or its lines; 0: none.
        tensor: u64,
        /// Two-level rules: 6 times the largest block scale.
        largest: f32,
        /// RULE_BLOCK_F32; RULE_TENSOR of observed amaxes.
        epsilon: f32,
        /// The same.
        pow2: u8,
        /// Code.
        element: u8,
        /// Rule.
        rule: u8,
        /// Extent of what `tensor` holds.
        extent: u8,
        /// `tensor` holds observed amaxes: their magnitudes count, and the run consumes them.
        observed: u8,
        /// RULE_FOUR_OVER_SIX: errors are squared.
        squares: u8,
        /// Groups of 16 rows are transformed first.
        hadamard: u8,
        reserved: u8,
    }

    /// Scales or amaxes of a tensor or its lines, and where they are written to.
    struct Outer {
        ingredients: Ingredients,
        /// float*, or 0.
        to: u64,
    }

    /// The outputs of one quantization. Index 0 is row-major, 1 transposed
    /// (physical rows follow the matrix's columns).
    struct Pass {
        ingredients: Ingredients,
        data: [u64; 2],
        /// Compact.
        scale: [u64; 2],
        /// Sides of a block; 0 where blocks have no scale.
        block_rows: u32,
        block_cols: u32,
        /// PATH_GENERIC: what the threads of a block do at a time.
        unit_rows: u32,
        unit_cols: u32,
        form: [Scales; 2],
    }

    /// `EncodeJob`; within `Update` the source is the master. A second target of the same part and order
    /// makes another job.
    struct Encode {
        source: u64,
        rows: u64,
        cols: u64,
        /// By orientation, rowwise first; one that is of no use has no rule.
        outer: [Outer; 2],
        /// Of stochastic rounding, as `stream` and `first`.
        seed: u64,
        stream: u64,
        first: u64,
        pass: [Pass; 2],
        tiles_across: u64,
        tile_rows: u32,
        tile_cols: u32,
        /// 0, 1 or 2.
        passes: u8,
        /// F32 or BF16.
        source_code: u8,
        /// Round the source to bf16 first.
        via_bf16: u8,
        stochastic: u8,
        /// Path.
        path: u8,
        /// Bits of Vector.
        vector: u8,
        /// Forms.
        forms: u8,
        reserved: u8,
    }

    /// `UpdateJob`; without an encode `encode.passes` is 0, of its fields only `via_bf16` counts (the
    /// rounding of the amax), and its path is PATH_FLAT.
    struct Update {
        master: u64,
        /// Those of the rule; 0 where it has fewer.
        states: [u64; 2],
        grad: u64,
        /// float* raised to the amax of the new master, or 0.
        amax: u64,
        /// float*: entry 0 of the amaxes of its rows, and of its columns; or 0.
        lines: [u64; 2],
        len: u64,
        group: u32,
        /// F32 or BF16, of each state.
        state_codes: [u8; 2],
        /// F32 or BF16.
        grad_code: u8,
        /// UpdateRule.
        rule: u8,
        encode: Encode,
    }

    /// `UpdateJob` with a state in fp8, or a master in bf16 or in two halves (numerics 23). The codes of a state in fp8 are followed by the
    /// scales of its blocks. `update` says nothing of how states are stored.
    struct StoredUpdate {
        update: Update,
        /// Of the random bits, without the step.
        seed: u64,
        stream: u64,
        /// The first element in the flattened tall matrix.
        first: u64,
        /// Rows and columns of a shard tile; 0 where the tall matrix is the matrix.
        tile_rows: u64,
        tile_cols: u64,
        /// Tiles side by side.
        tiles_across: u64,
        /// Of masters in halves, whose parameters are `update.master`; or 0.
        remainder: u64,
        /// Stored: of the master.
        master: u8,
        /// Stored: of each state. The second is in UE4M4 where it is in fp8, the first in E4M3.
        states: [u8; 2],
        reserved: [u8; 5],
        /// Whole lines of memory.
        reserved_line: [u64; 8],
    }

    /// The outputs of a flat encode of one orientation.
    struct FlatPass {
        ingredients: Ingredients,
        /// float*: entry 0 of this part of the agreed vector, which the run consumes; 0: no blocks.
        amaxes: u64,
        /// Row-major codes; byte 0 is the first that element `start` touches; or 0.
        data: u64,
        /// Row-major, transposed.
        scale: [u64; 2],
        block_rows: u32,
        block_cols: u32,
        /// FlatWalk.
        walk: u8,
        /// The codes of four elements of a row are stored at once.
        aligned: u8,
        reserved: [u8; 6],
    }

    /// `FlatEncodeJob`. Data are those of elements start .. start + len; scales are whole arrays.
    struct FlatEncode {
        /// Element `start`.
        source: u64,
        rows: u64,
        cols: u64,
        start: u64,
        len: u64,
        outer: [Outer; 2],
        pass: [FlatPass; 2],
        /// Tiles of codes: of as many warps as a thread block has, or runs of elements, cut at multiples of FLAT_ENCODE_RUN.
        data_tiles: u64,
        /// Those of the scales of each pass: runs of blocks, or tiles where they are stored transposed. They are spread
        /// among the others.
        scale_tiles: [u64; 2],
        /// Where the first warp begins, a multiple of FLAT_WARP_ROWS.
        first_row: u64,
        /// Warps along the columns.
        tiles_across: u64,
        passes: u8,
        source_code: u8,
        via_bf16: u8,
        /// No pass walks FLAT_ANY.
        tiled: u8,
        /// Loads of four elements stay aligned in every row.
        vector: u8,
        reserved: [u8; 3],
    }

    /// `DecodeJob`.
    struct Decode {
        /// Codes.
        data: u64,
        /// Block scales, or 0.
        scale: u64,
        /// `tensor` holds the bytes of decode scales, or of amaxes.
        ingredients: Ingredients,
        /// Values of `out_code`.
        out: u64,
        rows: u64,
        cols: u64,
        /// Bytes of a physical row.
        data_pitch: u64,
        scale_pitch: u64,
        tiles_across: u64,
        block_rows: u32,
        block_cols: u32,
        data_transposed: u8,
        scale_transposed: u8,
        /// Stores of four values to `out` stay aligned in every row.
        vector: u8,
        /// DecodePath.
        path: u8,
        /// Code of what is written: F32 or BF16.
        out_code: u8,
        reserved: [u8; 3],
    }

    /// `RoundJob`: a pass of `encode` for each orientation, which has codes or values or neither.
    struct Round {
        encode: Encode,
        /// bf16, row-major: of rows, of columns; 0: none.
        values: [u64; 2],
    }

    /// `TransposeJob`.
    struct Transpose {
        from: u64,
        to: u64,
        /// Entries of `from`.
        outer: u64,
        inner: u64,
        /// Bytes of a physical row.
        from_pitch: u64,
        to_pitch: u64,
        /// Tiles along `inner`.
        tiles_across: u64,
        /// 4, 8, 16 or 32.
        bits: u8,
        /// 4 or 8 bits, both pitches and addresses multiples of 16.
        vector: u8,
        reserved: [u8; 6],
    }

    /// `lowp_format::ScaleLayout`.
    struct Layout {
        /// Logical elements per entry along each physical axis.
        tile: [u64; 2],
        entries: [u64; 2],
        padded: [u64; 2],
        /// Tiles of 128 x 4.
        swizzled: u32,
        /// Physical axis 0 follows the columns.
        cols_first: u32,
    }

    /// `RepackJob`.
    struct Repack {
        from: u64,
        to: u64,
        from_layout: Layout,
        to_layout: Layout,
        tiles_across: u64,
        /// Bytes of `to`.
        bytes: u64,
        /// Of an entry.
        bits: u8,
        /// RepackPath.
        path: u8,
        /// REPACK_SWIZZLE: 16-byte loads of `from` stay aligned in every row.
        vector: u8,
        /// REPACK_SWIZZLE_SPREAD: outer entries of `to` that share an entry of `from`, as a power of two.
        spread: u8,
        reserved: [u8; 4],
    }

    /// One piece of an `InterleaveJob`: `outer` rows of `width` bytes, from rows of `from_pitch` bytes to rows of
    /// `pitch` bytes. Pieces of width 0 make no job.
    struct Interleave {
        /// The first byte of the piece.
        from: u64,
        /// Bytes from one of its rows to the next.
        from_pitch: u64,
        /// Its first byte in the result.
        to: u64,
        outer: u64,
        width: u64,
        /// Bytes of a row of the result.
        pitch: u64,
        /// 16-byte accesses stay aligned in every row.
        vector: u64,
    }

    /// One copy of a `RearrangeJob`, in bytes: runs in three nested orders, outermost first.
    struct Rearrange {
        /// The first byte of the source.
        from: u64,
        /// The first byte of the destination.
        to: u64,
        /// Bytes of a run.
        bytes: u64,
        counts: [u64; 3],
        /// Bytes from one to the next in the source.
        from_pitch: [u64; 3],
        /// Bytes from one to the next in the destination.
        to_pitch: [u64; 3],
        /// Bytes that are copied at once, which stay aligned in every run.
        vector: u64,
    }

    /// Scratch: the sum of a run of SUM_RUN elements, or of as many such sums.
    struct RunSum {
        sum: f64,
        /// Values that are not finite.
        non_finite: u64,
    }

    /// Scratch: the sum of one job.
    struct SumTotal {
        sum: f64,
        non_finite: u64,
        /// Blocks that have finished.
        done: u64,
    }

    /// `SumSquaresJob`. The last block of a job adds up its runs; the last job of the launch adds the
    /// totals to the outputs in order. Scratch of a plan: per job `RunSum`s (of its runs, then of runs of
    /// them), one `SumTotal` per job, one `u64`. It is zeroed once, when it is allocated; a run leaves it so.
    struct SumSquares {
        source: u64,
        len: u64,
        /// 8 bytes of binary64, 8 bytes of count.
        out: u64,
        /// RunSum* of this job: cdiv(len, SUM_RUN), then of runs of them, until one is left.
        runs: u64,
        /// SumTotal* of the plan, the same in every job: one entry per job.
        totals: u64,
        /// uint64_t* of the plan, the same in every job: jobs that have finished.
        state: u64,
        /// Jobs of the plan.
        jobs: u64,
        /// Blocks of this job: at least one, SUM_RUNS runs each.
        tiles: u32,
        source_code: u8,
        /// 16-byte loads stay aligned.
        vector: u8,
        reserved: [u8; 2],
    }

    /// `SumJob` or `ConvertJob`: `into[i] = into[i] + from[i]`, or `into[i] = from[i]`, in tiles of SUM_TILE elements.
    struct Sum {
        from: u64,
        into: u64,
        len: u64,
        /// F32 or BF16.
        from_code: u8,
        into_code: u8,
        /// Without the sum.
        convert: u8,
        /// 16-byte accesses stay aligned.
        vector: u8,
        reserved: u32,
    }

    /// `SumPartsJob`: `into[i] = parts[0][i] + parts[1][i] + ..`, in tiles of SUM_PARTS_TILE elements.
    struct SumParts {
        /// The parts, `len` values each.
        parts: u64,
        /// The part of this number, in place of what `parts` has of it.
        own: u64,
        into: u64,
        len: u64,
        count: u64,
        /// Of `own`; of no part where there is none.
        number: u64,
        /// F32 or BF16.
        code: u8,
        /// Adds to what `into` holds.
        accumulate: u8,
        /// 16-byte accesses stay aligned.
        vector: u8,
        reserved: [u8; 5],
    }

    /// `MomentumJob`, in tiles of MOMENTUM_TILE elements.
    struct Momentum {
        grad: u64,
        /// float*.
        momentum: u64,
        /// bf16*.
        out: u64,
        len: u64,
        group: u32,
        /// F32 or BF16.
        grad_code: u8,
        /// 16-byte accesses stay aligned.
        vector: u8,
        reserved: [u8; 2],
    }

    /// `NormalizeJob`, in tiles of MOMENTUM_TILE elements.
    struct Normalize {
        /// bf16*.
        from: u64,
        /// 8 bytes of binary64.
        sum: u64,
        /// bf16*.
        out: u64,
        len: u64,
        /// 16-byte accesses stay aligned.
        vector: u8,
        reserved: [u8; 7],
    }

    /// `StepScalarsJob`: one block each. Records lie at any address, as docs/numerics.md 12.8 has them.
    struct StepScalars {
        /// The part of every rank.
        parts: u64,
        options: u64,
        counts: u64,
        out: u64,
        report: u64,
        ranks: u64,
        /// Ranks of a replica.
        shards: u64,
        /// The replica whose norm counts.
        replica: u64,
        /// Groups of the options.
        groups: u64,
    }
}
