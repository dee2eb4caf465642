//! Checks of every job, for every backend: lengths, ranges, ingredients, and which buffers it touches.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use half::bf16;
use lowp_format::{Axis, Orientation, Part, ScaleLayout, Shape, state_bytes};

use crate::runs::written_twice;
use crate::{
    AmaxJob, Backend, DecodeJob, GradContribution, HistoryJob, InterleaveJob, KernelError, Master,
    MomentumJob, NormalizeJob, OwnPart, RearrangeJob, Rearranged, RepackJob, Runs, Source, State,
    SumPartsJob, SumSquaresJob, Target, TensorInput, TransposeJob, UpdateJob, Work,
};
use access::{Access, AccessList, Mode};
use encode::{check_delayed, check_target, compact, ingredients};
use planner::{Done, Planner, check_length, elements, missing};
use reads::Reads;

pub(crate) mod access;
pub(crate) mod encode;
mod planner;
pub(crate) mod reads;
mod round;
mod states;
mod step_scalars;

pub(crate) use planner::range;

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
            Work::Round(jobs) => each(jobs, |i, job| self.round(i, job)),
            Work::Transpose(jobs) => each(jobs, |i, job| self.transpose(i, job)),
            Work::Repack(jobs) => each(jobs, |i, job| self.repack(i, job)),
            Work::Interleave(jobs) => each(jobs, |i, job| self.interleave(i, job)),
            Work::Rearrange(jobs) => each(jobs, |i, job| self.rearrange(i, job)),
            Work::Update(jobs) => each(jobs, |i, job| self.update(i, job)),
            Work::SumSquares(jobs) => each(jobs, |i, job| self.sum_squares(i, job)),
            Work::Sum(jobs) => each(jobs, |i, job| self.vectors(i, &job.from, &job.into)),
            Work::SumParts(jobs) => each(jobs, |i, job| self.sum_parts(i, job)),
            Work::Convert(jobs) => each(jobs, |i, job| self.vectors(i, &job.from, &job.into)),
            Work::Momentum(jobs) => each(jobs, |i, job| self.momentum(i, job)),
            Work::Normalize(jobs) => each(jobs, |i, job| self.normalize(i, job)),
            Work::StepScalars(jobs) => each(jobs, |i, job| self.step_scalars(i, job)),
        }
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
        let widths = job.pieces.iter().map(|piece| piece.width);
        let width = widths.into_iter().try_fold(0usize, usize::checked_add);
        let needed = elements(Shape::new(job.outer, width.unwrap_or(usize::MAX)))?;
        self.elements = self.elements.saturating_add(needed);
        let found = self.backend.len::<u8>(&job.from);
        let ends = job.pieces.iter().filter_map(|piece| piece.end(job.outer));
        let end = ends.max().unwrap_or(0);
        if end > found {
            check_length(&format!("pieces of job {index}"), end, found)?;
        }
        self.whole::<u8>(index, "pieces", &job.from, found, Mode::Read)?;
        self.whole::<u8>(index, "result", &job.to, needed, Mode::Write)
    }

    fn rearrange(&mut self, index: usize, job: &RearrangeJob<B>) -> Done {
        let given = job.copies.iter().enumerate();
        let given = given.filter_map(|(number, copy)| Some((number, copy.normalized()?)));
        let (numbers, copies): (Vec<usize>, Vec<Runs>) = given.unzip();
        let all = copies.iter().map(Runs::entries);
        let all = all.reduce(|a, b| a?.checked_add(b?)).unwrap_or(Some(0));
        let all = all.unwrap_or(usize::MAX);
        for end in copies.iter().flat_map(Runs::ends) {
            let end = end.unwrap_or(usize::MAX);
            range("runs that are rearranged", 0, end, all)?;
        }
        self.elements = self.elements.saturating_add(all);
        match &job.buffers {
            Rearranged::Bytes(buffers) => self.both::<u8>(index, buffers, all),
            Rearranged::F32(buffers) => self.both::<f32>(index, buffers, all),
            Rearranged::Bf16(buffers) => self.both::<bf16>(index, buffers, all),
        }?;
        match written_twice(&copies, all) {
            None => Ok(()),
            Some([copy, entry]) => Err(KernelError::RunsOverlap {
                index,
                copy: numbers[copy],
                entry,
            }),
        }
    }

    /// A buffer that is read and one that is written.
    fn both<T: AccessList>(
        &mut self,
        index: usize,
        buffers: &[B::Buffer<T>; 2],
        all: usize,
    ) -> Done {
        let [from, to] = buffers;
        self.whole::<T>(index, "source", from, all, Mode::Read)?;
        self.whole::<T>(index, "destination", to, all, Mode::Write)
    }

    fn update(&mut self, index: usize, job: &UpdateJob<B>) -> Done {
        let len = job.master.len(self.backend);
        self.source(index, "gradient", &job.grad, len)?;
        match &job.master {
            Master::Values(values) => self.values(index, "master", values, len, Mode::Write)?,
            Master::Bf16Plus16 {
                parameter,
                remainder,
            } => {
                self.whole::<u8>(index, "parameter", parameter, 2 * len, Mode::Write)?;
                self.whole::<u8>(index, "remainder", remainder, 2 * len, Mode::Write)?;
                if job.amax.is_some() || job.encode.is_some() {
                    return Err(KernelError::CastParameter);
                }
            }
        }
        job.check_states()?;
        for (name, state) in job.rule.states().iter().zip(&job.states) {
            match state {
                State::Values(values) => {
                    self.values(index, name.name(), values, len, Mode::Write)?;
                }
                State::Fp8(bytes) => {
                    self.whole::<u8>(index, name.name(), bytes, state_bytes(len), Mode::Write)?;
                }
            }
        }
        // A rank without elements cuts nothing, wherever it begins.
        if job.in_fp8() && len > 0 {
            states::check_blocks(job)?;
        }
        if let Some(amax) = &job.amax {
            if let Some(entry) = amax.tensor {
                self.entry(index, "amax slot", &amax.out, entry, Mode::Shared)?;
            }
            for part in amax.blocks() {
                let found = elements(amax.shape)?;
                if let Some(encode) = &job.encode {
                    let what = format!("a row of the amaxes of job {index}");
                    check_length(&what, encode.shape.cols, amax.shape.cols)?;
                }
                let what = format!("the shape of the amaxes of job {index}");
                check_length(&what, len, found)?;
                self.blocks(index, "amaxes of lines", amax.shape, &part, &amax.out)?;
            }
        }
        let Some(encode) = &job.encode else {
            return Ok(());
        };
        let place = |values: &Source<B>| (values.dtype(), values.span(self.backend));
        let same = job.master.values().map(place) == Some(place(&encode.source));
        if !same || encode.source_rounding != job.source_rounding {
            return Err(KernelError::FusedSource);
        }
        let observed = |input: &Option<_>| matches!(input, Some(TensorInput::Observed(_)));
        if encode.tensor.iter().any(observed) {
            return Err(KernelError::FusedObserved);
        }
        if encode.kernels.iter().any(|key| key.hadamard) {
            let what = "an encode that is fused with an update";
            let remedy = "weights are not transformed";
            return Err(KernelError::Hadamard { what, remedy });
        }
        let what = format!("master of job {index}");
        check_length(&what, elements(encode.shape)?, len)?;
        self.encode(index, encode)
    }

    fn sum_squares(&mut self, index: usize, job: &SumSquaresJob<B>) -> Done {
        let len = self.len(&job.source);
        self.source(index, "source", &job.source, len)?;
        let needed = match self.backend.len::<u8>(&job.out) {
            GradContribution::BYTES => GradContribution::BYTES,
            _ => GradContribution::SUMS,
        };
        self.whole::<u8>(index, "sum of squares", &job.out, needed, Mode::Shared)
    }

    fn sum_parts(&mut self, index: usize, job: &SumPartsJob<B>) -> Done {
        let len = self.backend.len::<f32>(&job.into);
        // More parts than there are addresses have no memory.
        let needed = job.count.checked_mul(len).filter(|_| job.count > 0);
        let Some(needed) = needed else {
            return Err(KernelError::Parts { count: job.count });
        };
        self.source(index, "parts", &job.parts, needed)?;
        if let Some(OwnPart { number, values }) = &job.own {
            range(
                "the number of a part that lies elsewhere",
                *number,
                1,
                job.count,
            )?;
            if values.dtype() != job.parts.dtype() {
                return Err(KernelError::PartDtypes);
            }
            self.source(index, "part that lies elsewhere", values, len)?;
        }
        self.whole::<f32>(index, "sum", &job.into, len, Mode::Write)
    }

    fn momentum(&mut self, index: usize, job: &MomentumJob<B>) -> Done {
        let len = self.len(&job.grad);
        self.source(index, "gradient", &job.grad, len)?;
        self.whole::<f32>(index, "momentum", &job.momentum, len, Mode::Write)?;
        self.whole::<bf16>(index, "result", &job.out, len, Mode::Write)
    }

    fn normalize(&mut self, index: usize, job: &NormalizeJob<B>) -> Done {
        let len = self.backend.len::<bf16>(&job.from);
        self.elements = self.elements.saturating_add(len);
        self.whole::<bf16>(index, "matrix", &job.from, len, Mode::Read)?;
        self.whole::<u8>(
            index,
            "sum of squares",
            &job.sum,
            GradContribution::SUMS,
            Mode::Read,
        )?;
        self.whole::<bf16>(index, "result", &job.out, len, Mode::Write)
    }

    /// A vector that is read and one of as many values that is written.
    fn vectors(&mut self, index: usize, from: &Source<B>, into: &Source<B>) -> Done {
        let len = self.len(from);
        self.source(index, "source", from, len)?;
        self.values(index, "destination", into, len, Mode::Write)
    }
}

/// Whether `from` has an entry for every entry of `to`.
fn covers(from: &ScaleLayout, to: &ScaleLayout) -> bool {
    let [rows, cols] = to.entries();
    let Some(last) = rows.checked_sub(1).zip(cols.checked_sub(1)) else {
        return true;
    };
    let [row, col] = to.element(last.0, last.1);
    let (tile, entries) = (from.tile(), from.entries());
    let at = match from.axes()[0] {
        Axis::Rows => [row / tile[0], col / tile[1]],
        Axis::Cols => [col / tile[0], row / tile[1]],
    };
    at[0] < entries[0] && at[1] < entries[1]
}
