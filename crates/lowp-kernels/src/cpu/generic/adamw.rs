//! AdamW (docs/numerics.md 12.2), with the amax and the encode of the new master in the same pass:
//! each chunk is encoded while it is still in cache.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use lowp_format::SourceRounding;

use super::amax::{raise, raise_all, raise_lines, round_bits, rows_of_columns_task};
use super::convert::{Rect, Stream, Values, narrow, round_rect};
use super::encode::{Encoder, Load, Tile};
use super::{Context, map, source};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::layout::Layout;
use crate::lanes::{Isa, Kernel};
use crate::lanes::{LANES, Lanes, Line};
use crate::{AdamMode, AdamScalars, AdamwAmax, AdamwJob, KernelError, Moments, Source};

/// Elements of one task of an update without encode.
const TASK: usize = 64 * 1024;

/// A stored moment or gradient.
pub(super) trait Stored: Copy + Default {
    fn load<L: Lanes>(lanes: L, line: &[Self; LANES]) -> L::F;
    fn store<L: Lanes>(lanes: L, x: L::F, line: &mut [Self; LANES]);
}

impl Stored for f32 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, line: &Line) -> L::F {
        lanes.load(line)
    }
    #[inline(always)]
    fn store<L: Lanes>(lanes: L, x: L::F, line: &mut Line) {
        lanes.store(x, line);
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, line: &[bf16; LANES]) -> L::F {
        lanes.load_bf16(line)
    }
    #[inline(always)]
    fn store<L: Lanes>(lanes: L, x: L::F, line: &mut [bf16; LANES]) {
        let mut wide = [0.0; LANES];
        lanes.store(x, &mut wide);
        for (to, x) in line.iter_mut().zip(wide) {
            *to = narrow(x);
        }
    }
}

/// The update of consecutive elements.
struct Update<'a, M, V, G> {
    scalars: AdamScalars,
    grad_scale: f32,
    mode: AdamMode,
    master: &'a mut [f32],
    exp_avg: &'a mut [M],
    exp_avg_sq: &'a mut [V],
    grad: &'a [G],
}

impl<M: Stored, V: Stored, G: Stored> Kernel for Update<'_, M, V, G> {
    /// The amax of the new master.
    type Out = f32;
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> f32 {
        match self.mode {
            AdamMode::AdamW => self.all::<false, L>(lanes),
            AdamMode::L2 => self.all::<true, L>(lanes),
        }
    }
}

impl<M: Stored, V: Stored, G: Stored> Update<'_, M, V, G> {
    #[inline(always)]
    fn all<const L2: bool, L: Lanes>(self, lanes: L) -> f32 {
        let mut amax = lanes.splat(0.0);
        let step = Step::new(lanes, &self.scalars, self.grad_scale);
        let (masters, master) = self.master.as_chunks_mut::<LANES>();
        let (ms, m) = self.exp_avg.as_chunks_mut::<LANES>();
        let (vs, v) = self.exp_avg_sq.as_chunks_mut::<LANES>();
        let (gs, g) = self.grad.as_chunks::<LANES>();
        for (((master, m), v), g) in masters.iter_mut().zip(ms).zip(vs).zip(gs) {
            amax = lanes.raise(amax, step.line::<L2, M, V, G>(master, m, v, g));
        }
        if !master.is_empty() {
            // The tail is a line of which only the beginning counts.
            let mut lines = ([0.0; LANES], [M::default(); LANES], [V::default(); LANES]);
            let mut grad = [G::default(); LANES];
            let count = master.len();
            lines.0[..count].copy_from_slice(master);
            lines.1[..count].copy_from_slice(m);
            lines.2[..count].copy_from_slice(v);
            grad[..count].copy_from_slice(g);
            step.line::<L2, M, V, G>(&mut lines.0, &mut lines.1, &mut lines.2, &grad);
            // Elements after the tail may be anything.
            lines.0[count..].fill(0.0);
            amax = lanes.raise(amax, lanes.load(&lines.0));
            master.copy_from_slice(&lines.0[..count]);
            m.copy_from_slice(&lines.1[..count]);
            v.copy_from_slice(&lines.2[..count]);
        }
        lanes.maxima([amax; 4])[0]
    }
}

/// The scalars of an update in every lane.
#[derive(Clone, Copy)]
struct Step<L: Lanes> {
    lanes: L,
    grad_scale: L::F,
    minus_lr: L::F,
    beta1: L::F,
    beta2: L::F,
    rest1: L::F,
    rest2: L::F,
    eps: L::F,
    weight_decay: L::F,
    correction1: L::F,
    correction2: L::F,
}

impl<L: Lanes> Step<L> {
    #[inline(always)]
    fn new(lanes: L, scalars: &AdamScalars, grad_scale: f32) -> Self {
        Self {
            lanes,
            grad_scale: lanes.splat(grad_scale),
            minus_lr: lanes.splat(-scalars.lr),
            beta1: lanes.splat(scalars.beta1),
            beta2: lanes.splat(scalars.beta2),
            rest1: lanes.splat(1.0 - scalars.beta1),
            rest2: lanes.splat(1.0 - scalars.beta2),
            eps: lanes.splat(scalars.eps),
            weight_decay: lanes.splat(scalars.weight_decay),
            correction1: lanes.splat(scalars.correction1),
            correction2: lanes.splat(scalars.correction2),
        }
    }

