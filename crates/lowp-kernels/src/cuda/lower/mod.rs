//! From jobs to the rows of the device table. Every decision was taken when the work was checked;
//! here addresses and codes are written down.

mod amax;
mod ingredients;

pub(super) use amax::amaxes;
use ingredients::{ingredients, known, outers, put_outer};
use lowp_format::{
    AmaxAlgorithm, Axis, Form, KernelKey, Orientation, Part, ScaleLayout, Shape, SourceRounding,
    cdiv, delayed_numerator,
};

use super::device::Cuda;
use super::table::{
    Adamw, Decode, Encode, FlatEncode, FlatPass, GRAD_PART, History, Ingredients, Interleave,
    Layout, Outer, Pass, Repack, STEP_GROUP, STEP_HEADER, Scales, StepScalars, Sum, SumSquares,
    Transpose, code,
};
use crate::check::target::{filled_by, outer_kernel_of, share_pass};
use crate::{
    AdamMode, AdamwJob, ConvertJob, DecodeJob, EncodeJob, FlatEncodeJob, GradPart, HistoryJob,
    InterleaveJob, KernelError, Moments, RepackJob, Slot, Source, StepScalarsJob, SumJob,
    SumSquaresJob, Target, TransposeJob,
};

/// Address of the first value, its code, and the number of values.
fn source(source: &Source<Cuda>) -> (u64, u8, u64) {
    match source {
        Source::F32(buffer) => (buffer.pointer(), code::F32, buffer.len() as u64),
        Source::Bf16(buffer) => (buffer.pointer(), code::BF16, buffer.len() as u64),
    }
}

fn via_bf16(rounding: SourceRounding) -> u8 {
    u8::from(rounding == SourceRounding::ViaBf16)
}

fn slot(slot: Option<&Slot<Cuda>>) -> u64 {
    slot.map_or(0, |slot| slot.buffer.at(slot.index))
}

/// Block sides; 0 where blocks have no scale. They are at most [`lowp_format::BufferSpec::MAX_SIDE`], or whole: larger
/// than any matrix.
fn sides(block: Option<[usize; 2]>) -> [u32; 2] {
    block.map_or([0, 0], |block| {
        block.map(|side| u32::try_from(side).unwrap_or(u32::MAX))
    })
}

fn transposed(target: &Target<Cuda>) -> usize {
    usize::from(target.spec.axes[0] == Axis::Cols)
}

/// Puts something into the first job that takes it; where none does, into another job for the same
/// source.
fn place<J: Copy>(
    jobs: &mut Vec<J>,
    base: J,
    mut put: impl FnMut(&mut J) -> bool,
) -> Result<(), KernelError> {
    if jobs.iter_mut().any(&mut put) {
        return Ok(());
    }
    let mut job = base;
    let placed = put(&mut job);
    jobs.push(job);
    if placed {
        return Ok(());
    }
    Err(KernelError::FusedTargets)
}

/// Puts `pointer` where there is nothing.
fn put(slot: &mut u64, pointer: u64) -> bool {
    let free = *slot == 0;
    if free {
        *slot = pointer;
    }
    free
}

pub(super) fn history(job: &HistoryJob<Cuda>) -> History {
    History {
        observed: job.observed.at(job.index),
        scale: job.scales.at(job.index),
        history: job.history.pointer(),
        window: job.history.len() as u64,
        numerator: delayed_numerator(job.element, job.margin),
        most_recent: u8::from(job.algorithm == AmaxAlgorithm::MostRecent),
        ..History::default()
    }
}

/// Block scales of a matrix of `shape`, and their order: 1 where physical rows follow the columns.
fn scales(target: &Target<Cuda>, shape: Shape) -> Result<(usize, Scales), KernelError> {
    let layout = target.layout(shape)?;
    let side = usize::from(layout.axes()[0] == Axis::Cols);
    // Along the rows, then along the columns.
    let logical = |physical: [usize; 2]| [physical[side], physical[1 - side]];
    let [rows, cols] = logical(layout.padded()).map(|n| n as u64);
    let [tile_rows, tile_cols] = sides(Some(logical(layout.tile())));
    let scales = Scales {
        to: target.bytes.pointer(),
        rows,
        cols,
        tile_rows,
        tile_cols,
        swizzled: u32::from(layout.form() == Form::Swizzled),
        reserved: 0,
    };
    Ok((side, scales))
}

