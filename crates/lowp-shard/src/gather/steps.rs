//! [`run_steps`]: what the steps of a gather plan do to buffers. Groups of ranks and folders of rank files run their
//! plans by it.

use std::ops::Range;

use lowp_format::{BufferKey, BufferSpec, GatherPlan, GatherStep, PieceLayout, Shape};
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

    /// Memory of `bytes` bytes for the pieces of a buffer that are interleaved or transposed when all are there.
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

/// Whether pieces of several ranks arrive beside where they go. A single piece is whole: there is nothing to interleave.
pub fn is_interleaved(step: &GatherStep) -> bool {
    let several = |pieces: &[usize]| pieces.iter().filter(|&&piece| piece > 0).count() > 1;
    match step {
        GatherStep::Concat {
            layout: PieceLayout::Interleave,
            pieces,
            ..
        } => several(pieces),
        _ => false,
    }
}

/// Whether pieces are transposed when all are there.
fn is_transposed(step: &GatherStep) -> bool {
    matches!(
        step,
        GatherStep::Concat {
            layout: PieceLayout::Transpose,
            ..
        }
    )
}

/// A buffer of the memory that a parameter is gathered in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBuffer {
    /// Its name in the full tensor.
    pub key: BufferKey,
    /// Whether pieces arrive there that are interleaved or transposed when all are there.
    pub arrivals: bool,
    /// Its length.
    pub bytes: usize,
}

/// The memory that a parameter with these plans is gathered in: each buffer of all plans once, and once more where pieces have to be
/// interleaved or transposed.
pub fn pool_buffers<'a>(plans: impl IntoIterator<Item = &'a GatherPlan>) -> Vec<PoolBuffer> {
    let mut all: Vec<PoolBuffer> = Vec::new();
    let mut take = |key: BufferKey, arrivals: bool, bytes: usize| {
        if !all.iter().any(|b| (b.key, b.arrivals) == (key, arrivals)) {
            all.push(PoolBuffer {
                key,
                arrivals,
                bytes,
            });
        }
    };
    for plan in plans {
        for step in &plan.steps {
            let spec = step.spec();
            if matches!(step, GatherStep::Replicated { .. }) {
                continue;
            }
            if is_interleaved(step) || is_transposed(step) {
                take(spec.key, true, step.wire_bytes());
            }
            take(spec.key, false, spec.bytes(plan.full));
        }
    }
    all
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
            GatherStep::Concat { spec, pieces, .. } => {
                let full = target.full(spec, spec.bytes(plan.full))?;
                if !is_interleaved(step) && !is_transposed(step) {
                    target.fetch(spec, full, step.piece_ranges())?;
                    continue;
                }
                let from = target.arrivals(spec, step.wire_bytes())?;
                target.fetch(spec, from.clone(), step.piece_ranges())?;
                if is_transposed(step) {
                    turn(target, spec, plan.full, from, full)?;
                    continue;
                }
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
                let from = target.filled(*from)?;
                turn(target, spec, plan.full, from, to)?;
            }
            GatherStep::Replicated { spec } => target.replicated(spec)?,
        }
    }
    Ok(())
}

/// Transposes `from` into `to`, the buffer of `spec` of a tensor of shape `full`.
fn turn<B: Backend, T: GatherTarget<B>>(
    target: &mut T,
    spec: &BufferSpec,
    full: Shape,
    from: B::Buffer<u8>,
    to: B::Buffer<u8>,
) -> Result<(), T::Error> {
    let [inner, outer] = spec.entries(full);
    if inner * outer == 0 {
        return Ok(());
    }
    target.transpose(TransposeJob {
        code: spec.code,
        entries: [outer, inner],
        from,
        to,
    })
}