    /// Updates one line; returns the new master.
    #[inline(always)]
    fn line<const L2: bool, M: Stored, V: Stored, G: Stored>(
        &self,
        master: &mut Line,
        exp_avg: &mut [M; LANES],
        exp_avg_sq: &mut [V; LANES],
        grad: &[G; LANES],
    ) -> L::F {
        let l = self.lanes;
        let p = l.load(master);
        // A factor of 1 leaves every number's bits.
        let mut g = l.mul(G::load(l, grad), self.grad_scale);
        if L2 {
            g = l.mul_add(self.weight_decay, p, g);
        }
        let m = l.mul_add(self.beta1, M::load(l, exp_avg), l.mul(self.rest1, g));
        let square = l.mul(l.mul(self.rest2, g), g);
        let v = l.mul_add(self.beta2, V::load(l, exp_avg_sq), square);
        let d = l.add(l.sqrt(l.div(v, self.correction2)), self.eps);
        let mut u = l.div(l.div(m, self.correction1), d);
        if !L2 {
            u = l.mul_add(self.weight_decay, p, u);
        }
        let p = l.mul_add(self.minus_lr, u, p);
        l.store(p, master);
        M::store(l, m, exp_avg);
        V::store(l, v, exp_avg_sq);
        p
    }
}

/// Both moments of a range, as [`Moments`].
enum MomentsMut<'v> {
    F32(&'v mut [f32], &'v mut [f32]),
    Mixed(&'v mut [bf16], &'v mut [f32]),
    Bf16(&'v mut [bf16], &'v mut [bf16]),
}

impl<'v> MomentsMut<'v> {
    fn take(moments: &Moments<Cpu>, views: &mut AllViews<'v>) -> Result<Self, KernelError> {
        use Source::{Bf16, F32};
        let (floats, halves) = (&mut views.floats, &mut views.halves);
        Ok(match moments.values() {
            [F32(m), F32(v)] => Self::F32(floats.take(m)?, floats.take(v)?),
            [Bf16(m), F32(v)] => Self::Mixed(halves.take(m)?, floats.take(v)?),
            [Bf16(m), Bf16(v)] => Self::Bf16(halves.take(m)?, halves.take(v)?),
            [F32(_), Bf16(_)] => return Err(KernelError::MomentDtypes),
        })
    }

    /// Cuts off the first `len` entries.
    fn split_off(&mut self, len: usize) -> Self {
        fn cut<'v, T>(slice: &mut &'v mut [T], len: usize) -> &'v mut [T] {
            let (head, tail) = std::mem::take(slice).split_at_mut(len);
            *slice = tail;
            head
        }
        match self {
            Self::F32(m, v) => Self::F32(cut(m, len), cut(v, len)),
            Self::Mixed(m, v) => Self::Mixed(cut(m, len), cut(v, len)),
            Self::Bf16(m, v) => Self::Bf16(cut(m, len), cut(v, len)),
        }
    }
}

/// Consecutive elements of one parameter.
struct Part<'v> {
    isa: Isa,
    scalars: AdamScalars,
    grad_scale: f32,
    mode: AdamMode,
    rounding: SourceRounding,
    master: &'v mut [f32],
    moments: MomentsMut<'v>,
    grad: Values<'v>,
    /// Row length; the whole length where there are no rows.
    stride: usize,
    /// The amax of the new master so far, as bits.
    amax: u32,
    /// Updated values of several rows, without gaps.
    packed: Vec<f32>,
    scratch: Vec<f32>,
}

impl Part<'_> {
    fn update(&mut self, range: Range<usize>) {
        let Self {
            isa,
            scalars,
            grad_scale,
            mode,
            ..
        } = *self;
        let master = &mut self.master[range.clone()];
        macro_rules! update {
            ($exp_avg:expr, $exp_avg_sq:expr, $grad:expr) => {{
                let exp_avg = &mut $exp_avg[range.clone()];
                let exp_avg_sq = &mut $exp_avg_sq[range.clone()];
                let grad = &$grad[range];
                isa.run(Update {
                    scalars,
                    grad_scale,
                    mode,
                    master,
                    exp_avg,
                    exp_avg_sq,
                    grad,
                })
            }};
        }
        let amax = match (&mut self.moments, self.grad) {
            (MomentsMut::F32(m, v), Values::F32(g)) => update!(m, v, g),
            (MomentsMut::F32(m, v), Values::Bf16(g)) => update!(m, v, g),
            (MomentsMut::Mixed(m, v), Values::F32(g)) => update!(m, v, g),
            (MomentsMut::Mixed(m, v), Values::Bf16(g)) => update!(m, v, g),
            (MomentsMut::Bf16(m, v), Values::F32(g)) => update!(m, v, g),
            (MomentsMut::Bf16(m, v), Values::Bf16(g)) => update!(m, v, g),
        };
        self.amax = self.amax.max(round_bits(amax.to_bits(), self.rounding));
    }
}