/// The orientation whose pass fills `target`. None where nothing is left to do: it has no bytes, or it is of the tensor or
/// its lines, and was put into the `outer` of a job.
fn filling<J: Copy>(
    jobs: &mut Vec<J>,
    base: J,
    (kernels, known, share): (&[KernelKey; 2], &[Ingredients; 2], bool),
    target: &Target<Cuda>,
    outer: impl Fn(&mut J) -> &mut [Outer; 2],
) -> Result<Option<Orientation>, KernelError> {
    let (pointer, key) = (target.bytes.pointer(), target.spec.key);
    if pointer == 0 {
        return Ok(None);
    }
    if !key.part.is_outer() {
        return Ok(Some(filled_by(key.usage, share)));
    }
    let (orientation, _) = outer_kernel_of(kernels, key.usage)?;
    place(jobs, base, |job| {
        put_outer(outer(job), known, orientation, pointer)
    })?;
    Ok(None)
}

/// One row, unless two targets of a part lie the same way.
pub(super) fn encode(backend: &Cuda, job: &EncodeJob<Cuda>) -> Result<Vec<Encode>, KernelError> {
    let (source, source_code, _) = source(&job.source);
    let share = share_pass(backend, &job.kernels, &job.tensor);
    let known = known(&job.kernels, &job.tensor, share);
    let mut base = Encode {
        source,
        rows: job.shape.rows as u64,
        cols: job.shape.cols as u64,
        outer: outers(&known, &job.tensor, share),
        source_code,
        via_bf16: via_bf16(job.source_rounding),
        ..Encode::default()
    };
    if let Some(key) = job.stochastic {
        base.stochastic = 1;
        base.seed = key.seed;
        base.stream = key.stream;
        base.first = key.first;
    }
    let mut rows = vec![base];
    for target in &job.targets {
        let of = (&job.kernels, &known, share);
        let Some(orientation) = filling(&mut rows, base, of, target, |row| &mut row.outer)? else {
            continue;
        };
        let (pointer, part) = (target.bytes.pointer(), target.spec.key.part);
        let [block_rows, block_cols] = sides(job.kernels[orientation as usize].block);
        let (side, scales) = scales(target, job.shape)?;
        let compact = target.is_compact();
        place(&mut rows, base, |row| {
            let used = usize::from(row.passes);
            let made = known[orientation as usize];
            let same = |pass: &Pass| {
                pass.ingredients == made
                    && pass.block_rows == block_rows
                    && pass.block_cols == block_cols
            };
            let at = row.pass[..used].iter().position(same).unwrap_or(used);
            let Some(pass) = row.pass.get_mut(at) else {
                return false;
            };
            let free = match part {
                Part::Data => put(&mut pass.data[side], pointer),
                _ if compact => put(&mut pass.scale[side], pointer),
                _ => {
                    let slot = &mut pass.form[side];
                    let free = slot.to == 0;
                    if free {
                        *slot = scales;
                    }
                    free
                }
            };
            if free && at == used {
                pass.ingredients = made;
                [pass.block_rows, pass.block_cols] = [block_rows, block_cols];
                row.passes += 1;
            }
            free
        })?;
    }
    Ok(rows)
}

pub(super) fn flat_encode(
    backend: &Cuda,
    job: &FlatEncodeJob<Cuda>,
) -> Result<Vec<FlatEncode>, KernelError> {
    let (source, source_code, _) = source(&job.source);
    let share = share_pass(backend, &job.kernels, &job.tensor);
    let known = known(&job.kernels, &job.tensor, share);
    let base = FlatEncode {
        source,
        rows: job.shape.rows as u64,
        cols: job.shape.cols as u64,
        start: job.start as u64,
        len: job.len as u64,
        outer: outers(&known, &job.tensor, share),
        source_code,
        via_bf16: via_bf16(job.source_rounding),
        ..FlatEncode::default()
    };
    let agreed = |block: [usize; 2]| {
        let flat = job.blocks.as_ref()?;
        let part = flat.blocks.iter().find(|part| part.block == block)?;
        Some(flat.amaxes.at(part.start))
    };
    let mut rows = vec![base];
    for target in &job.targets {
        let of = (&job.kernels, &known, share);
        let Some(orientation) = filling(&mut rows, base, of, target, |row| &mut row.outer)? else {
            continue;
        };
        let (pointer, part) = (target.bytes.pointer(), target.spec.key.part);
        let block = job.kernels[orientation as usize].block;
        let made = known[orientation as usize];
        let amaxes = block.and_then(agreed).unwrap_or(0);
        let [block_rows, block_cols] = sides(block);
        let side = transposed(target);
        place(&mut rows, base, |row| {
            let used = usize::from(row.passes);
            let same = |pass: &FlatPass| {
                pass.ingredients == made
                    && [pass.block_rows, pass.block_cols] == [block_rows, block_cols]
            };
            let at = row.pass[..used].iter().position(same).unwrap_or(used);
            let Some(pass) = row.pass.get_mut(at) else {
                return false;
            };
            let slot = match part {
                Part::Data => &mut pass.data,
                _ => &mut pass.scale[side],
            };
            let free = put(slot, pointer);
            if free && at == used {
                pass.ingredients = made;
                pass.amaxes = amaxes;
                [pass.block_rows, pass.block_cols] = [block_rows, block_cols];
                row.passes += 1;
            }
            free
        })?;
    }
    // Amaxes of blocks that no target has are consumed, too.
    for part in job.blocks.iter().flat_map(|flat| &flat.blocks) {
        let [block_rows, block_cols] = sides(Some(part.block));
        let amaxes = agreed(part.block).unwrap_or(0);
        place(&mut rows, base, |row| {
            let used = usize::from(row.passes);
            let same = |pass: &FlatPass| {
                let sides = [pass.block_rows, pass.block_cols];
                pass.amaxes == amaxes && sides == [block_rows, block_cols]
            };
            if row.pass[..used].iter().any(same) {
                return true;
            }
            let Some(pass) = row.pass.get_mut(used) else {
                return false;
            };
            pass.amaxes = amaxes;
            [pass.block_rows, pass.block_cols] = [block_rows, block_cols];
            row.passes += 1;
            true
        })?;
    }
    Ok(rows)
}

