//! Jobs: one operation on one tensor, with every decision already taken. [`Work`] is a list of
//! jobs of one kind that a backend plans and runs together.

use std::ops::Range;

use half::bf16;
use lowp_format::{
    AmaxAlgorithm, BufferSpec, Code, Extent, Form, FormatError, KernelKey, Orientation, Philox,
    ScaleLayout, Shape, ShardTiles, SourceRounding,
};

use crate::runs::Runs;
use crate::{Backend, Master, Rule, Source, State};

/// One entry of an f32 vector that many tensors share.
#[derive(Clone, Debug)]
pub struct Slot<B: Backend> {
    /// The vector.
    pub buffer: B::Buffer<f32>,
    /// The entry.
    pub index: usize,
}

/// What an encode knows about the tensor as a whole, or about each of its lines ([`lowp_format::Extent`]): entries of a
/// vector from a slot on, one for the tensor or one for each line.
#[derive(Clone, Debug)]
pub enum TensorInput<B: Backend> {
    /// Encode scales, as they stand, or the amaxes of two-level scales, of which the magnitude
    /// counts: the entries may be consumed. They are not consumed by this.
    Known(Slot<B>),
    /// Agreed amaxes, as amax jobs raised them. The encode makes scales of them, so
    /// that nothing needs to run between the agreement and the encode, and then consumes them: the
    /// sign of an entry is set, its magnitude stays, and the next amax job replaces it instead of
    /// raising it. Any number of encodes may read one entry, consumed or not.
    Observed(Slot<B>),
}

impl<B: Backend> TensorInput<B> {
    /// Where the scales or amaxes are.
    pub fn slot(&self) -> &Slot<B> {
        match self {
            Self::Known(slot) | Self::Observed(slot) => slot,
        }
    }
}

/// Where encoded bytes go: one buffer of a quantized tensor.
#[derive(Clone, Debug)]
pub struct Target<B: Backend> {
    /// What the buffer holds and how.
    pub spec: BufferSpec,
    /// The form of block scales, for an orientation that the buffer serves; `None` is Compact.
    /// One encode may write the scales of one spec in several forms.
    pub form: Option<(Form, Orientation)>,
    /// The target's bytes: those of [`Target::layout`].
    pub bytes: B::Buffer<u8>,
}

impl<B: Backend> Target<B> {
    /// A buffer in Compact form.
    pub fn new(spec: BufferSpec, bytes: B::Buffer<u8>) -> Self {
        let form = None;
        Self { spec, form, bytes }
    }

    /// Block scales in `form` for `orientation`: what a GEMM or another library reads. Padding is written as zero.
    pub fn in_form(
        spec: BufferSpec,
        form: Form,
        orientation: Orientation,
        bytes: B::Buffer<u8>,
    ) -> Self {
        let form = Some((form, orientation));
        Self { spec, form, bytes }
    }

    /// Whether the target is in Compact form.
    pub fn is_compact(&self) -> bool {
        matches!(self.form, None | Some((Form::Compact, _)))
    }

    /// The layout for a matrix of `shape`.
    ///
    /// # Errors
    /// The buffer has no such form.
    pub fn layout(&self, shape: Shape) -> Result<ScaleLayout, FormatError> {
        let (form, orientation) = self.form.unwrap_or((Form::Compact, Orientation::Rowwise));
        ScaleLayout::new(&self.spec, shape, orientation, form)
    }
}

/// The amaxes of blocks of `block` rows x columns, written row-major from entry `start` of the job's output vector on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockAmax {
    /// Block rows x columns, each 1 to [`BufferSpec::MAX_SIDE`]; [`BufferSpec::WHOLE`] for those of lines.
    pub block: [usize; 2],
    /// First entry in the output vector; `cdiv(rows, block rows) * cdiv(cols, block cols)` follow.
    pub start: usize,
}

