//! [`run_steps`]: what the steps of a gather plan do to buffers. Groups of ranks and folders of rank files run their
//! plans by it.

use std::ops::Range;

use lowp_format::{BufferKey, BufferSpec, GatherPlan, GatherStep, Transport};
use lowp_kernels::{Backend, InterleaveJob, TransposeJob};

/// Where the pieces of a gather come from, and where its buffers live.
///
/// Each call may do its work at once, or record it to be done later: work is in the order of the calls.
pub trait GatherTarget<B: Backend> {
    /// What can go wrong.
    type Error;

    /// The memory of a full buffer, of `bytes` bytes, that a step is about to fill.
    ///
    /// # Errors
    /// There is none.
    fn full(&mut self, spec: &BufferSpec, bytes: usize) -> Result<B::Buffer<u8>, Self::Error>;

    /// A full buffer that an earlier step filled.
    ///
    /// # Errors
    /// No step did.
    fn filled(&self, key: BufferKey) -> Result<B::Buffer<u8>, Self::Error>;

    /// Memory of `bytes` bytes for the pieces of a buffer that are interleaved when all are there.
    ///
    /// # Errors
    /// There is none.
    fn arrivals(&mut self, spec: &BufferSpec, bytes: usize) -> Result<B::Buffer<u8>, Self::Error>;

    /// Puts each rank's piece of a buffer at its range of `dest`; the ranges are in rank order.
    ///
    /// # Errors
    /// A piece is not there.
    fn fetch(
        &mut self,
        spec: &BufferSpec,
        dest: B::Buffer<u8>,
        ranges: Vec<Range<usize>>,
    ) -> Result<(), Self::Error>;

    /// Interleaves pieces that were fetched.
    ///
    /// # Errors
    /// The backend fails.
    fn interleave(&mut self, job: InterleaveJob<B>) -> Result<(), Self::Error>;

    /// Transposes a buffer that is complete.
    ///
    /// # Errors
    /// The backend fails.
    fn transpose(&mut self, job: TransposeJob<B>) -> Result<(), Self::Error>;

    /// Provides a buffer that is equal on all ranks.
    ///
    /// # Errors
    /// It is not there.
    fn replicated(&mut self, spec: &BufferSpec) -> Result<(), Self::Error>;
}

/// Runs the steps of `plan`, in their order, on `target`.
///
/// # Errors
/// What `target` returns.
pub fn run_steps<B: Backend, T: GatherTarget<B>>(
    plan: &GatherPlan,
    target: &mut T,
) -> Result<(), T::Error> {
    for step in &plan.steps {
        match step {
            GatherStep::Concat {
                spec,
                transport,
                pieces,
                ..
            } => {
                let full = target.full(spec, spec.bytes(plan.full))?;
                // A single piece is whole; there is nothing to interleave.
                let several = pieces.iter().filter(|&&bytes| bytes > 0).count() > 1;
                if *transport == Transport::Rows || !several {
                    target.fetch(spec, full, step.piece_ranges())?;
                    continue;
                }
                let from = target.arrivals(spec, step.wire_bytes())?;
                target.fetch(spec, from.clone(), step.piece_ranges())?;
                let [outer, _] = spec.entries(plan.full);
                target.interleave(InterleaveJob {
                    outer,
                    widths: pieces.iter().map(|bytes| bytes / outer).collect(),
                    from,
                    to: full,
                })?;
            }
            GatherStep::Derive { spec, from } => {
                let to = target.full(spec, spec.bytes(plan.full))?;
                let [inner, outer] = spec.entries(plan.full);
                if inner * outer == 0 {
                    continue;
                }
                target.transpose(TransposeJob {
                    code: spec.code,
                    entries: [outer, inner],
                    from: target.filled(*from)?,
                    to,
                })?;
            }
            GatherStep::Replicated { spec } => target.replicated(spec)?,
        }
    }
    Ok(())
}