pub(super) fn decode(job: &DecodeJob<Cuda>) -> Decode {
    let usage = job.data.spec.key.usage;
    let orientation = usage.orientations().next().unwrap_or(Orientation::Rowwise);
    let tensor = job.tensor_scale.as_ref().map_or(0, |t| t.pointer());
    let [block_rows, block_cols] = sides(job.kernel.block);
    let pitch = |target: &Target<Cuda>| target.spec.row_bytes(job.shape) as u64;
    let scale = job.block_scale.as_ref();
    let (out, out_code, _) = source(&job.out);
    Decode {
        data: job.data.bytes.pointer(),
        scale: scale.map_or(0, |scale| scale.bytes.pointer()),
        ingredients: ingredients(orientation, &job.kernel, tensor, false),
        out,
        out_code,
        rows: job.shape.rows as u64,
        cols: job.shape.cols as u64,
        data_pitch: pitch(&job.data),
        scale_pitch: scale.map_or(0, pitch),
        block_rows,
        block_cols,
        data_transposed: transposed(&job.data) as u8,
        scale_transposed: scale.map_or(0, |scale| transposed(scale) as u8),
        ..Decode::default()
    }
}

pub(super) fn transpose(job: &TransposeJob<Cuda>) -> Transpose {
    Transpose {
        from: job.from.pointer(),
        to: job.to.pointer(),
        outer: job.entries[0] as u64,
        inner: job.entries[1] as u64,
        bits: job.code.bits() as u8,
        ..Transpose::default()
    }
}

pub(super) fn repack(job: &RepackJob<Cuda>) -> Repack {
    let layout = |layout: &ScaleLayout| Layout {
        tile: layout.tile().map(|n| n as u64),
        entries: layout.entries().map(|n| n as u64),
        padded: layout.padded().map(|n| n as u64),
        swizzled: u32::from(layout.form() == lowp_format::Form::Swizzled),
        cols_first: u32::from(layout.axes()[0] == Axis::Cols),
    };
    Repack {
        from: job.from.pointer(),
        to: job.to.pointer(),
        from_layout: layout(&job.from_layout),
        to_layout: layout(&job.to_layout),
        bits: job.to_layout.code().bits() as u8,
        ..Repack::default()
    }
}

/// One row per piece that is not empty.
pub(super) fn interleave(job: &InterleaveJob<Cuda>) -> Vec<Interleave> {
    let pitch = job.widths.iter().sum::<usize>();
    let mut before = 0;
    let mut rows = Vec::new();
    for &width in &job.widths {
        if width > 0 && job.outer > 0 {
            rows.push(Interleave {
                from: job.from.at(job.outer * before),
                to: job.to.at(before),
                outer: job.outer as u64,
                width: width as u64,
                pitch: pitch as u64,
                vector: 0,
            });
        }
        before += width;
    }
    rows
}