/// Raises amax entries (docs/numerics.md 2.2): `out = max(out, amax)`, NaN elements ignored. An entry
/// that is negative (consumed, see [`TensorInput`]) or NaN is replaced. Entries of blocks without an element in `source` stay.
#[derive(Clone, Debug)]
pub struct AmaxJob<B: Backend> {
    /// Shape of the full matrix that blocks are counted in.
    pub shape: Shape,
    /// Flat index of the first source element in that matrix; 0 for a whole tensor or row shard.
    pub start: usize,
    /// Consecutive elements from `start` on.
    pub source: Source<B>,
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
    /// The output vector.
    pub out: B::Buffer<f32>,
    /// Entry of the tensor amax.
    pub tensor: Option<usize>,
    /// Block amaxes.
    pub blocks: Vec<BlockAmax>,
    /// Whether the amaxes are those of the values after a Hadamard transform of the rows
    /// (docs/numerics.md 15): of a whole tensor or row shard, into `tensor` alone.
    pub hadamard: bool,
}

/// Rolls the amax history of one tensor (delayed scaling, docs/numerics.md 4.2): column `history`
/// takes the agreed amax `observed[index]`, `scales[index]` becomes the next encode scale, and
/// `observed[index]` becomes 0. A consumed entry counts as 0. Jobs of one plan must not share an entry.
#[derive(Clone, Debug)]
pub struct HistoryJob<B: Backend> {
    /// Agreed amaxes.
    pub observed: B::Buffer<f32>,
    /// Encode scales: what [`TensorInput::Known`] reads.
    pub scales: B::Buffer<f32>,
    /// The entry in both.
    pub index: usize,
    /// Amax history of this tensor; its length is the window.
    pub history: B::Buffer<f32>,
    /// How an amax is taken from the history.
    pub algorithm: AmaxAlgorithm,
    /// The scale leaves this many powers of two unused: -64 to 64.
    pub margin: i32,
    /// Element code whose largest value the scale aims at: E4M3, E5M2 or E2M1.
    pub element: Code,
}

/// The seed of stochastic rounding: element `i` of the job uses random byte `first + i` of Philox(seed, stream + run's `random_step`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StochasticKey {
    /// Seed.
    pub seed: u64,
    /// Stream: one per tensor; bits 32.. are combined with the step by addition `step << 32`.
    pub stream: u64,
    /// Global index of the job's first element.
    pub first: u64,
}

/// Encodes a matrix into every buffer of `targets`: data and scales of one or both orientations.
/// Any number of rows is legal; columns must be a multiple of every block's columns.
///
/// Block amaxes are taken from the source. The content equals the scalar definition in
/// `lowp-format` bit for bit.
#[derive(Clone, Debug)]
pub struct EncodeJob<B: Backend> {
    /// Shape of the source.
    pub shape: Shape,
    /// Ingredients by orientation, rowwise first.
    pub kernels: [KernelKey; 2],
    /// Input, `shape.elements()` values in row-major order.
    pub source: Source<B>,
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
    /// Encode scales or amaxes of the tensor or of its lines, by orientation; `None` where the kernel needs neither, or
    /// no target serves the orientation.
    pub tensor: [Option<TensorInput<B>>; 2],
    /// The buffers to fill; each has the ingredients of the orientations that it serves.
    pub targets: Vec<Target<B>>,
    /// Stochastic rounding of E2M1 elements; `None` rounds to nearest.
    pub stochastic: Option<StochasticKey>,
}

/// Where a flat encode finds agreed block amaxes. It consumes them, as [`TensorInput::Observed`].
#[derive(Clone, Debug)]
pub struct FlatBlocks<B: Backend> {
    /// The agreed vector.
    pub amaxes: B::Buffer<f32>,
    /// Its parts, one per distinct block shape, as [`AmaxJob`] wrote them.
    pub blocks: Vec<BlockAmax>,
}

/// Encodes a contiguous range of a flattened matrix with agreed amaxes.
///
/// Data targets hold only the bytes that the range touches: byte `b` of the full buffer lies at
/// `b - start_byte`. Only owned nibbles of boundary bytes change. Only targets whose data follow
/// `[Rows, Cols]` are allowed (others are derived after the gather). Block-scale targets hold the
/// full Compact array, no other form, and are written whole.
#[derive(Clone, Debug)]
pub struct FlatEncodeJob<B: Backend> {
    /// Shape of the full matrix.
    pub shape: Shape,
    /// Flat index of the first source element.
    pub start: usize,
    /// Number of source elements.
    pub len: usize,
    /// Ingredients by orientation, rowwise first.
    pub kernels: [KernelKey; 2],
    /// Consecutive elements from `start` on.
    pub source: Source<B>,
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
    /// What is known of the tensor, as [`EncodeJob::tensor`].
    pub tensor: [Option<TensorInput<B>>; 2],
    /// Agreed block amaxes; `None` where no block has a scale.
    pub blocks: Option<FlatBlocks<B>>,
    /// The buffers to fill.
    pub targets: Vec<Target<B>>,
}

