//! Checks of every job: lengths, ranges, ingredients, and which buffers it touches.

use std::collections::HashMap;

use lowp_format::{Axis, FormatError, Part, ScaleLayout, ScaleSource, Shape, cdiv};

use super::access::{Access, Mode};
use super::generic::flat::touched;
use super::layout::{Layout, block_of, check_target, covers};
use super::{Cpu, range};
use crate::table::{Traits, traits};
use crate::{
    AdamwJob, AmaxJob, DecodeJob, EncodeJob, FlatEncodeJob, InterleaveJob, KernelError, Moments,
    RepackJob, ScaleJob, Slot, Source, SumSquaresJob, Target, TransposeJob, Work,
};

/// What checking finds out.
#[derive(Default)]
pub(super) struct Planner {
    pub(super) access: Access,
    /// The walk of each encode, also of those within AdamW jobs.
    pub(super) layouts: Vec<Layout>,
    /// Elements of all jobs.
    pub(super) elements: usize,
    /// Parameter groups that the work uses.
    pub(super) groups: usize,
}

type Checked = Result<(), KernelError>;

impl Planner {
    /// Checks every job of `work`.
    pub(super) fn check(&mut self, work: &Work<Cpu>) -> Checked {
        fn each<T>(jobs: &[T], mut check: impl FnMut(usize, &T) -> Checked) -> Checked {
            jobs.iter()
                .enumerate()
                .try_for_each(|(index, job)| check(index, job))
        }
        match work {
            Work::Amax(jobs) => each(jobs, |i, job| self.amax(i, job)),
            Work::Scale(jobs) => {
                let mut entries = HashMap::new();
                each(jobs, |i, job| self.scale(i, job, &mut entries))
            }
            Work::Encode(jobs) => each(jobs, |i, job| {
                self.source(i, "source", &job.source, elements(job.shape)?)?;
                self.encode(i, job)
            }),
            Work::FlatEncode(jobs) => each(jobs, |i, job| self.flat(i, job)),
            Work::Decode(jobs) => each(jobs, |i, job| self.decode(i, job)),
            Work::Transpose(jobs) => each(jobs, |i, job| self.transpose(i, job)),
            Work::Repack(jobs) => each(jobs, |i, job| self.repack(i, job)),
            Work::Interleave(jobs) => each(jobs, |i, job| self.interleave(i, job)),
            Work::Adamw(jobs) => each(jobs, |i, job| self.adamw(i, job)),
            Work::SumSquares(jobs) => each(jobs, |i, job| self.sum_squares(i, job)),
        }
    }

    fn source(&mut self, job: usize, what: &str, source: &Source<Cpu>, needed: usize) -> Checked {
        self.elements += needed;
        match source {
            Source::F32(buffer) => self
                .access
                .floats
                .add(job, what, buffer, needed, Mode::Read),
            Source::Bf16(buffer) => self
                .access
                .halves
                .add(job, what, buffer, needed, Mode::Read),
        }
    }

    /// The slot of a tensor-level scale or amax.
    fn tensor(&mut self, job: usize, slot: Option<&Slot<Cpu>>, traits: &Traits) -> Checked {
        match slot {
            Some(Slot { buffer, index }) => {
                let what = "tensor scale slot";
                self.access
                    .floats
                    .add_entry(job, what, buffer, *index, Mode::Read)
            }
            None if traits.tensor => missing(job, "the slot of the tensor scale or amax"),
            None => Ok(()),
        }
    }

    fn targets(&mut self, job: usize, shape: Shape, targets: &[Target<Cpu>]) -> Checked {
        targets.iter().try_for_each(|Target { spec, bytes }| {
            self.access
                .bytes
                .add(job, spec.key, bytes, spec.bytes(shape), Mode::Write)
        })
    }

    fn encode(&mut self, index: usize, job: &EncodeJob<Cpu>) -> Checked {
        let traits = traits(&job.kernel)?;
        if job.stochastic.is_some() && !traits.stochastic {
            let what = format!("stochastic rounding of {} elements", job.kernel.element);
            return Err(KernelError::NoKernel { what });
        }
        self.tensor(index, job.tensor.as_ref(), &traits)?;
        self.layouts
            .push(Layout::new(job.shape, &job.kernel, &job.targets)?);
        self.targets(index, job.shape, &job.targets)
    }

    fn amax(&mut self, index: usize, job: &AmaxJob<Cpu>) -> Checked {
        let all = elements(job.shape)?;
        let len = match &job.source {
            Source::F32(buffer) => buffer.len(),
            Source::Bf16(buffer) => buffer.len(),
        };
        range("source of an amax", job.start, len, all)?;
        self.source(index, "source", &job.source, len)?;
        let floats = &mut self.access.floats;
        if let Some(entry) = job.tensor {
            floats.add_entry(index, "amax output", &job.out, entry, Mode::Shared)?;
        }
        for part in &job.blocks {
            let entries = block_entries(job.shape, part.block)?;
            if entries > 0 {
                let last = part.start.saturating_add(entries - 1);
                floats.add_entry(index, "block amax output", &job.out, last, Mode::Shared)?;
            }
        }
        Ok(())
    }

