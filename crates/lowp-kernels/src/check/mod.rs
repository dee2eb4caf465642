//! Checks of every job, for every backend: lengths, ranges, ingredients, and which buffers it touches.

use std::collections::HashMap;
use std::ops::{Range, RangeInclusive};

use half::bf16;
use lowp_format::{Axis, KernelKey, Orientation, Part, ScaleLayout, Shape, Usage};

use crate::ingredients::{RuleKind, is_stochastic};
use crate::{
    AdamwJob, AmaxJob, Backend, BlockAmax, DecodeJob, EncodeJob, FlatEncodeJob, GradPart,
    HistoryJob, InterleaveJob, KernelError, Moments, RepackJob, Slot, Source, SumSquaresJob,
    Target, TensorInput, TransposeJob, Work,
};
use access::{Access, Kept, Mode};
use reads::Reads;
use target::{
    block_entries, check_delayed, check_target, compact, covers, ingredients, kernel_of,
    slots_differ, touched,
};

pub(crate) mod access;
pub(crate) mod reads;
mod step_scalars;
pub(crate) mod target;

/// What checking finds out.
#[derive(Debug)]
pub(crate) struct Checked<B: Backend> {
    pub(crate) access: Access<B>,
    /// Elements of all jobs.
    pub(crate) elements: usize,
    /// What the work reads of the scalars of a step.
    pub(crate) reads: Reads,
}

/// Checks every job of `work`, and that no two of them get into each other's way.
///
/// # Errors
/// As [`Backend::plan`].
pub(crate) fn check<B: Backend>(backend: &B, work: &Work<B>) -> Result<Checked<B>, KernelError> {
    let mut planner = Planner {
        backend,
        access: Access::default(),
        elements: 0,
    };
    planner.check(work)?;
    let Planner {
        mut access,
        elements,
        ..
    } = planner;
    access.check_aliases()?;
    Ok(Checked {
        access,
        elements,
        reads: Reads::of(work),
    })
}

struct Planner<'b, B: Backend> {
    backend: &'b B,
    access: Access<B>,
    elements: usize,
}

type Done = Result<(), KernelError>;

/// Margins of delayed scales: those whose powers of two are normal numbers, with room to spare.
const MARGINS: RangeInclusive<i32> = -64..=64;

