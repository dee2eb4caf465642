//! AdamW (docs/numerics.md 12.2), with the amax and the encode of the new master in the same pass:
//! each chunk is encoded while it is still in cache.

use half::bf16;
use lowp_format::SourceRounding;

use super::amax::{raise, round_bits};
use super::convert::{Rect, Values, narrow, round_rect};
use super::encode::{Encoder, Load, Tile};
use super::maxima::{AHEAD, Amax};
use super::{Context, map, source};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::lanes::{LANES, Lanes, Line};
use crate::cpu::layout::Layout;
use crate::{AdamMode, AdamScalars, AdamwJob, KernelError, Moments};

/// Elements of one task of an update without encode.
const TASK: usize = 64 * 1024;
/// Elements updated at a time.
const CHUNK: usize = 4096;

/// A stored moment or gradient.
trait Stored: Copy + Default {
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
struct Update<'a, M, G> {
    scalars: AdamScalars,
    grad_scale: f32,
    mode: AdamMode,
    /// Entries from what is updated now to what is updated next.
    ahead: usize,
    master: &'a mut [f32],
    exp_avg: &'a mut [M],
    exp_avg_sq: &'a mut [M],
    grad: &'a [G],
}

impl<M: Stored, G: Stored> Kernel for Update<'_, M, G> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.mode {
            AdamMode::AdamW => self.all::<false, L>(lanes),
            AdamMode::L2 => self.all::<true, L>(lanes),
        }
    }
}

impl<M: Stored, G: Stored> Update<'_, M, G> {
    #[inline(always)]
    fn all<const L2: bool, L: Lanes>(self, lanes: L) {
        let step = Step::new(lanes, &self.scalars, self.grad_scale);
        let (masters, master) = self.master.as_chunks_mut::<LANES>();
        let (ms, m) = self.exp_avg.as_chunks_mut::<LANES>();
        let (vs, v) = self.exp_avg_sq.as_chunks_mut::<LANES>();
        let (gs, g) = self.grad.as_chunks::<LANES>();
        for (((master, m), v), g) in masters.iter_mut().zip(ms).zip(vs).zip(gs) {
            lanes.prefetch(master, self.ahead);
            lanes.prefetch(m, self.ahead);
            lanes.prefetch(v, self.ahead);
            lanes.prefetch(g, self.ahead);
            step.line::<L2, M, G>(master, m, v, g);
        }
        if !master.is_empty() {
            // The tail is a line of which only the beginning counts.
            let mut lines = ([0.0; LANES], [M::default(); LANES], [M::default(); LANES]);
            let mut grad = [G::default(); LANES];
            let count = master.len();
            lines.0[..count].copy_from_slice(master);
            lines.1[..count].copy_from_slice(m);
            lines.2[..count].copy_from_slice(v);
            grad[..count].copy_from_slice(g);
            step.line::<L2, M, G>(&mut lines.0, &mut lines.1, &mut lines.2, &grad);
            master.copy_from_slice(&lines.0[..count]);
            m.copy_from_slice(&lines.1[..count]);
            v.copy_from_slice(&lines.2[..count]);
        }
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

    /// Updates one line.
    #[inline(always)]
    fn line<const L2: bool, M: Stored, G: Stored>(
        &self,
        master: &mut Line,
        exp_avg: &mut [M; LANES],
        exp_avg_sq: &mut [M; LANES],
        grad: &[G; LANES],
    ) {
        let l = self.lanes;
        let p = l.load(master);
        // A factor of 1 leaves every number's bits.
        let mut g = l.mul(G::load(l, grad), self.grad_scale);
        if L2 {
            g = l.mul_add(self.weight_decay, p, g);
        }
        let m = l.mul_add(self.beta1, M::load(l, exp_avg), l.mul(self.rest1, g));
        let square = l.mul(l.mul(self.rest2, g), g);
        let v = l.mul_add(self.beta2, M::load(l, exp_avg_sq), square);
        let d = l.add(l.sqrt(l.div(v, self.correction2)), self.eps);
        let mut u = l.div(l.div(m, self.correction1), d);
        if !L2 {
            u = l.mul_add(self.weight_decay, p, u);
        }
        l.store(l.mul_add(self.minus_lr, u, p), master);
        M::store(l, m, exp_avg);
        M::store(l, v, exp_avg_sq);
    }
}

/// Both moments of a range.
enum MomentsMut<'v> {
    F32(&'v mut [f32], &'v mut [f32]),
    Bf16(&'v mut [bf16], &'v mut [bf16]),
}