/// Decodes one orientation of a quantized matrix to f32 in row-major order.
#[derive(Clone, Debug)]
pub struct DecodeJob<B: Backend> {
    /// Shape of the matrix.
    pub shape: Shape,
    /// Ingredients.
    pub kernel: KernelKey,
    /// Element codes of the orientation.
    pub data: Target<B>,
    /// The block scales of the codes, in Compact form.
    pub block_scale: Option<Target<B>>,
    /// Decode scales, or amaxes of two-level scales: of the tensor, or of the lines of the orientation.
    pub tensor_scale: Option<B::Buffer<u8>>,
    /// `shape.elements()` values; those of bfloat16 are the f32 ones, rounded to nearest even.
    pub out: Source<B>,
}

/// Rounds a matrix of bfloat16 to what its codes decode to, `decode(encode(source))`, in one pass. [`crate::rounds`] says which
/// ingredients and shapes have one.
#[derive(Clone, Debug)]
pub struct RoundJob<B: Backend> {
    /// The encode; it has Compact targets of orientations without values, each once.
    pub encode: EncodeJob<B>,
    /// Decoded values by orientation, rowwise first: `shape.elements()` in row-major order.
    pub values: [Option<B::Buffer<bf16>>; 2],
}

/// Transposes a matrix of entries (4-, 8-, 16- or 32-bit codes): `to[j][i] = from[i][j]`.
/// Physical rows of both sides begin on a byte; pad nibbles are written as 0.
#[derive(Clone, Debug)]
pub struct TransposeJob<B: Backend> {
    /// Entry encoding.
    pub code: Code,
    /// Entries of `from`: outer x inner.
    pub entries: [usize; 2],
    /// Source.
    pub from: B::Buffer<u8>,
    /// Destination, of another buffer.
    pub to: B::Buffer<u8>,
}

/// Converts a buffer between forms; padding is written as zero.
#[derive(Clone, Debug)]
pub struct RepackJob<B: Backend> {
    /// Layout of `from`.
    pub from_layout: ScaleLayout,
    /// Layout of `to`.
    pub to_layout: ScaleLayout,
    /// Source.
    pub from: B::Buffer<u8>,
    /// Destination.
    pub to: B::Buffer<u8>,
}

/// Rows of bytes in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRows {
    /// The first byte of the first row.
    pub start: usize,
    /// Bytes of a row.
    pub width: usize,
    /// Bytes from one row to the next.
    pub pitch: usize,
}

impl PieceRows {
    /// Pieces of `outer` rows of these widths, one after another.
    pub fn dense(outer: usize, widths: impl IntoIterator<Item = usize>) -> Vec<Self> {
        let mut start = 0usize;
        let piece = |width| {
            let piece = Self {
                start,
                width,
                pitch: width,
            };
            start = start.saturating_add(outer.saturating_mul(width));
            piece
        };
        widths.into_iter().map(piece).collect()
    }

    /// Where `outer` rows end; none where there is no byte.
    pub(crate) fn end(&self, outer: usize) -> Option<usize> {
        let before = outer.checked_sub(1).filter(|_| self.width > 0)?;
        let last = before.saturating_mul(self.pitch);
        Some(self.start.saturating_add(last).saturating_add(self.width))
    }
}

/// Copies the entries of a buffer in another order. Source and destination have as many entries as the runs of all copies together, which
/// write each of the destination once.
#[derive(Clone, Debug)]
pub struct RearrangeJob<B: Backend> {
    /// What is copied.
    pub copies: Vec<Runs>,
    /// Source and destination.
    pub buffers: Rearranged<B>,
}

