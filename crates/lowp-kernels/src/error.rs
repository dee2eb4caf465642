//! [`KernelError`]: what can be wrong with work before and while it runs.

use lowp_format::{
    BufferKey, Code, Form, FormatError, KernelKey, Orientation, Part, ScaleRule, Shape,
};
use thiserror::Error;

use crate::FloatDtype;

/// What is wrong, with the numbers and the remedy.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum KernelError {
    /// A shape, layout or buffer is wrong.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A buffer has another length than the work needs.
    #[error(
        "{what}: the buffer holds {found} entries and the work needs {needed}; allocate it for the shape of the job"
    )]
    Length {
        /// Which buffer.
        what: String,
        /// Entries needed.
        needed: usize,
        /// Entries found.
        found: usize,
    },
    /// Two parts of one plan would touch the same buffer while it is written.
    #[error(
        "{what}: the buffer is also used by job {other} of the same plan; give every output a separate buffer, or plan the jobs separately"
    )]
    Aliased {
        /// Which buffer.
        what: String,
        /// The other job.
        other: usize,
    },
    /// An element code and a scale rule that do not go together, or blocks where the rule has none.
    #[error("there is no kernel for {}; use the element code, scale rule and blocks of a recipe", ingredients(.key))]
    Ingredients {
        /// The ingredients.
        key: KernelKey,
    },
    /// A block that no kernel takes.
    #[error("blocks with a side of {side}; block sides are 1 to {most}")]
    BlockSide {
        /// The side.
        side: usize,
        /// The longest side.
        most: usize,
    },
    /// A least amax that is no magnitude.
    #[error("epsilon is {epsilon}; it must be finite and not negative")]
    Epsilon {
        /// The least amax.
        epsilon: f32,
    },
    /// An observed amax for scales that do not depend on the tensor.
    #[error(
        "an observed amax was given for {scale:?} scales, which do not use the current amax; leave it out, or give the known scale"
    )]
    ObservedAmax {
        /// The rule of the job.
        scale: ScaleRule,
    },
    /// Stochastic rounding of elements that have none.
    #[error(
        "stochastic rounding was requested for {element} elements; only E2M1 elements support it"
    )]
    Stochastic {
        /// The code of the elements.
        element: Code,
    },
    /// A delayed scale of elements that are not scaled.
    #[error(
        "a delayed scale of {element} elements; only E4M3, E5M2 and E2M1 elements have scales, so give the element code of a recipe below 16 bits"
    )]
    DelayedElement {
        /// The code of the elements.
        element: Code,
    },
    /// A delayed scale that would leave too many powers of two unused.
    #[error("the margin is {margin} binary orders; it must be from {least} to {most}")]
    Margin {
        /// The margin.
        margin: i32,
        /// The least margin.
        least: i32,
        /// The largest margin.
        most: i32,
    },
    /// Two vectors of agreed amaxes for one kind of blocks.
    #[error("two vectors of agreed amaxes of {}x{} blocks; give one per block shape", .block[0], .block[1])]
    BlocksTwice {
        /// Rows and columns of a block.
        block: [usize; 2],
    },
    /// One buffer for two orientations whose ingredients differ.
    #[error(
        "one buffer was given for both orientations, but their kernels differ ({} and {}); give each orientation a separate buffer", ingredients(&.kernels[0]), ingredients(&.kernels[1])
    )]
    KernelsDiffer {
        /// Ingredients of the rowwise and of the columnwise orientation.
        kernels: Box<[KernelKey; 2]>,
    },
    /// One buffer for two orientations that know different things of their tensor.
    #[error(
        "job {job}: one buffer for both orientations, whose slots of the tensor scale or amax differ; give both the same slot, or each a \
         buffer of its own"
    )]
    SlotsDiffer {
        /// Index of the job.
        job: usize,
    },
    /// A Hadamard transform of something else than a whole matrix of rows.
    #[error("{what} after a Hadamard transform, which needs whole groups of 16 rows: {remedy}")]
    Hadamard {
        /// What was asked for.
        what: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A number of parts that cannot be added.
    #[error("a sum of {count} parts; give at least one, and no more than memory holds")]
    Parts {
        /// The number.
        count: usize,
    },
    /// States that are not those of the rule.
    #[error(
        "{rule} keeps {needed} values of an element beside the master, and the job has {found}; give those of Rule::states"
    )]
    States {
        /// The rule.
        rule: &'static str,
        /// States of the rule.
        needed: usize,
        /// States given.
        found: usize,
    },
    /// A second moment that is neither f32 nor of the dtype of the first.
    #[error(
        "exp_avg is {exp_avg} and exp_avg_sq is {exp_avg_sq}; give exp_avg_sq in f32, or in the dtype of exp_avg"
    )]
    MomentDtypes {
        /// Of the first.
        exp_avg: &'static str,
        /// Of the second.
        exp_avg_sq: &'static str,
    },
    /// States in fp8, or a master in bf16, without random bits.
    #[error("states in fp8 and masters in bf16 are rounded by random bits; give UpdateJob::random")]
    StateBits,
    /// States in fp8 whose blocks would be cut.
    #[error(
        "states in fp8 have blocks of {block} elements, and {what} is {found}; give a multiple of {block}, or states in f32 or bf16"
    )]
    StateBlocks {
        /// Elements of a block.
        block: usize,
        /// What is no multiple.
        what: &'static str,
        /// What it is.
        found: usize,
    },
    /// A part of another dtype than the others.
    #[error("the part that lies elsewhere has another dtype than the others; convert it first")]
    PartDtypes,
    /// A choice of four over six where a block may be in parts.
    #[error(
        "flat slices cannot be encoded with four over six, which compares the errors of whole blocks; cut the matrix between rows, or set four_over_six to off"
    )]
    FlatChoice,
    /// A target that serves no orientation.
    #[error("{key}: it serves no orientation; its usage is rowwise, columnwise or both")]
    TargetUsage {
        /// The target.
        key: BufferKey,
    },
    /// A tensor scale where the rule has none.
    #[error("{key}: {scale:?} scales have no tensor part; leave the target out")]
    TargetPart {
        /// The target.
        key: BufferKey,
        /// The rule of the job.
        scale: ScaleRule,
    },
    /// A target whose entries are not those of the kernel.
    #[error("{key}: {code} entries of {block:?} elements, not {}", entries(.needed))]
    TargetEntries {
        /// The target.
        key: BufferKey,
        /// Its code.
        code: Code,
        /// Elements that share one of its entries.
        block: [usize; 2],
        /// The code and the elements of an entry that the kernel fills; `None` where it has no such part.
        needed: Option<(Code, [usize; 2])>,
    },
    /// A form that the target does not have.
    #[error("{key}: it has no {} form for {orientation:?}; only block scales have forms, for the orientations that they serve", .form.name())]
    TargetForm {
        /// The target.
        key: BufferKey,
        /// The form.
        form: Form,
        /// The orientation.
        orientation: Orientation,
    },
    /// Scales in another form where only Compact ones can be.
    #[error("{what} with the {} form of {key}; repack it from or to Compact", .form.name())]
    NotCompact {
        /// What was asked for.
        what: &'static str,
        /// The target.
        key: BufferKey,
        /// Its form.
        form: Form,
    },
    /// Transposed data of a flat encode.
    #[error(
        "a flat encode of the transposed {key}; encode row-major data and derive it after the gather"
    )]
    FlatTransposed {
        /// The target.
        key: BufferKey,
    },
    /// A decode that was given a buffer of another part or orientation.
    #[error("a decode was given {key} instead of {part:?}; give the buffers of one orientation")]
    DecodePart {
        /// The buffer.
        key: BufferKey,
        /// What it was given as.
        part: Part,
    },
    /// Values that are not rounded in one pass.
    #[error(
        "{} values of {shape} are not rounded in one pass to {} and {}; encode them and decode the codes",
        .dtype.name(), ingredients(&.kernels[0]), ingredients(&.kernels[1])
    )]
    NotRounded {
        /// Ingredients of the rowwise and of the columnwise orientation.
        kernels: Box<[KernelKey; 2]>,
        /// The dtype of the source.
        dtype: FloatDtype,
        /// The shape.
        shape: Shape,
    },
    /// A target beside rounded values.
    #[error(
        "{key}: a rounding fills codes and scales of one orientation, which has no values, once, codes of 8 bits in rows and of 4 along their blocks; encode the others apart"
    )]
    RoundTarget {
        /// The target.
        key: BufferKey,
    },
    /// Layouts that do not hold the same entries.
    #[error(
        "repacking {from} to {to}; layouts of one buffer have the same code and cover the same elements"
    )]
    Repack {
        /// The layout of the source.
        from: String,
        /// The layout of the destination.
        to: String,
    },
    /// Copies of a rearrangement that write an entry twice.
    #[error(
        "job {index} writes entry {entry} of its destination again in copy {copy}; give every entry of the destination once"
    )]
    RunsOverlap {
        /// The job.
        index: usize,
        /// The first copy that writes an entry again.
        copy: usize,
        /// The entry.
        entry: usize,
    },
    /// A fused encode of something else than the master.
    #[error(
        "the source or rounding of a fused encode differs from that of the master; give both the same buffer and rounding"
    )]
    FusedSource,
    /// An amax or an encode of a master that is the parameter, too.
    #[error(
        "a master of 16 bits beside its parameter has no amax and no other codes; leave UpdateJob::amax and UpdateJob::encode out, or give the master in f32"
    )]
    CastParameter,
    /// A fused encode that needs an amax of what it updates.
    #[error("a fused encode needs the amax of the new master; encode it in a separate plan")]
    FusedObserved,
    /// More targets than a fused encode fills.
    #[error(
        "an update is fused with more targets of one part and order than two passes can fill; encode the others in a separate plan"
    )]
    FusedTargets,
    /// More parameter groups than a device holds.
    #[error(
        "{groups} parameter groups on a CUDA device; there is room for {most}: use fewer groups"
    )]
    Groups {
        /// Groups of the plan.
        groups: usize,
        /// Groups that there is room for.
        most: usize,
    },
    /// More work than one launch counts.
    #[error("{kernel} over more than 2^31 tiles; plan it in parts")]
    TooManyTiles {
        /// The kernel.
        kernel: &'static str,
    },
    /// A launch of more blocks or threads than a device takes, or of none.
    #[error(
        "a launch of {}x{} blocks of {}x{} threads; a device takes 1x1 to 2147483647x65535 blocks of 1 to 1024 threads: launch it in parts",
        .blocks[0], .blocks[1], .threads[0], .threads[1]
    )]
    Launch {
        /// Blocks in both directions.
        blocks: [usize; 2],
        /// Threads of a block in both directions.
        threads: [usize; 2],
    },
    /// A kernel that the program was built without.
    #[error("{kernel} is not among the compiled kernels; run `cargo xtask cuda` and build again")]
    NotCompiled {
        /// The kernel.
        kernel: &'static str,
    },
    /// A part that the ingredients need is not there.
    #[error("{what} is missing; the kernel of the job needs it")]
    Missing {
        /// What is missing.
        what: String,
    },
    /// A range outside a buffer.
    #[error("{what}: {start}..{end} is outside a buffer of {len} entries")]
    Range {
        /// What was asked for.
        what: &'static str,
        /// First entry.
        start: usize,
        /// One past the last entry.
        end: usize,
        /// Entries of the buffer.
        len: usize,
    },
    /// The plan needs scalars that the run did not give.
    #[error(
        "the plan uses {needed} parameter groups and the run gave scalars for {given}; pass one GroupScalars per group"
    )]
    Scalars {
        /// Groups in the plan.
        needed: usize,
        /// Groups given.
        given: usize,
    },
    /// More memory than there is.
    #[error(
        "{bytes} bytes could not be allocated; free memory, shard the tensors over more ranks, or use smaller tensors"
    )]
    NoMemory {
        /// Bytes asked for.
        bytes: u128,
    },
    /// The host has no room, or locks no more of it for a device.
    #[error(
        "the host could not page-lock {bytes} bytes for the device; free memory of the host, raise the limit of its container, or use smaller tensors"
    )]
    NoHostMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// Something that a graph cannot hold, or that must be there before.
    #[error("{what} cannot be captured in a graph; do it before the capture, or after it")]
    InCapture {
        /// What was asked for.
        what: &'static str,
    },
    /// A capture that the driver ended before its end: a call that no capture allows, such as a wait for the whole device, came from
    /// this thread or from another.
    #[error(
        "the capture of a graph was ended by another use of the device, such as a wait for all of its work; capture it again, or give the calls \
         one by one"
    )]
    CaptureLost,
    /// A graph on another stream than that which captured it.
    #[error(
        "the graph was captured by another handle; launch it with that one, or capture it again"
    )]
    OtherStream,
    /// A plan that adds up in memory of its own, on another stream than that of the handle that planned it.
    #[error(
        "the plan uses scratch memory of the handle that planned it; run and capture it with that handle or its clones, or plan \
         the work with this one, too"
    )]
    OtherHandle,
    /// Threads that could not be started.
    #[error(
        "{threads} threads could not be started: {why}; lower RAYON_NUM_THREADS, or raise the limit of threads"
    )]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system says.
        why: String,
    },
    /// A device that cannot be used.
    #[error("CUDA device {ordinal} cannot be used: {why}")]
    NoDevice {
        /// The device's number.
        ordinal: usize,
        /// Why, and the remedy.
        why: String,
    },
    /// A buffer, event or plan of another device.
    #[error("{what} belongs to CUDA device {found}, not to {ordinal}; {remedy}")]
    OtherDevice {
        /// What was given.
        what: &'static str,
        /// The device of the handle.
        ordinal: usize,
        /// The device that it belongs to.
        found: usize,
        /// What to do instead.
        remedy: &'static str,
    },
    /// An address that no entry can lie at.
    #[error(
        "{pointer:#x} is not a valid address of {size}-byte entries; it must be a multiple of their size, and not null"
    )]
    Misaligned {
        /// The address.
        pointer: u64,
        /// Bytes of an entry.
        size: usize,
    },
    /// The device or its driver failed.
    #[error("{call} failed: {why}")]
    Device {
        /// The driver's function.
        call: &'static str,
        /// What the driver says.
        why: String,
    },
    /// Another thread panicked while it held a buffer.
    #[error("a buffer was left half-written by a thread that failed; load the last checkpoint")]
    Poisoned,
}

impl KernelError {
    /// No room for `len` entries of `T`.
    pub(crate) fn no_memory<T>(len: usize) -> Self {
        let bytes = len as u128 * size_of::<T>() as u128;
        Self::NoMemory { bytes }
    }
}

/// A combination of ingredients, in words.
fn ingredients(key: &KernelKey) -> String {
    let KernelKey {
        element,
        scale,
        block,
        hadamard,
    } = key;
    let blocks = match block {
        None => "no blocks".to_owned(),
        Some([rows, cols]) => format!("{rows}x{cols} blocks"),
    };
    let transform = if *hadamard {
        " after a Hadamard transform"
    } else {
        ""
    };
    format!("{element} elements with {scale:?} scales and {blocks}{transform}")
}

/// What a kernel fills, in words.
fn entries(needed: &Option<(Code, [usize; 2])>) -> String {
    match needed {
        Some((code, block)) => format!("{code} of {block:?}"),
        None => "of this kernel, which has no such part".to_owned(),
    }
}
