//! [`memory_steps`]: what the steps of a gather plan do to memory. Groups of ranks, hooks, flat weights and folders of rank
//! files do the same over memory of their own.

use std::ops::Range;

use super::tiles::tile_copies;
use lowp_format::{BufferKey, BufferSpec, Code, GatherPlan, GatherStep, PieceLayout};
use lowp_kernels::{
    Backend, InterleaveJob, KernelError, PieceRows, RearrangeJob, Rearranged, Runs, TransposeJob,
    Work,
};

/// A buffer of the memory that a parameter is gathered in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBuffer {
    /// The buffer's name in the full tensor.
    pub key: BufferKey,
    /// Whether pieces arrive there that are put in order when all are there.
    pub arrivals: bool,
    /// Bytes of the buffer.
    pub bytes: usize,
}

/// One step of a gather. Steps are done in their order, at once or later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryStep<'p> {
    /// Each rank's piece of a buffer goes to `to`, where pieces follow each other in rank order ([`piece_ranges`]).
    Fetch {
        /// The buffer.
        spec: &'p BufferSpec,
        /// Where the pieces go.
        to: PoolBuffer,
        /// Bytes of each rank's piece.
        pieces: &'p [usize],
    },
    /// Each rank's piece of a buffer is taken out of its message ([`Exchange`](super::Exchange)).
    Unpack {
        /// The buffer.
        spec: &'p BufferSpec,
        /// Where it goes: pieces follow each other in rank order.
        to: PoolBuffer,
        /// Bytes of each rank's piece. [`Exchange::starts`](super::Exchange::starts) says where it begins in the messages.
        pieces: &'p [usize],
        /// Rows of each piece, which are interleaved.
        outer: usize,
    },
    /// Pieces that were fetched are interleaved ([`InterleaveJob`]).
    Interleave {
        /// Rows of each piece.
        outer: usize,
        /// Bytes of each piece.
        pieces: &'p [usize],
        /// Where the pieces are.
        from: PoolBuffer,
        /// The full buffer.
        to: PoolBuffer,
    },
    /// Tiles that were fetched go to their places ([`RearrangeJob`]).
    Rearrange {
        /// Where each tile goes.
        copies: Vec<Runs>,
        /// Where the tiles are.
        from: PoolBuffer,
        /// The full buffer.
        to: PoolBuffer,
    },
    /// A buffer that is complete is transposed ([`TransposeJob`]).
    Transpose {
        /// The code of the entries.
        code: Code,
        /// Entries of the buffer: outer x inner.
        entries: [usize; 2],
        /// The buffer that is transposed.
        from: PoolBuffer,
        /// Where the transpose goes.
        to: PoolBuffer,
    },
    /// A buffer that is equal on all ranks is provided.
    Replicated(&'p BufferSpec),
}

impl MemoryStep<'_> {
    /// The work of a rank by itself, over the buffers that `at` finds; `None` of a step without any.
    ///
    /// # Errors
    /// What `at` returns.
    pub fn work<B: Backend, E>(
        self,
        at: impl FnMut(PoolBuffer) -> Result<B::Buffer<u8>, E>,
    ) -> Result<Option<Work<B>>, E> {
        let mut local = LocalWork::new();
        local.add(self, at)?;
        Ok(local.work().next())
    }
}

/// Where pieces of these lengths lie that follow each other.
pub fn piece_ranges(pieces: &[usize]) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0;
    pieces.iter().map(move |&bytes| {
        end += bytes;
        end - bytes..end
    })
}

/// Whether pieces arrive beside where they go: tiles, and pieces of several ranks that are interleaved. A single one of these is whole.
pub fn is_rearranged(step: &GatherStep) -> bool {
    let several = |pieces: &[usize]| pieces.iter().filter(|&&piece| piece > 0).count() > 1;
    match step {
        GatherStep::Concat { layout, pieces, .. } => match layout {
            PieceLayout::Interleave => several(pieces),
            PieceLayout::TilesBelow | PieceLayout::TilesBeside => true,
            PieceLayout::Rows | PieceLayout::Transpose => false,
        },
        GatherStep::Derive { .. } | GatherStep::Replicated { .. } => false,
    }
}

/// The steps of `plan`.
pub fn memory_steps(plan: &GatherPlan) -> Vec<MemoryStep<'_>> {
    let mut steps = Vec::new();
    for step in &plan.steps {
        let spec = step.spec();
        let [rows, cols] = spec.entries(plan.full);
        let buffer = |key, arrivals, bytes| PoolBuffer {
            key,
            arrivals,
            bytes,
        };
        let full = buffer(spec.key, false, spec.bytes(plan.full));
        let transpose = |from| MemoryStep::Transpose {
            code: spec.code,
            entries: [cols, rows],
            from,
            to: full,
        };
        let (layout, pieces) = match step {
            GatherStep::Concat { layout, pieces, .. } => (layout, pieces),
            GatherStep::Derive { from, .. } => {
                let bytes = cols * spec.code.bytes(rows);
                steps.push(transpose(buffer(*from, false, bytes)));
                continue;
            }
            GatherStep::Replicated { .. } => {
                steps.push(MemoryStep::Replicated(spec));
                continue;
            }
        };
        let fetch = |to| MemoryStep::Fetch { spec, to, pieces };
        let arrived = buffer(spec.key, true, step.wire_bytes());
        let interleave = MemoryStep::Interleave {
            outer: rows,
            pieces,
            from: arrived,
            to: full,
        };
        match layout {
            PieceLayout::Transpose => steps.extend([fetch(arrived), transpose(arrived)]),
            PieceLayout::TilesBelow | PieceLayout::TilesBeside => {
                let rearrange = MemoryStep::Rearrange {
                    copies: tile_copies(plan, spec, step),
                    from: arrived,
                    to: full,
                };
                steps.extend([fetch(arrived), rearrange]);
            }
            PieceLayout::Interleave if is_rearranged(step) => {
                steps.extend([fetch(arrived), interleave]);
            }
            PieceLayout::Rows | PieceLayout::Interleave => steps.push(fetch(full)),
        }
    }
    steps
}