/// The source and the destination of a [`RearrangeJob`].
#[derive(Clone, Debug)]
pub enum Rearranged<B: Backend> {
    /// Two buffers of bytes.
    Bytes([B::Buffer<u8>; 2]),
    /// Two buffers of f32.
    F32([B::Buffer<f32>; 2]),
    /// Two buffers of bf16.
    Bf16([B::Buffer<bf16>; 2]),
}

impl<B: Backend> Rearranged<B> {
    /// Of values of one dtype; of two, nothing.
    pub fn values(from: &Source<B>, to: &Source<B>) -> Option<Self> {
        match (from, to) {
            (Source::F32(from), Source::F32(to)) => Some(Self::F32([from.clone(), to.clone()])),
            (Source::Bf16(from), Source::Bf16(to)) => Some(Self::Bf16([from.clone(), to.clone()])),
            _ => None,
        }
    }
}

/// Interleaves pieces: row `i` of the result is the concatenation of row `i` of all pieces.
#[derive(Clone, Debug)]
pub struct InterleaveJob<B: Backend> {
    /// Rows of every piece.
    pub outer: usize,
    /// Where each piece lies, in order.
    pub pieces: Vec<PieceRows>,
    /// What the pieces lie in.
    pub from: B::Buffer<u8>,
    /// The result.
    pub to: B::Buffer<u8>,
}

/// Adds the sum of squares of a gradient, in binary64, to the output, and counts its non-finite
/// values. Jobs may share `out` (jobs add in order); clear it before the run.
///
/// Deterministic, and the same on every backend: the squares are cut into runs of 4096. In a run,
/// square `i` is added to sum `i % 256` of 256, in order; then the upper half of the sums is added
/// to the lower half until one is left. The sums of the runs are added up in the same way, run by
/// run of 4096, until one is left: the total of the job, which is added to the output.
#[derive(Clone, Debug)]
pub struct SumSquaresJob<B: Backend> {
    /// The gradient, or a matrix; it may have no values.
    pub source: Source<B>,
    /// Two f32 entries are not enough for a binary64: the sum's bits are written as 8 bytes, and
    /// the count of non-finite values as 8 more (both little endian). 16 bytes, or a whole
    /// [`crate::GradContribution`], of which they are the first 16.
    pub out: B::Buffer<u8>,
}

/// Adds a vector to another one: `into[i] = round(into[i] + from[i])`. The sum is taken in binary32 and,
/// where `into` is bfloat16, rounded to it to nearest even. A NaN gives a NaN; which one is not defined.
#[derive(Clone, Debug)]
pub struct SumJob<B: Backend> {
    /// What is added, element by element.
    pub from: Source<B>,
    /// The sums so far, updated in place; as long as `from`, of any dtype.
    pub into: Source<B>,
}

/// Adds parts in their order, in binary32: `into[i] = parts[0][i] + parts[1][i] + ..`, or that added to what `into` holds. The first
/// part is taken bit for bit. A NaN gives a NaN; which one is not defined.
#[derive(Clone, Debug)]
pub struct SumPartsJob<B: Backend> {
    /// The parts, one after the other, each as long as `into`.
    pub parts: Source<B>,
    /// How many there are; at least one.
    pub count: usize,
    /// A part that lies elsewhere; the values of `parts` in its place are not read.
    pub own: Option<OwnPart<B>>,
    /// The sums, one for each element of a part.
    pub into: B::Buffer<f32>,
    /// Whether they are added to what `into` holds.
    pub accumulate: bool,
}

/// A part of a sum that does not lie among the others.
#[derive(Clone, Debug)]
pub struct OwnPart<B: Backend> {
    /// Its number in the order of the sum, from 0.
    pub number: usize,
    /// Its values, in the dtype of the other parts.
    pub values: Source<B>,
}

/// Updates the momentum of a gradient, `m = mu m + g`, and rounds what is orthogonalised, Nesterov's `g + mu m` (docs/numerics.md 22.1).
/// A NaN gives a NaN; which one is not defined.
#[derive(Clone, Debug)]
pub struct MomentumJob<B: Backend> {
    /// The gradient, in f32 or bf16.
    pub grad: Source<B>,
    /// Momentum, updated in place; as long as `grad`.
    pub momentum: B::Buffer<f32>,
    /// The result, rounded to nearest even; as long as `grad`.
    pub out: B::Buffer<bf16>,
    /// The entry of [`crate::StepScalars::groups`] whose `beta1` is `mu`.
    pub group: usize,
}