    fn scale(
        &mut self,
        index: usize,
        job: &ScaleJob<Cpu>,
        entries: &mut HashMap<(usize, usize), usize>,
    ) -> Checked {
        for (what, buffer) in [("observed amaxes", &job.observed), ("scales", &job.scales)] {
            self.access
                .floats
                .add_entry(index, what, buffer, job.index, Mode::Shared)?;
            if let Some(other) = entries.insert((buffer.address(), job.index), index) {
                let what = format!("entry {} of the {what} of job {index}", job.index);
                return Err(KernelError::Aliased { what, other });
            }
        }
        match (job.rule, &job.history) {
            (ScaleSource::History { window, .. }, Some(history)) => {
                self.access
                    .floats
                    .add(index, "amax history", history, window, Mode::Write)
            }
            (ScaleSource::History { .. }, None) => missing(index, "the amax history"),
            _ => Ok(()),
        }
    }

    fn flat(&mut self, index: usize, job: &FlatEncodeJob<Cpu>) -> Checked {
        let all = elements(job.shape)?;
        range("elements of a flat encode", job.start, job.len, all)?;
        self.source(index, "source", &job.source, job.len)?;
        let traits = traits(&job.kernel)?;
        self.tensor(index, job.tensor.as_ref(), &traits)?;
        for target in &job.targets {
            let Target { spec, bytes } = target;
            check_target(job.shape, &job.kernel, &traits, target)?;
            let needed = match spec.key.part {
                Part::Data if spec.axes[0] != Axis::Rows => {
                    let what = format!("a flat encode of the transposed {}", spec.key);
                    return Err(KernelError::NoKernel { what });
                }
                // An empty range touches nothing, whatever its buffer is.
                Part::Data if job.len == 0 => bytes.len(),
                Part::Data => touched(spec.code, job.start, job.len).len(),
                Part::BlockScale | Part::TensorScale => spec.bytes(job.shape),
            };
            self.access
                .bytes
                .add(index, spec.key, bytes, needed, Mode::Write)?;
            if spec.key.part == Part::TensorScale {
                continue;
            }
            if let Some(block) = block_of(&job.kernel, spec.key.usage)? {
                self.flat_blocks(index, job, block)?;
            }
        }
        Ok(())
    }

    fn flat_blocks(
        &mut self,
        index: usize,
        job: &FlatEncodeJob<Cpu>,
        block: [usize; 2],
    ) -> Checked {
        let [rows, cols] = block;
        let Some((flat, part)) = job.blocks.as_ref().and_then(|flat| {
            flat.blocks
                .iter()
                .find(|part| part.block == block)
                .map(|part| (flat, part))
        }) else {
            return missing(index, &format!("the agreed amaxes of {rows}x{cols} blocks"));
        };
        match block_entries(job.shape, block)? {
            0 => Ok(()),
            entries => {
                let last = part.start.saturating_add(entries - 1);
                let what = "agreed block amaxes";
                self.access
                    .floats
                    .add_entry(index, what, &flat.amaxes, last, Mode::Read)
            }
        }
    }

    fn decode(&mut self, index: usize, job: &DecodeJob<Cpu>) -> Checked {
        let all = elements(job.shape)?;
        self.elements += all;
        let key = &job.kernel;
        let traits = traits(key)?;
        let Access {
            bytes: table,
            floats,
            ..
        } = &mut self.access;
        let usage = job.data.spec.key.usage;
        let parts = [
            (Part::Data, Some(&job.data)),
            (Part::BlockScale, job.block_scale.as_ref()),
        ];
        for (part, target) in parts {
            let Some(target) = target else { continue };
            let Target { spec, bytes } = target;
            check_target(job.shape, key, &traits, target)?;
            if spec.key.part != part || block_of(key, spec.key.usage)? != block_of(key, usage)? {
                let what = format!("decoding with {} in the place of {part:?}", spec.key);
                return Err(KernelError::NoKernel { what });
            }
            table.add(index, spec.key, bytes, spec.bytes(job.shape), Mode::Read)?;
        }
        if traits.entry.is_some() && job.block_scale.is_none() {
            return missing(index, "the block scale buffer");
        }
        match &job.tensor_scale {
            Some(bytes) => table.add(index, "tensor_scale", bytes, 4, Mode::Read)?,
            None if traits.tensor => return missing(index, "the tensor scale buffer"),
            None => {}
        }
        floats.add(index, "output", &job.out, all, Mode::Write)
    }