pub(super) fn adamw(backend: &Cuda, job: &AdamwJob<Cuda>) -> Result<Adamw, KernelError> {
    let (grad, grad_code, len) = source(&job.grad);
    let [exp_avg, exp_avg_sq, moments_code] = match &job.moments {
        Moments::F32 {
            exp_avg,
            exp_avg_sq,
        } => [exp_avg.pointer(), exp_avg_sq.pointer(), code::F32.into()],
        Moments::Bf16 {
            exp_avg,
            exp_avg_sq,
        } => [exp_avg.pointer(), exp_avg_sq.pointer(), code::BF16.into()],
    };
    // The shape of amaxes was checked where lines have some.
    let amax = job.amax.as_ref();
    let lined = amax.filter(|amax| amax.blocks().next().is_some());
    let encode = match &job.encode {
        None => {
            let shape = lined.map(|amax| amax.shape);
            Encode {
                rows: shape.map_or(0, |shape| shape.rows as u64),
                cols: shape.map_or(0, |shape| shape.cols as u64),
                via_bf16: via_bf16(job.source_rounding),
                ..Encode::default()
            }
        }
        Some(job) => one_row(encode(backend, job)?)?,
    };
    let line = |orientation: Orientation| {
        let amax = lined.filter(|amax| amax.shape.elements() > 0)?;
        amax.lines[orientation as usize].map(|start| amax.out.at(start))
    };
    Ok(Adamw {
        master: job.master.pointer(),
        exp_avg,
        exp_avg_sq,
        grad,
        amax: amax
            .and_then(|amax| Some(amax.out.at(amax.tensor?)))
            .unwrap_or(0),
        lines: Orientation::ALL.map(|orientation| line(orientation).unwrap_or(0)),
        len,
        group: u32::try_from(job.group).unwrap_or(u32::MAX),
        moments_code: moments_code as u8,
        grad_code,
        l2: u8::from(job.mode == AdamMode::L2),
        reserved: 0,
        encode,
    })
}

/// The update is done once, so one row must fill every target: a second target of one part and order
/// becomes a pass of its own.
fn one_row(rows: Vec<Encode>) -> Result<Encode, KernelError> {
    let too_many = || KernelError::FusedTargets;
    let (first, others) = rows.split_first().ok_or_else(too_many)?;
    let mut row = *first;
    for other in others {
        if other.outer.iter().any(|outer| outer.to != 0) {
            return Err(too_many());
        }
        for pass in &other.pass[..usize::from(other.passes)] {
            let free = row.pass.get_mut(usize::from(row.passes));
            *free.ok_or_else(too_many)? = *pass;
            row.passes += 1;
        }
    }
    Ok(row)
}

/// Sums of runs that a job needs room for: of its elements, then of those sums, until one is left.
pub(super) fn runs(job: &SumSquaresJob<Cuda>) -> usize {
    let (_, _, len) = source(&job.source);
    let mut level = len as usize;
    let mut runs = 0;
    while level > 1 || runs == 0 {
        level = cdiv(level, super::table::SUM_RUN as usize);
        runs += level.max(1);
    }
    runs
}

/// `runs`, `totals` and `state` are addresses of the plan's scratch.
pub(super) fn sum_squares(
    job: &SumSquaresJob<Cuda>,
    jobs: usize,
    [runs, totals, state]: [u64; 3],
) -> SumSquares {
    let (source, source_code, len) = source(&job.source);
    SumSquares {
        source,
        len,
        out: job.out.pointer(),
        runs,
        totals,
        state,
        jobs: jobs as u64,
        source_code,
        ..SumSquares::default()
    }
}

pub(super) fn sum(job: &SumJob<Cuda>) -> Sum {
    vectors(&job.from, &job.into, 0)
}

pub(super) fn convert(job: &ConvertJob<Cuda>) -> Sum {
    vectors(&job.from, &job.into, 1)
}

fn vectors(from: &Source<Cuda>, into: &Source<Cuda>, convert: u8) -> Sum {
    let (from, from_code, len) = source(from);
    let (into, into_code, _) = source(into);
    Sum {
        from,
        into,
        len,
        from_code,
        into_code,
        convert,
        ..Sum::default()
    }
}

/// The kernel goes through the records of docs/numerics.md 12.8 by these sizes.
const _: () = assert!(
    GRAD_PART as usize == GradPart::BYTES
        && STEP_HEADER as usize == crate::StepScalars::bytes(0)
        && (STEP_HEADER + STEP_GROUP) as usize == crate::StepScalars::bytes(1)
);

pub(super) fn step_scalars(job: &StepScalarsJob<Cuda>) -> Result<StepScalars, KernelError> {
    Ok(StepScalars {
        parts: job.parts.pointer(),
        options: job.options.pointer(),
        counts: job.counts.pointer(),
        out: job.out.pointer(),
        report: job.report.pointer(),
        ranks: (job.parts.len() / GradPart::BYTES) as u64,
        shards: job.shards as u64,
        replica: job.replica as u64,
        groups: crate::StepScalars::groups(job.options.len())? as u64,
    })
}