/// Divides a matrix by its Frobenius norm (docs/numerics.md 22.3): `out[i] = round(from[i] * f32(1 / max(sqrt(sum), 1e-7)))`, to nearest
/// even. Root and quotient are in binary64. A NaN gives a NaN; which one is not defined.
#[derive(Clone, Debug)]
pub struct NormalizeJob<B: Backend> {
    /// The matrix.
    pub from: B::Buffer<bf16>,
    /// Its sum of squares, as [`SumSquaresJob::out`] of [`crate::GradContribution::SUMS`] bytes has it.
    pub sum: B::Buffer<u8>,
    /// The result; as long as `from`.
    pub out: B::Buffer<bf16>,
}

/// Converts a vector to another dtype, or copies it: `into[i] = round(from[i])`. Widening is exact,
/// narrowing rounds to nearest even (a NaN keeps its sign and the upper bits of its payload, and is quiet), and between equal dtypes every bit stays.
#[derive(Clone, Debug)]
pub struct ConvertJob<B: Backend> {
    /// What is converted.
    pub from: Source<B>,
    /// The result; as long as `from`.
    pub into: Source<B>,
}

/// Makes the scalars of an optimizer step from the gradient's sums of squares, on the device (docs/numerics.md 12.8): the norm, the factor
/// that clips it, whether the step is applied, and the bias corrections. Plans run with them by [`Backend::run_with`].
///
/// It runs whatever the `skip` of the scalars it is run with.
#[derive(Clone, Debug)]
pub struct StepScalarsJob<B: Backend> {
    /// A [`crate::GradContribution`] of every rank, in the order of ranks: replicas x shards.
    pub parts: B::Buffer<u8>,
    /// Ranks of a replica: ranks `r * shards .. (r + 1) * shards` are replica `r`.
    pub shards: usize,
    /// The replica whose norm counts: that of this rank.
    pub replica: usize,
    /// [`crate::StepScalars`] as the host wrote them. Corrections are ignored.
    pub options: B::Buffer<u8>,
    /// [`crate::StepCounts`], read and updated.
    pub counts: B::Buffer<u8>,
    /// [`crate::StepScalars`] as plans read them, of as many groups as `options`.
    pub out: B::Buffer<u8>,
    /// What became of the step, [`crate::StepRecord::BYTES`] that the host reads.
    pub report: B::Buffer<u8>,
}

/// Jobs of one kind, planned and run together.
#[derive(Clone, Debug)]
pub enum Work<B: Backend> {
    /// See [`AmaxJob`]. Jobs may share `out`.
    Amax(Vec<AmaxJob<B>>),
    /// See [`HistoryJob`]. Jobs may share `observed` and `scales`.
    History(Vec<HistoryJob<B>>),
    /// See [`EncodeJob`].
    Encode(Vec<EncodeJob<B>>),
    /// See [`FlatEncodeJob`].
    FlatEncode(Vec<FlatEncodeJob<B>>),
    /// See [`DecodeJob`].
    Decode(Vec<DecodeJob<B>>),
    /// See [`RoundJob`].
    Round(Vec<RoundJob<B>>),
    /// See [`TransposeJob`].
    Transpose(Vec<TransposeJob<B>>),
    /// See [`RepackJob`].
    Repack(Vec<RepackJob<B>>),
    /// See [`InterleaveJob`].
    Interleave(Vec<InterleaveJob<B>>),
    /// See [`RearrangeJob`].
    Rearrange(Vec<RearrangeJob<B>>),
    /// See [`UpdateJob`].
    Update(Vec<UpdateJob<B>>),
    /// See [`SumSquaresJob`].
    SumSquares(Vec<SumSquaresJob<B>>),
    /// See [`SumJob`].
    Sum(Vec<SumJob<B>>),
    /// See [`SumPartsJob`].
    SumParts(Vec<SumPartsJob<B>>),
    /// See [`ConvertJob`].
    Convert(Vec<ConvertJob<B>>),
    /// See [`MomentumJob`].
    Momentum(Vec<MomentumJob<B>>),
    /// See [`NormalizeJob`].
    Normalize(Vec<NormalizeJob<B>>),
    /// See [`StepScalarsJob`].
    StepScalars(Vec<StepScalarsJob<B>>),
}