impl<B: Backend> Planner<'_, B> {
    /// Checks every job of `work`.
    fn check(&mut self, work: &Work<B>) -> Done {
        fn each<T>(jobs: &[T], mut check: impl FnMut(usize, &T) -> Done) -> Done {
            jobs.iter()
                .enumerate()
                .try_for_each(|(index, job)| check(index, job))
        }
        match work {
            Work::Amax(jobs) => each(jobs, |i, job| self.amax(i, job)),
            Work::History(jobs) => {
                let mut entries = HashMap::new();
                each(jobs, |i, job| self.history(i, job, &mut entries))
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
            Work::Sum(jobs) => each(jobs, |i, job| self.vectors(i, &job.from, &job.into)),
            Work::Convert(jobs) => each(jobs, |i, job| self.vectors(i, &job.from, &job.into)),
            Work::StepScalars(jobs) => each(jobs, |i, job| self.step_scalars(i, job)),
        }
    }

    /// Notes a use of `buffer`, which must hold `needed` entries.
    fn whole<T: Kept>(
        &mut self,
        job: usize,
        what: impl std::fmt::Display,
        buffer: &B::Buffer<T>,
        needed: usize,
        mode: Mode,
    ) -> Done {
        let what = format!("{what} of job {job}");
        let found = self.backend.len::<T>(buffer);
        if found != needed {
            return Err(KernelError::Length {
                what,
                needed,
                found,
            });
        }
        self.access.add::<T>(self.backend, job, what, buffer, mode);
        Ok(())
    }

    /// Notes a use of `buffer`, of which entry `index` must exist.
    fn entry(
        &mut self,
        job: usize,
        what: &str,
        buffer: &B::Buffer<f32>,
        index: usize,
        mode: Mode,
    ) -> Done {
        let what = format!("{what} of job {job}");
        let found = self.backend.len::<f32>(buffer);
        if index >= found {
            let needed = index.saturating_add(1);
            return Err(KernelError::Length {
                what,
                needed,
                found,
            });
        }
        self.access
            .add::<f32>(self.backend, job, what, buffer, mode);
        Ok(())
    }

    fn len(&self, source: &Source<B>) -> usize {
        source.len(self.backend)
    }

    fn source(&mut self, job: usize, what: &str, source: &Source<B>, needed: usize) -> Done {
        self.elements = self.elements.saturating_add(needed);
        self.values(job, what, source, needed, Mode::Read)
    }

    fn values(
        &mut self,
        job: usize,
        what: &str,
        values: &Source<B>,
        needed: usize,
        mode: Mode,
    ) -> Done {
        match values {
            Source::F32(buffer) => self.whole::<f32>(job, what, buffer, needed, mode),
            Source::Bf16(buffer) => self.whole::<bf16>(job, what, buffer, needed, mode),
        }
    }

    /// What is known of the tensor or its lines for `orientation`. An observed amax fits the rules that are made of one;
    /// an orientation without a target needs nothing.
    fn tensor(
        &mut self,
        job: usize,
        shape: Shape,
        orientation: Orientation,
        (key, input): (&KernelKey, Option<&TensorInput<B>>),
        served: bool,
    ) -> Done {
        let outer = key.scale.outer();
        let last = |slot: &Slot<B>| {
            let entries = outer.map_or(1, |(extent, _)| extent.entries(orientation, shape));
            // Lines of nothing have no entry.
            entries
                .checked_sub(1)
                .map(|last| slot.index.saturating_add(last))
        };
        match input {
            Some(TensorInput::Known(slot)) => match last(slot) {
                Some(last) => self.entry(job, "tensor scale slot", &slot.buffer, last, Mode::Read),
                None => Ok(()),
            },
            Some(TensorInput::Observed(_)) if !key.scale.waits_for_amax() => {
                Err(KernelError::ObservedAmax { scale: key.scale })
            }
            Some(TensorInput::Observed(slot)) => match last(slot) {
                Some(last) => self.entry(job, "observed amax", &slot.buffer, last, Mode::Shared),
                None => Ok(()),
            },
            None if served && outer.is_some() => {
                missing(job, "the slot of the tensor scale or amax")
            }
            None => Ok(()),
        }
    }

    /// The ingredients of a job and what is known of its tensor, for the orientations that targets serve.
    fn kernels(
        &mut self,
        job: usize,
        shape: Shape,
        kernels: &[KernelKey; 2],
        inputs: &[Option<TensorInput<B>>; 2],
        targets: &[Target<B>],
    ) -> Result<Usage, KernelError> {
        let usage = |usage, target: &Target<B>| usage | target.spec.key.usage;
        let served = targets.iter().fold(Usage::empty(), usage);
        for orientation in Orientation::ALL {
            let index = orientation as usize;
            let serves = served.contains(orientation.usage());
            let key = &kernels[index];
            if serves {
                ingredients(orientation, key)?;
            }
            let input = inputs[index].as_ref();
            self.tensor(job, shape, orientation, (key, input), serves)?;
        }
        if slots_differ(self.backend, kernels, inputs, targets) {
            return Err(KernelError::SlotsDiffer { job });
        }
        Ok(served)
    }

    fn targets(&mut self, job: usize, shape: Shape, targets: &[Target<B>]) -> Done {
        targets.iter().try_for_each(|target| {
            let Target { spec, form, bytes } = target;
            let needed = match form {
                None => spec.bytes(shape),
                Some(_) => target.layout(shape)?.bytes(),
            };
            self.whole::<u8>(job, spec.key, bytes, needed, Mode::Write)
        })
    }

    fn encode(&mut self, index: usize, job: &EncodeJob<B>) -> Done {
        let (shape, kernels) = (job.shape, &job.kernels);
        let served = self.kernels(index, shape, kernels, &job.tensor, &job.targets)?;
        for orientation in served.orientations() {
            let key = &kernels[orientation as usize];
            if job.stochastic.is_some() && !is_stochastic(key) {
                let element = key.element;
                return Err(KernelError::Stochastic { element });
            }
        }
        for target in &job.targets {
            check_target(shape, kernels, target)?;
        }
        self.targets(index, shape, &job.targets)
    }

    fn amax(&mut self, index: usize, job: &AmaxJob<B>) -> Done {
        let all = elements(job.shape)?;
        let len = self.len(&job.source);
        range("source of an amax", job.start, len, all)?;
        if job.hadamard {
            let what = "amaxes of blocks, or of a part of a matrix,";
            let remedy = "give one tensor amax of whole rows from the first on";
            let whole = job.start == 0 && len == all;
            if !job.blocks.is_empty() || !whole {
                return Err(KernelError::Hadamard { what, remedy });
            }
        }
        self.source(index, "source", &job.source, len)?;
        if let Some(entry) = job.tensor {
            self.entry(index, "amax output", &job.out, entry, Mode::Shared)?;
        }
        for part in &job.blocks {
            self.blocks(index, "block amax output", job.shape, part, &job.out)?;
        }
        Ok(())
    }

    fn history(
        &mut self,
        index: usize,
        job: &HistoryJob<B>,
        entries: &mut HashMap<usize, usize>,
    ) -> Done {
        for (what, buffer) in [("observed amaxes", &job.observed), ("scales", &job.scales)] {
            self.entry(index, what, buffer, job.index, Mode::Shared)?;
            let address = self.backend.span(buffer).start + job.index * size_of::<f32>();
            if let Some(other) = entries.insert(address, index) {
                let what = format!("entry {} of the {what} of job {index}", job.index);
                return Err(KernelError::Aliased { what, other });
            }
        }
        if !MARGINS.contains(&job.margin) {
            return Err(KernelError::Margin {
                margin: job.margin,
                least: *MARGINS.start(),
                most: *MARGINS.end(),
            });
        }
        check_delayed(job.element)?;
        let window = self.backend.len::<f32>(&job.history);
        if window == 0 {
            return missing(index, "an entry of the amax history");
        }
        self.whole::<f32>(index, "amax history", &job.history, window, Mode::Write)
    }

    fn flat(&mut self, index: usize, job: &FlatEncodeJob<B>) -> Done {
        let all = elements(job.shape)?;
        range("elements of a flat encode", job.start, job.len, all)?;
        self.source(index, "source", &job.source, job.len)?;
        let (shape, kernels) = (job.shape, &job.kernels);
        let served = self.kernels(index, shape, kernels, &job.tensor, &job.targets)?;
        for orientation in served.orientations() {
            let key = &kernels[orientation as usize];
            if key.hadamard {
                let what = "a flat encode";
                let remedy = "encode rows";
                return Err(KernelError::Hadamard { what, remedy });
            }
            if RuleKind::of(key.scale) == RuleKind::FourOverSix {
                return Err(KernelError::FlatChoice);
            }
        }
        if let Some(flat) = &job.blocks {
            for (i, part) in flat.blocks.iter().enumerate() {
                self.blocks(index, "agreed block amaxes", job.shape, part, &flat.amaxes)?;
                if flat.blocks[..i].iter().any(|p| p.block == part.block) {
                    return Err(KernelError::BlocksTwice { block: part.block });
                }
            }
        }
        for target in &job.targets {
            let Target { spec, bytes, .. } = target;
            check_target(shape, kernels, target)?;
            compact(target, "a flat encode")?;
            let needed = match spec.key.part {
                Part::Data if spec.axes[0] != Axis::Rows => {
                    return Err(KernelError::FlatTransposed { key: spec.key });
                }
                // An empty range touches nothing, whatever its buffer is.
                Part::Data if job.len == 0 => self.backend.len::<u8>(bytes),
                Part::Data => touched(spec.code, job.start, job.len).len(),
                Part::BlockScale | Part::DecodeScale | Part::Amax => spec.bytes(shape),
            };
            self.whole::<u8>(index, spec.key, bytes, needed, Mode::Write)?;
            if spec.key.part.is_outer() {
                continue;
            }
            if let Some(block) = kernel_of(kernels, spec.key.usage)?.1.block {
                self.flat_blocks(index, job, block)?;
            }
        }
        Ok(())
    }

    /// The agreed amaxes of blocks that a target needs.
    fn flat_blocks(&self, index: usize, job: &FlatEncodeJob<B>, block: [usize; 2]) -> Done {
        let mut parts = job.blocks.iter().flat_map(|flat| &flat.blocks);
        if parts.any(|part| part.block == block) {
            return Ok(());
        }
        let [rows, cols] = block;
        missing(index, &format!("the agreed amaxes of {rows}x{cols} blocks"))
    }

    /// Notes a use of the amaxes of one kind of blocks in a vector.
    fn blocks(
        &mut self,
        job: usize,
        what: &'static str,
        shape: Shape,
        part: &BlockAmax,
        vector: &B::Buffer<f32>,
    ) -> Done {
        let entries = block_entries(shape, part.block)?;
        let len = self.backend.len::<f32>(vector);
        match range(what, part.start, entries, len)?.last() {
            Some(last) => self.entry(job, what, vector, last, Mode::Shared),
            None => Ok(()),
        }
    }

    fn decode(&mut self, index: usize, job: &DecodeJob<B>) -> Done {
        let all = elements(job.shape)?;
        self.elements = self.elements.saturating_add(all);
        let key = &job.kernel;
        let usage = job.data.spec.key.usage;
        let orientation = usage.orientations().next().unwrap_or(Orientation::Rowwise);
        ingredients(orientation, key)?;
        let parts = [
            (Part::Data, Some(&job.data)),
            (Part::BlockScale, job.block_scale.as_ref()),
        ];
        for (part, target) in parts {
            let Some(target) = target else { continue };
            let Target { spec, bytes, .. } = target;
            check_target(job.shape, &[*key; 2], target)?;
            compact(target, "decoding")?;
            if spec.key.part != part || !spec.key.usage.intersects(usage) {
                let key = spec.key;
                return Err(KernelError::DecodePart { key, part });
            }
            self.whole::<u8>(index, spec.key, bytes, spec.bytes(job.shape), Mode::Read)?;
        }
        if key.scale.entry().is_some() && job.block_scale.is_none() {
            return missing(index, "the block scale buffer");
        }
        let outer = key.scale.outer();
        match (&job.tensor_scale, outer) {
            (Some(bytes), Some((extent, _))) => {
                let needed = 4 * extent.entries(orientation, job.shape);
                self.whole::<u8>(index, "tensor_scale", bytes, needed, Mode::Read)?;
            }
            (Some(bytes), None) => self.whole::<u8>(index, "tensor_scale", bytes, 4, Mode::Read)?,
            (None, Some(_)) => return missing(index, "the tensor scale buffer"),
            (None, None) => {}
        }
        self.values(index, "output", &job.out, all, Mode::Write)
    }

    fn transpose(&mut self, index: usize, job: &TransposeJob<B>) -> Done {
        let [outer, inner] = job.entries;
        let all = elements(Shape::new(outer, inner))?;
        self.elements = self.elements.saturating_add(all);
        let needed = [outer * job.code.bytes(inner), inner * job.code.bytes(outer)];
        self.whole::<u8>(index, "source", &job.from, needed[0], Mode::Read)?;
        self.whole::<u8>(index, "destination", &job.to, needed[1], Mode::Write)
    }

    fn repack(&mut self, index: usize, job: &RepackJob<B>) -> Done {
        let RepackJob {
            from_layout,
            to_layout,
            from,
            to,
        } = job;
        self.elements = self.elements.saturating_add(to_layout.bytes());
        if from_layout.code() != to_layout.code() || !covers(from_layout, to_layout) {
            let describe = |layout: &ScaleLayout| {
                format!(
                    "{:?} {} entries of {:?} along {:?} ({})",
                    layout.entries(),
                    layout.code(),
                    layout.tile(),
                    layout.axes(),
                    layout.form().name()
                )
            };
            let [from, to] = [describe(from_layout), describe(to_layout)];
            return Err(KernelError::Repack { from, to });
        }
        self.whole::<u8>(index, "source", from, from_layout.bytes(), Mode::Read)?;
        self.whole::<u8>(index, "destination", to, to_layout.bytes(), Mode::Write)
    }

    fn interleave(&mut self, index: usize, job: &InterleaveJob<B>) -> Done {
        let width = job.widths.iter().try_fold(0usize, |a, &b| a.checked_add(b));
        let needed = elements(Shape::new(job.outer, width.unwrap_or(usize::MAX)))?;
        self.elements = self.elements.saturating_add(needed);
        self.whole::<u8>(index, "pieces", &job.from, needed, Mode::Read)?;
        self.whole::<u8>(index, "result", &job.to, needed, Mode::Write)
    }

    fn adamw(&mut self, index: usize, job: &AdamwJob<B>) -> Done {
        let len = self.backend.len::<f32>(&job.master);
        self.source(index, "gradient", &job.grad, len)?;
        self.whole::<f32>(index, "master", &job.master, len, Mode::Write)?;
        match &job.moments {
            Moments::F32 {
                exp_avg,
                exp_avg_sq,
            } => {
                self.whole::<f32>(index, "exp_avg", exp_avg, len, Mode::Write)?;
                self.whole::<f32>(index, "exp_avg_sq", exp_avg_sq, len, Mode::Write)?;
            }
            Moments::Bf16 {
                exp_avg,
                exp_avg_sq,
            } => {
                self.whole::<bf16>(index, "exp_avg", exp_avg, len, Mode::Write)?;
                self.whole::<bf16>(index, "exp_avg_sq", exp_avg_sq, len, Mode::Write)?;
            }
        }
        if let Some(amax) = &job.amax {
            if let Some(entry) = amax.tensor {
                self.entry(index, "amax slot", &amax.out, entry, Mode::Shared)?;
            }
            for part in amax.blocks() {
                let found = elements(amax.shape)?;
                let encoded = job.encode.as_ref().map(|encode| encode.shape.cols);
                if let Some(needed) = encoded.filter(|cols| *cols != amax.shape.cols) {
                    let what = format!("a row of the amaxes of job {index}");
                    let found = amax.shape.cols;
                    return Err(KernelError::Length {
                        what,
                        needed,
                        found,
                    });
                }
                if found != len {
                    let what = format!("the shape of the amaxes of job {index}");
                    let needed = len;
                    return Err(KernelError::Length {
                        what,
                        needed,
                        found,
                    });
                }
                self.blocks(index, "amaxes of lines", amax.shape, &part, &amax.out)?;
            }
        }
        let Some(encode) = &job.encode else {
            return Ok(());
        };
        let span = |buffer| self.backend.span::<f32>(buffer);
        let same =
            matches!(&encode.source, Source::F32(buffer) if span(buffer) == span(&job.master));
        if !same || encode.source_rounding != job.source_rounding {
            return Err(KernelError::FusedSource);
        }
        let observed = |input: &Option<_>| matches!(input, Some(TensorInput::Observed(_)));
        if encode.tensor.iter().any(observed) {
            return Err(KernelError::FusedObserved);
        }
        if encode.kernels.iter().any(|key| key.hadamard) {
            let what = "an encode that is fused with AdamW";
            let remedy = "weights are not transformed";
            return Err(KernelError::Hadamard { what, remedy });
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

    fn sum_squares(&mut self, index: usize, job: &SumSquaresJob<B>) -> Done {
        let len = self.len(&job.source);
        self.source(index, "source", &job.source, len)?;
        let needed = match self.backend.len::<u8>(&job.out) {
            GradPart::BYTES => GradPart::BYTES,
            _ => 16,
        };
        self.whole::<u8>(index, "sum of squares", &job.out, needed, Mode::Shared)
    }

    /// A vector that is read and one of as many values that is written.
    fn vectors(&mut self, index: usize, from: &Source<B>, into: &Source<B>) -> Done {
        let len = self.len(from);
        self.source(index, "source", from, len)?;
        self.values(index, "destination", into, len, Mode::Write)
    }
}

fn missing(job: usize, what: &str) -> Done {
    Err(KernelError::Missing {
        what: format!("{what} of job {job}"),
    })
}

/// Elements of `shape`, whose sides are small enough to compute with.
fn elements(shape: Shape) -> Result<usize, KernelError> {
    shape.check()?;
    Ok(shape.elements())
}

/// `start..start + count` of a buffer of `len` entries.
pub(crate) fn range(
    what: &'static str,
    start: usize,
    count: usize,
    len: usize,
) -> Result<Range<usize>, KernelError> {
    match start.checked_add(count) {
        Some(end) if end <= len => Ok(start..end),
        end => {
            let end = end.unwrap_or(usize::MAX);
            Err(KernelError::Range {
                what,
                start,
                end,
                len,
            })
        }
    }
}