impl<'v> MomentsMut<'v> {
    /// Cuts off the first `len` entries.
    fn split_off(&mut self, len: usize) -> MomentsMut<'v> {
        fn cut<'v, T>(slice: &mut &'v mut [T], len: usize) -> &'v mut [T] {
            let (head, tail) = std::mem::take(slice).split_at_mut(len);
            *slice = tail;
            head
        }
        match self {
            MomentsMut::F32(m, v) => MomentsMut::F32(cut(m, len), cut(v, len)),
            MomentsMut::Bf16(m, v) => MomentsMut::Bf16(cut(m, len), cut(v, len)),
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
    /// Whether the amax of the new master is wanted.
    observe: bool,
    amax: u32,
    scratch: Vec<f32>,
}

impl Part<'_> {
    fn update(&mut self, start: usize, end: usize, ahead: usize) {
        let Self {
            isa,
            scalars,
            grad_scale,
            mode,
            ..
        } = *self;
        let master = &mut self.master[start..end];
        macro_rules! update {
            ($exp_avg:expr, $exp_avg_sq:expr, $grad:expr) => {{
                let (exp_avg, exp_avg_sq) =
                    (&mut $exp_avg[start..end], &mut $exp_avg_sq[start..end]);
                let grad = &$grad[start..end];
                isa.run(Update {
                    scalars,
                    grad_scale,
                    mode,
                    ahead,
                    master,
                    exp_avg,
                    exp_avg_sq,
                    grad,
                });
            }};
        }
        match (&mut self.moments, self.grad) {
            (MomentsMut::F32(m, v), Values::F32(g)) => update!(m, v, g),
            (MomentsMut::F32(m, v), Values::Bf16(g)) => update!(m, v, g),
            (MomentsMut::Bf16(m, v), Values::F32(g)) => update!(m, v, g),
            (MomentsMut::Bf16(m, v), Values::Bf16(g)) => update!(m, v, g),
        }
    }

    fn update_all(&mut self) {
        let len = self.master.len();
        for start in (0..len).step_by(CHUNK) {
            let _ = self.load([0, start], [1, CHUNK.min(len - start)]);
        }
    }
}

impl Load for Part<'_> {
    /// Updates a rectangle and returns the new master values.
    fn load(&mut self, [row, col]: [usize; 2], [rows, cols]: [usize; 2]) -> Rect<'_> {
        let stride = self.stride;
        let first = row * stride + col;
        // A narrow chunk is followed by the one on its right, a wide one by its own next values.
        let ahead = if rows > 1 { cols } else { AHEAD };
        for i in 0..rows {
            self.update(first + i * stride, first + i * stride + cols, ahead);
        }
        let values = &self.master[first..first + (rows - 1) * stride + cols];
        let rect = Rect {
            values,
            stride,
            rows,
            cols,
        };
        if self.observe {
            let bits = self.isa.run(Amax(rect)).to_bits();
            self.amax = self.amax.max(round_bits(bits, self.rounding));
        }
        match self.rounding {
            SourceRounding::F32 => rect,
            SourceRounding::ViaBf16 => round_rect(self.isa, rect, &mut self.scratch),
        }
    }
}

struct Task<'v> {
    job: usize,
    part: Part<'v>,
    encode: Option<(Encoder<'v>, Tile<'v>)>,
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
    let mut moments = match &job.moments {
        Moments::F32 {
            exp_avg,
            exp_avg_sq,
        } => MomentsMut::F32(views.floats.take(exp_avg)?, views.floats.take(exp_avg_sq)?),
        Moments::Bf16 {
            exp_avg,
            exp_avg_sq,
        } => MomentsMut::Bf16(views.halves.take(exp_avg)?, views.halves.take(exp_avg_sq)?),
    };
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
            observe: job.amax.is_some(),
            amax: 0,
            scratch: Vec::new(),
        }
    };
    let Some(encode) = &job.encode else {
        let cuts = (0..grad.len())
            .step_by(TASK)
            .map(|start| TASK.min(grad.len() - start));
        return Ok(cuts
            .map(|len| Task {
                job: index,
                part: part(len, len),
                encode: None,
            })
            .collect());
    };
    let encoder = Encoder::new(encode, layout, context, views)?;
    let cols = encode.shape.cols;
    let task = |tile: Tile<'v>| {
        let part = part(tile.rows * cols, cols);
        Task {
            job: index,
            part,
            encode: Some((encoder, tile)),
        }
    };
    Ok(encoder
        .tiles(&encode.targets, views)?
        .into_iter()
        .map(task)
        .collect())
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
            mut part,
            encode,
        } = task;
        match encode {
            Some((encoder, tile)) => encoder.encode(tile, &mut part)?,
            None => part.update_all(),
        }
        Ok::<_, KernelError>((job, part.amax))
    });
    for result in amaxes {
        let (job, bits) = result?;
        if let Some(slot) = &jobs[job].amax {
            raise(&mut views.floats.shared(&slot.buffer)?[slot.index], bits);
        }
    }
    Ok(())
}