/// The memory that a parameter is gathered in by these steps: each buffer once, and once more where pieces that arrived have to be
/// interleaved or transposed.
pub fn pool_buffers<'a, 'p: 'a>(
    steps: impl IntoIterator<Item = &'a MemoryStep<'p>>,
) -> Vec<PoolBuffer> {
    let mut all: Vec<PoolBuffer> = Vec::new();
    for step in steps {
        let to = match *step {
            MemoryStep::Fetch { to, .. }
            | MemoryStep::Unpack { to, .. }
            | MemoryStep::Interleave { to, .. }
            | MemoryStep::Rearrange { to, .. }
            | MemoryStep::Transpose { to, .. } => to,
            MemoryStep::Replicated(_) => continue,
        };
        if !all
            .iter()
            .any(|b| (b.key, b.arrivals) == (to.key, to.arrivals))
        {
            all.push(to);
        }
    }
    all
}

/// The work of a rank by itself in gathers that are done together: what is interleaved or rearranged, then what is transposed.
#[derive(Debug)]
pub(crate) struct LocalWork<B: Backend> {
    interleave: Vec<InterleaveJob<B>>,
    rearrange: Vec<RearrangeJob<B>>,
    transpose: Vec<TransposeJob<B>>,
}

impl<B: Backend> LocalWork<B> {
    pub(crate) fn new() -> Self {
        Self {
            interleave: Vec::new(),
            rearrange: Vec::new(),
            transpose: Vec::new(),
        }
    }

    /// Adds that of a step, over the buffers that `at` finds.
    pub(crate) fn add<E>(
        &mut self,
        step: MemoryStep<'_>,
        mut at: impl FnMut(PoolBuffer) -> Result<B::Buffer<u8>, E>,
    ) -> Result<(), E> {
        match step {
            MemoryStep::Interleave {
                outer,
                pieces,
                from,
                to,
            } => self.interleave.push(InterleaveJob {
                outer,
                pieces: PieceRows::dense(outer, pieces.iter().map(|bytes| bytes / outer)),
                from: at(from)?,
                to: at(to)?,
            }),
            MemoryStep::Rearrange { copies, from, to } => self.rearrange.push(RearrangeJob {
                copies,
                buffers: Rearranged::Bytes([at(from)?, at(to)?]),
            }),
            MemoryStep::Transpose {
                code,
                entries,
                from,
                to,
            } => {
                let [from, to] = [at(from)?, at(to)?];
                if !entries.contains(&0) {
                    self.transpose.push(TransposeJob {
                        code,
                        entries,
                        from,
                        to,
                    });
                }
            }
            MemoryStep::Fetch { .. } | MemoryStep::Unpack { .. } | MemoryStep::Replicated(_) => {}
        }
        Ok(())
    }

    /// Adds that pieces are taken out of `messages`, in which they begin at `starts`, and follow each other row by row in `to`.
    pub(crate) fn unpack(
        &mut self,
        messages: &B::Buffer<u8>,
        starts: &[usize],
        outer: usize,
        lens: &[usize],
        to: B::Buffer<u8>,
    ) {
        let even = |values: &[usize]| values.windows(2).all(|pair| pair[0] == pair[1]);
        let steps: Vec<usize> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let job = |outer, pieces| InterleaveJob {
            outer,
            pieces,
            from: messages.clone(),
            to,
        };
        self.interleave.push(match (&steps[..], lens) {
            // Equal pieces, equally far apart, are rows.
            ([pitch, ..], [width, ..]) if outer == 1 && even(lens) && even(&steps) => {
                let rows = PieceRows {
                    start: starts[0],
                    width: *width,
                    pitch: *pitch,
                };
                job(lens.len(), vec![rows])
            }
            _ => {
                let piece = |(&start, &len): (&usize, &usize)| PieceRows {
                    start,
                    width: len / outer.max(1),
                    pitch: len / outer.max(1),
                };
                job(outer, starts.iter().zip(lens).map(piece).collect())
            }
        });
    }

    fn work(self) -> impl Iterator<Item = Work<B>> {
        let interleave = (!self.interleave.is_empty()).then_some(Work::Interleave(self.interleave));
        let rearrange = (!self.rearrange.is_empty()).then_some(Work::Rearrange(self.rearrange));
        let transpose = (!self.transpose.is_empty()).then_some(Work::Transpose(self.transpose));
        interleave.into_iter().chain(rearrange).chain(transpose)
    }

    pub(crate) fn plan(self, backend: &B) -> Result<Vec<B::Plan>, KernelError> {
        self.work().map(|work| backend.plan(work)).collect()
    }
}
