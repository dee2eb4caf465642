//! [`KernelError`]: what can be wrong with work before and while it runs.

use lowp_format::FormatError;
use thiserror::Error;

/// What is wrong, with the numbers and the remedy.
#[derive(Clone, Debug, Error, PartialEq)]
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
        "{what}: the buffer is also used by job {other} of the same plan; give every output a buffer of its own, or plan the jobs apart"
    )]
    Aliased {
        /// Which buffer.
        what: String,
        /// The other job.
        other: usize,
    },
    /// No kernel is made of these ingredients.
    #[error("no kernel for {what}")]
    NoKernel {
        /// The ingredients.
        what: String,
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
        "the plan uses {needed} parameter groups and the run gave scalars for {given}; pass one AdamScalars per group"
    )]
    Scalars {
        /// Groups in the plan.
        needed: usize,
        /// Groups given.
        given: usize,
    },
    /// More memory than there is.
    #[error(
        "there is no room for {bytes} bytes; free memory, cut the tensors into more ranks, or use smaller ones"
    )]
    NoMemory {
        /// Bytes asked for.
        bytes: u128,
    },
    /// Something that a graph cannot hold, or that must be there before.
    #[error("{what} cannot be captured in a graph; do it before the capture, or after it")]
    InCapture {
        /// What was asked for.
        what: &'static str,
    },
    /// A graph on another stream than that which captured it.
    #[error(
        "the graph was captured by another handle; launch it with that one, or capture it again"
    )]
    OtherStream,
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
    /// An address that no entry can lie at.
    #[error(
        "{pointer:#x} is no address of {size}-byte entries; it must be a multiple of their size, and not null"
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
