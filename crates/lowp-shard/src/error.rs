//! [`ShardError`]: every way in which shards and gathers can go wrong.

use std::ops::Range;

use lowp_comm::CommError;
use lowp_format::{Code, FormatError, Phase, Shape};
use lowp_kernels::KernelError;
use thiserror::Error;

/// What is wrong, with the numbers and the remedy. Ranks are numbered in the world, also where
/// the operation ran in a group of a split.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ShardError {
    /// A shape, layout or plan is wrong.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The backend rejected or failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A collective failed, or a rank.
    #[error(transparent)]
    Comm(CommError),
    /// The state of a delayed scale that a book cannot take.
    #[error(
        "state of a delayed scale: {what}; restore it to the tensor and recipe from which it was saved"
    )]
    DelayedState {
        /// What is wrong.
        what: String,
    },
    /// Cuts of another number of rows than the tensor has.
    #[error("the cuts are for {cut} rows, but the tensor is {full}; make the cuts for this tensor")]
    CutRows {
        /// Rows that the cuts cover.
        cut: usize,
        /// The full tensor.
        full: Shape,
    },
    /// A flat range outside its tensor.
    #[error("flat shard {start}..{end} is outside a {shape} tensor of {} elements", shape.elements())]
    FlatRange {
        /// First element.
        start: usize,
        /// One past the last element.
        end: usize,
        /// The full tensor.
        shape: Shape,
    },
    /// A flattened matrix whose rows do not begin on bytes.
    #[error(
        "{shape}: with {per_byte} elements per byte a flat shard needs a multiple of {per_byte} columns, and {} is none (pad the last dimension)",
        shape.cols
    )]
    FlatColumns {
        /// The full tensor.
        shape: Shape,
        /// Elements that share a byte.
        per_byte: usize,
    },
    /// A cut through a byte, where whole bytes travel.
    #[error(
        "flat shard {start}..{end} is cut through a byte at element {at}: casting allows it, gathering whole bytes does not, because two ranks would each send half of that byte (cut at multiples of {per_byte}, as FlatShard::split does, gather with FlatGather, or merge with FlatShard::merge)"
    )]
    CutThroughByte {
        /// First element.
        start: usize,
        /// One past the last element.
        end: usize,
        /// The cut in question.
        at: usize,
        /// Elements that share a byte.
        per_byte: usize,
    },
    /// Flat shards that do not cover the tensor in order.
    #[error(
        "the flat shards do not cover {shape} in order: rank {rank} begins at element {start}, but the next element is {expected}"
    )]
    FlatTiling {
        /// The full tensor.
        shape: Shape,
        /// The first rank that is out of place (the number of ranks if the end is missing).
        rank: usize,
        /// Where it begins.
        start: usize,
        /// Where it should begin.
        expected: usize,
    },
    /// Flat shards that were not cut from one matrix.
    #[error(
        "the flat shard of rank {rank} is cut from a {shape} tensor of {code} and that of rank 0 from a {first_shape} tensor of {first_code}; cut all of them from one"
    )]
    FlatMixed {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// Its full tensor.
        shape: Shape,
        /// Its encoding.
        code: Code,
        /// The full tensor of rank 0.
        first_shape: Shape,
        /// The encoding of rank 0.
        first_code: Code,
    },
    /// A place in a bucket that no buffer may begin at.
    #[error("offset {offset} in a bucket is not a multiple of {align}; begin at {}", offset.next_multiple_of(*align))]
    BucketOffset {
        /// The offset given.
        offset: usize,
        /// What it must be a multiple of.
        align: usize,
    },
    /// A bucket that a tensor does not fit into.
    #[error(
        "a tensor of {needed} bytes at offset {offset} does not fit into a bucket of {len} bytes; give it at least {}",
        offset.saturating_add(*needed)
    )]
    BucketRoom {
        /// Where it would begin.
        offset: usize,
        /// Bytes that it takes there.
        needed: usize,
        /// Bytes of the bucket.
        len: usize,
    },
    /// Rows that cut blocks, in a bucket.
    #[error(
        "rows {} to {} of {full} cut blocks, so that their scales are those of all rows, and they cannot be moved into a bucket; cut rows at multiples of the recipe's quantum (ShardSpec::new)",
        rows.start, rows.end
    )]
    BucketOfCutBlocks {
        /// The full matrix.
        full: Shape,
        /// The rows of the shard.
        rows: Range<usize>,
    },
    /// No such parameter in the buckets of gradients.
    #[error(
        "there are buckets for the gradients of {len} parameters, and there is no parameter {param}"
    )]
    NoSuchGrad {
        /// Index asked for.
        param: usize,
        /// Parameters that there are.
        len: usize,
    },
    /// A gradient that was not written into its bucket.
    #[error(
        "the gradient of '{name}' has no memory: get its memory from grad(), write the gradient there, then push it once"
    )]
    NoGradMemory {
        /// The parameter.
        name: String,
    },
    /// A bucket that would go without a gradient that is being written.
    #[error(
        "the gradient of '{name}' got memory but was not pushed; push it before its bucket is reduced, or discard the step"
    )]
    GradNotPushed {
        /// The parameter.
        name: String,
    },
    /// A scale book whose blocks are gathered already.
    #[error(
        "the scale book has a gather of flat weights already; give each gather a book of its own"
    )]
    TwoFlatGathers,
    /// No memory for gradients that stay on the rank from micro-batch to micro-batch.
    #[error(
        "no memory for a bucket of {bytes} bytes of gradients that stay on the rank until the last micro-batch: {source}; reduce gradients in every micro-batch (--reduce-every-micro-batch), or use fewer"
    )]
    KeptGrads {
        /// Bytes of the bucket.
        bytes: usize,
        /// What the backend said.
        source: KernelError,
    },
    /// A gradient of a bucket whose replicas were added: in earlier steps it was sent once.
    #[error(
        "the gradient of '{name}' came again after its replicas were added; use the layer as often in each step as in earlier ones, or add replicas at the end of the step (Reduction::Scatter)"
    )]
    GradAfterReplicas {
        /// The parameter.
        name: String,
    },
    /// Ranges that do not tile a gradient.
    #[error("the gradient of '{name}': rank {rank} owns elements {}..{}, but the next element is {next}", range.start, range.end)]
    GradRanges {
        /// The parameter.
        name: String,
        /// The first rank that is off.
        rank: usize,
        /// Its elements.
        range: Range<usize>,
        /// Where they had to begin.
        next: usize,
    },
    /// A sum of another length than the elements that it is of.
    #[error(
        "the sum of the gradient of '{name}' has {found} values and this rank owns {needed} elements"
    )]
    GradLength {
        /// The parameter.
        name: String,
        /// Elements of this rank.
        needed: usize,
        /// Values of the buffer.
        found: usize,
    },
    /// A group to reshard to with ranks from elsewhere.
    #[error(
        "rank {rank} of the group that keeps parts has no shard; the weights are sharded over the ranks {members:?}, and the group must be a subset of these"
    )]
    ReshardMember {
        /// The rank from elsewhere.
        rank: usize,
        /// The ranks that have shards.
        members: Vec<usize>,
    },
    /// A tensor asked for while it is not gathered.
    #[error(
        "parameter {param} is not gathered; call unshard(phase) before use and reshard() after"
    )]
    NotGathered {
        /// Index in the group.
        param: usize,
    },
    /// A gather in a capture that makes plans or memory first.
    #[error(
        "the gather for {phase} of group {group} is the first of its kind or into its memory, and {what} cannot be captured in a graph; before the capture, unshard as many groups at once as in the graph, each for the phases that the graph has, and reshard them",
        phase = phase.name()
    )]
    FirstInCapture {
        /// The number of the group.
        group: u64,
        /// What the gather is for.
        phase: Phase,
        /// What cannot be captured.
        what: &'static str,
    },
    /// A tensor that was gathered before its shards were written.
    #[error(
        "parameter {param} was cast again after it was gathered; call unshard(phase) before use, which gathers what changed"
    )]
    Stale {
        /// Index in the group.
        param: usize,
    },
    /// Rows that a sharder cuts within blocks of four over six.
    #[error(
        "{rows} rows over {world} ranks: {recipe} {usage} with four over six, which chooses by whole blocks, needs cuts at multiples of {quantum}, and a sharder that cuts ceil({rows} / {world}) = {} rows per rank cuts elsewhere; pad the parameter to {} rows, shard it over another number of ranks, or use the recipe without four over six (four_over_six=off)",
        rows.div_ceil(*world),
        rows.next_multiple_of(world * quantum)
    )]
    ChunkedRows {
        /// The recipe's name.
        recipe: &'static str,
        /// What the shards are for.
        usage: lowp_format::Usage,
        /// Rows of the full tensor.
        rows: usize,
        /// Number of ranks.
        world: usize,
        /// Cuts must be multiples of this.
        quantum: usize,
    },
    /// Another number of buffers than a gather has.
    #[error(
        "{what}: {found} buffers were given, but {needed} were sent; give the received bytes of every input, in the order of GatherHooks::inputs"
    )]
    Arrivals {
        /// The parameter.
        what: String,
        /// Buffers needed.
        needed: usize,
        /// Buffers found.
        found: usize,
    },
    /// Another number of bytes than a gather brings.
    #[error(
        "{what}: {found} bytes arrived for {input} and {} were sent by {world} ranks, {padded} by each; give the whole output of its all-gather, padding included",
        world * padded
    )]
    ArrivedBytes {
        /// The parameter.
        what: String,
        /// The name of the input.
        input: String,
        /// Number of ranks.
        world: usize,
        /// Bytes that each rank sends.
        padded: usize,
        /// Bytes found.
        found: usize,
    },
    /// Parts of two gathers used together.
    #[error(
        "{what} belongs to another gather: this gather is [{expected}], and it belongs to [{found}]; use what the hooks of this parameter and phase made"
    )]
    OtherGather {
        /// Which part.
        what: &'static str,
        /// What this gather is of.
        expected: String,
        /// What the part is of.
        found: String,
    },
    /// What was gathered, or is on its way, is not what the shards hold.
    #[error("{what} {why}; gather it again, from pre_all_gather on")]
    GatherAgain {
        /// The parameter.
        what: String,
        /// Why.
        why: &'static str,
    },
    /// Entries of one scale book used with another.
    #[error(
        "{what} belongs to another ScaleBook than the one given; register everything in one ScaleBookBuilder, build the book from it, and pass that book to every cast"
    )]
    OtherBook {
        /// What does not belong.
        what: &'static str,
    },
    /// Masters in two halves of a weight that is none of them.
    #[error(
        "masters of 16 + 16 bits have a half in the weight, which is {element} and not bf16 in one copy; give this weight masters in f32"
    )]
    Halves {
        /// Elements of the weight.
        element: Code,
    },
    /// Scales of the tensor that follow from its amax in two ways.
    #[error(
        "the two orientations of a weight have different tensor scales, and at least one is delayed, but a cast observes only one amax per weight: give both orientations the same element and rule, or no delayed scale"
    )]
    TwoAmaxes,
    /// No such parameter.
    #[error("the gather group has {len} parameters, and there is no parameter {param}")]
    NoSuchParam {
        /// Index asked for.
        param: usize,
        /// Parameters in the group.
        len: usize,
    },
    /// A phase that needs a usage which the shards do not have.
    #[error(
        "parameter {param} ({shape}) is sharded for usage {usage} and {} needs {}; shard it for both",
        phase.name(),
        phase.usage()
    )]
    MissingPhase {
        /// Index in the group.
        param: usize,
        /// Its full shape.
        shape: Shape,
        /// What the shards can serve.
        usage: lowp_format::Usage,
        /// The phase asked for.
        phase: Phase,
    },
    /// A recipe that calls a buffer a transpose of something it is no transpose of.
    #[error("{recipe}: {buffer} cannot be the transpose of {from}: {why}")]
    NotATranspose {
        /// The recipe's name.
        recipe: &'static str,
        /// The buffer to derive.
        buffer: String,
        /// Its source.
        from: String,
        /// Why not.
        why: &'static str,
    },
}

impl From<CommError> for ShardError {
    fn from(error: CommError) -> Self {
        match error {
            // What a backend rejects has one name, whoever asked it.
            CommError::Kernel(error) => Self::Kernel(error),
            error => Self::Comm(error),
        }
    }
}