impl<B: Backend> EncodeJob<B> {
    /// The target that holds `part` for `orientation`.
    pub fn target(&self, orientation: Orientation, part: lowp_format::Part) -> Option<&Target<B>> {
        self.targets
            .iter()
            .find(|t| t.spec.key.serves(orientation, part))
    }
}

/// The amaxes of a new master.
#[derive(Clone, Debug)]
pub struct UpdateAmax<B: Backend> {
    /// Shape of the master, where lines have amaxes.
    pub shape: Shape,
    /// The output vector.
    pub out: B::Buffer<f32>,
    /// Entry of the amax of all values.
    pub tensor: Option<usize>,
    /// First entry of the amaxes of lines, by orientation: of rows, then of columns.
    pub lines: [Option<usize>; 2],
}

impl<B: Backend> UpdateAmax<B> {
    /// The amax of all values, into `slot`.
    pub fn of_tensor(slot: Slot<B>) -> Self {
        Self {
            shape: Shape::new(0, 0),
            out: slot.buffer,
            tensor: Some(slot.index),
            lines: [None; 2],
        }
    }

    /// The amaxes of lines as block amaxes.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockAmax> + use<B> {
        let lines = self.lines;
        Orientation::ALL.into_iter().filter_map(move |orientation| {
            let block = Extent::Line.block(orientation);
            lines[orientation as usize].map(|start| BlockAmax { block, start })
        })
    }
}

/// Which random bits the elements of an update round by (docs/numerics.md 23.1), so that no cut changes a bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UpdateRandom {
    /// Seed, the same on all ranks.
    pub seed: u64,
    /// Stream: one per parameter; the run's `random_step` is added to it from bit 32 on.
    pub stream: u64,
    /// The tiles of the matrix, where they are not in the order of its rows.
    pub tiles: Option<ShardTiles>,
    /// The job's first element, in the flattened tall matrix, or in the flattened matrix where that has the same order.
    pub first: usize,
}

impl UpdateRandom {
    /// Where elements of the job lie in the flattened matrix, run by run in their order.
    pub fn runs(&self, elements: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let elements = self.first + elements.start..self.first + elements.end;
        let (tiles, whole) = (self.tiles, elements.clone());
        let runs = tiles
            .into_iter()
            .flat_map(move |tiles| tiles.runs(elements.clone()));
        runs.chain(tiles.is_none().then_some(whole))
    }

    /// The generator of a step.
    pub const fn philox(&self, random_step: u64) -> Philox {
        Philox::new(self.seed, self.stream.wrapping_add(random_step << 32))
    }
}

/// Updates one parameter (docs/numerics.md 12) and, in the same pass, raises its amax and encodes the new master.
#[derive(Clone, Debug)]
pub struct UpdateJob<B: Backend> {
    /// How an element is updated.
    pub rule: Rule,
    /// Master values, updated in place. In bf16 they are rounded stochastically (docs/numerics.md 23.2), and amaxes and codes are those of the
    /// rounded values. In two halves they are the parameter, too: they have neither amaxes nor other codes.
    pub master: Master<B>,
    /// What the rule keeps of each element, in the order of [`Rule::states`], updated in place. Where there are two, the second is f32 or has
    /// the dtype of the first.
    pub states: Vec<State<B>>,
    /// The gradient before clipping; [`Rule::grad_factor`] says what it is multiplied by.
    pub grad: Source<B>,
    /// Which entry of [`crate::StepScalars::groups`] applies.
    pub group: usize,
    /// The random bits of states in fp8 and of a master in bf16, which need some.
    pub random: Option<UpdateRandom>,
    /// Rounding of the master before amax and encode.
    pub source_rounding: SourceRounding,
    /// Raised to the amax of the new master, and to those of its lines.
    pub amax: Option<UpdateAmax<B>>,
    /// Encodes the new master: the shape, ingredients, tensor input and targets of an encode whose
    /// source is the master buffer and whose source rounding is that of the job. The tensor input
    /// must be known before the update; `amax` is raised after it.
    pub encode: Option<Box<EncodeJob<B>>>,
}