impl Load for Part<'_> {
    /// Nothing: prefetching four arrays costs more than it hides (docs/notes/cpu-kernels.md).
    fn ahead(&self, _: [usize; 2], _: [usize; 2]) -> Option<Stream> {
        None
    }

    /// Updates a rectangle and returns the new master values.
    fn load(&mut self, [row, col]: [usize; 2], [rows, cols]: [usize; 2]) -> Rect<'_> {
        let stride = self.stride;
        let first = row * stride + col;
        let rect = if rows == 1 || cols == stride {
            let all = first..first + rows * cols;
            self.update(all.clone());
            Rect::dense(&self.master[all], cols)
        } else {
            self.packed.clear();
            for start in (0..rows).map(|i| first + i * stride) {
                self.update(start..start + cols);
                let row = &self.master[start..start + cols];
                self.packed.extend_from_slice(row);
            }
            Rect::dense(&self.packed, cols)
        };
        match self.rounding {
            SourceRounding::F32 => rect,
            SourceRounding::ViaBf16 => round_rect(self.isa, rect, &mut self.scratch),
        }
    }
}

struct Task<'v> {
    job: usize,
    /// Its first element.
    first: usize,
    part: Part<'v>,
    encode: Option<(Arc<Encoder<'v>>, Tile<'v>)>,
}

/// Cuts one job into tasks.
fn tasks<'v>(
    index: usize,
    job: &'v AdamwJob<Cpu>,
    layout: &'v Layout,
    context: &Context<'_>,
    views: &mut AllViews<'v>,
) -> Result<Vec<Task<'v>>, KernelError> {
    let mut master = views.floats.take(&job.master)?;
    let mut moments = MomentsMut::take(&job.moments, views)?;
    let grad = source(&job.grad, views)?;
    let mut done = 0;
    let mut part = |len: usize, stride: usize| {
        let (head, tail) = std::mem::take(&mut master).split_at_mut(len);
        master = tail;
        done += len;
        Part {
            isa: context.isa,
            scalars: context.scalars.adam[job.group],
            grad_scale: context.scalars.grad_scale,
            mode: job.mode,
            rounding: job.source_rounding,
            master: head,
            moments: moments.split_off(len),
            grad: grad.slice(done - len..done),
            stride,
            amax: 0,
            packed: Vec::new(),
            scratch: Vec::new(),
        }
    };
    let Some(encode) = &job.encode else {
        // Tasks that raise the amaxes of lines have whole rows.
        let unit = match &job.amax {
            Some(amax) if amax.blocks().next().is_some() => {
                amax.shape.cols.max(1) * rows_of_columns_task(amax.shape)
            }
            _ => TASK,
        };
        let cuts = (0..grad.len()).step_by(unit);
        return Ok(cuts
            .map(|first| {
                let len = unit.min(grad.len() - first);
                Task {
                    job: index,
                    first,
                    part: part(len, len),
                    encode: None,
                }
            })
            .collect());
    };
    let encoder = Encoder::new(encode, layout, context, views)?;
    let cols = encode.shape.cols;
    let task = |tile: Tile<'v>| {
        let part = part(tile.rows * cols, cols);
        Task {
            job: index,
            first: tile.first * cols,
            part,
            encode: Some((Arc::clone(&encoder), tile)),
        }
    };
    Ok(encoder.tiles(views)?.into_iter().map(task).collect())
}

/// Runs every update of a plan.
pub(crate) fn run<'v>(
    jobs: &'v [AdamwJob<Cpu>],
    layouts: &'v [Layout],
    context: &Context<'_>,
    views: &mut AllViews<'v>,
) -> Result<(), KernelError> {
    let mut all = Vec::new();
    for (index, (job, layout)) in jobs.iter().zip(layouts).enumerate() {
        all.extend(tasks(index, job, layout, context, views)?);
    }
    let amaxes = map(context, all, |task| {
        let Task {
            job,
            first,
            mut part,
            encode,
        } = task;
        match encode {
            Some((encoder, tile)) => encoder.encode(tile, &mut part)?,
            None => part.update(0..part.master.len()),
        }
        let lines = |amax: &AdamwAmax<Cpu>| -> Vec<(usize, Vec<u32>)> {
            let shape = amax.shape;
            let rows = (first / shape.cols.max(1), &*part.master);
            let rounding = jobs[job].source_rounding;
            let raised = |block| raise_lines(context.isa, shape, block, rows, rounding);
            amax.blocks().map(raised).collect()
        };
        let lines = jobs[job].amax.as_ref().map(lines).unwrap_or_default();
        Ok::<_, KernelError>((job, part.amax, lines))
    })?;
    for result in amaxes {
        let (job, bits, lines) = result?;
        let Some(amax) = &jobs[job].amax else {
            continue;
        };
        if let Some(entry) = amax.tensor {
            raise(&mut views.floats.shared(&amax.out)?[entry], bits);
        }
        for (start, bits) in lines {
            raise_all(&mut views.floats.shared(&amax.out)?[start..], &bits);
        }
    }
    Ok(())
}