    fn transpose(&mut self, index: usize, job: &TransposeJob<Cpu>) -> Checked {
        let [outer, inner] = job.entries;
        self.elements += elements(Shape::new(outer, inner))?;
        let needed = [outer * job.code.bytes(inner), inner * job.code.bytes(outer)];
        let bytes = &mut self.access.bytes;
        bytes.add(index, "source", &job.from, needed[0], Mode::Read)?;
        bytes.add(index, "destination", &job.to, needed[1], Mode::Write)
    }

    fn repack(&mut self, index: usize, job: &RepackJob<Cpu>) -> Checked {
        let RepackJob {
            from_layout,
            to_layout,
            from,
            to,
        } = job;
        self.elements += to_layout.bytes();
        if from_layout.code != to_layout.code || !covers(from_layout, to_layout) {
            let describe = |layout: &ScaleLayout| {
                let ScaleLayout {
                    form,
                    code,
                    axes,
                    tile,
                    entries,
                    ..
                } = layout;
                format!(
                    "{entries:?} {code} entries of {tile:?} along {axes:?} ({})",
                    form.name()
                )
            };
            let [from, to] = [describe(from_layout), describe(to_layout)];
            return Err(KernelError::NoKernel {
                what: format!("repacking {from} to {to}"),
            });
        }
        let bytes = &mut self.access.bytes;
        bytes.add(index, "source", from, from_layout.bytes(), Mode::Read)?;
        bytes.add(index, "destination", to, to_layout.bytes(), Mode::Write)
    }

    fn interleave(&mut self, index: usize, job: &InterleaveJob<Cpu>) -> Checked {
        let needed = elements(Shape::new(job.outer, job.widths.iter().sum()))?;
        self.elements += needed;
        let bytes = &mut self.access.bytes;
        bytes.add(index, "pieces", &job.from, needed, Mode::Read)?;
        bytes.add(index, "result", &job.to, needed, Mode::Write)
    }

    fn adamw(&mut self, index: usize, job: &AdamwJob<Cpu>) -> Checked {
        let len = job.master.len();
        self.groups = self.groups.max(job.group + 1);
        self.source(index, "gradient", &job.grad, len)?;
        let Access { floats, halves, .. } = &mut self.access;
        floats.add(index, "master", &job.master, len, Mode::Write)?;
        match &job.moments {
            Moments::F32 {
                exp_avg,
                exp_avg_sq,
            } => {
                floats.add(index, "exp_avg", exp_avg, len, Mode::Write)?;
                floats.add(index, "exp_avg_sq", exp_avg_sq, len, Mode::Write)?;
            }
            Moments::Bf16 {
                exp_avg,
                exp_avg_sq,
            } => {
                halves.add(index, "exp_avg", exp_avg, len, Mode::Write)?;
                halves.add(index, "exp_avg_sq", exp_avg_sq, len, Mode::Write)?;
            }
        }
        if let Some(Slot {
            buffer,
            index: entry,
        }) = &job.amax
        {
            floats.add_entry(index, "amax slot", buffer, *entry, Mode::Shared)?;
        }
        let Some(encode) = &job.encode else {
            self.layouts.push(Layout::default());
            return Ok(());
        };
        let same = matches!(&encode.source, Source::F32(buffer) if buffer.ptr_eq(&job.master));
        if !same || encode.source_rounding != job.source_rounding {
            let what = "a fused encode whose source or rounding is not that of the master";
            return Err(KernelError::NoKernel {
                what: what.to_owned(),
            });
        }
        if len != elements(encode.shape)? {
            let (needed, found) = (encode.shape.elements(), len);
            let what = format!("master of job {index}");
            return Err(KernelError::Length {
                what,
                needed,
                found,
            });
        }
        self.encode(index, encode)
    }

    fn sum_squares(&mut self, index: usize, job: &SumSquaresJob<Cpu>) -> Checked {
        let len = match &job.source {
            Source::F32(buffer) => buffer.len(),
            Source::Bf16(buffer) => buffer.len(),
        };
        self.source(index, "source", &job.source, len)?;
        self.access
            .bytes
            .add(index, "sum of squares", &job.out, 16, Mode::Shared)
    }
}

fn missing(job: usize, what: &str) -> Checked {
    Err(KernelError::Missing {
        what: format!("{what} of job {job}"),
    })
}

/// Elements of `shape`, where four bytes each are addressable.
fn elements(shape: Shape) -> Result<usize, KernelError> {
    let dims = vec![shape.rows, shape.cols];
    match shape
        .rows
        .checked_mul(shape.cols)
        .filter(|n| n.checked_mul(4).is_some())
    {
        Some(elements) => Ok(elements),
        None => Err(FormatError::TooLarge { dims }.into()),
    }
}

/// Number of blocks of `shape`.
fn block_entries(shape: Shape, [rows, cols]: [usize; 2]) -> Result<usize, KernelError> {
    if rows == 0 || cols == 0 {
        return Err(KernelError::NoKernel {
            what: format!("blocks of {rows}x{cols}"),
        });
    }
    Ok(cdiv(shape.rows, rows) * cdiv(shape.cols, cols))
}
