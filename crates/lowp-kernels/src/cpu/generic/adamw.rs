//! AdamW (docs/numerics.md 12.2), with the amax and the encode of the new master in the same pass:
//! each chunk is encoded while it is still in cache.

use half::bf16;
use lowp_format::SourceRounding;

use super::amax::{raise, round_bits};
use super::convert::{Rect, Values, narrow, round_rect, widen};
use super::encode::{Encoder, Load, Tile};
use super::maxima::Amax;
use super::{Context, map, source};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::layout::Layout;
use crate::{AdamMode, AdamScalars, AdamwJob, KernelError, Moments};

/// Elements of one task of an update without encode.
const TASK: usize = 64 * 1024;
/// Elements updated at a time.
const CHUNK: usize = 4096;

/// A stored moment or gradient.
trait Stored: Copy {
    fn load(self) -> f32;
    fn store(x: f32) -> Self;
}

impl Stored for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }
    #[inline(always)]
    fn store(x: f32) -> f32 {
        x
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        widen(self)
    }
    #[inline(always)]
    fn store(x: f32) -> bf16 {
        narrow(x)
    }
}

/// The update of equally long rows.
struct Update<'a, M, G> {
    scalars: AdamScalars,
    grad_scale: f32,
    mode: AdamMode,
    master: &'a mut [f32],
    exp_avg: &'a mut [M],
    exp_avg_sq: &'a mut [M],
    grad: &'a [G],
}

impl<M: Stored, G: Stored> Kernel for Update<'_, M, G> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        match self.mode {
            AdamMode::AdamW => self.step::<false>(),
            AdamMode::L2 => self.step::<true>(),
        }
    }
}

impl<M: Stored, G: Stored> Update<'_, M, G> {
    #[inline(always)]
    fn step<const L2: bool>(self) {
        let AdamScalars {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            correction1,
            correction2,
        } = self.scalars;
        let (rest1, rest2) = (1.0 - beta1, 1.0 - beta2);
        let rows = self
            .master
            .iter_mut()
            .zip(self.exp_avg)
            .zip(self.exp_avg_sq)
            .zip(self.grad);
        for (((master, exp_avg), exp_avg_sq), grad) in rows {
            let p = *master;
            // A factor of 1 leaves every number's bits.
            let mut g = grad.load() * self.grad_scale;
            if L2 {
                g = weight_decay.mul_add(p, g);
            }
            let m = beta1.mul_add(exp_avg.load(), rest1 * g);
            let v = beta2.mul_add(exp_avg_sq.load(), (rest2 * g) * g);
            let d = (v / correction2).sqrt() + eps;
            let mut u = (m / correction1) / d;
            if !L2 {
                u = weight_decay.mul_add(p, u);
            }
            *master = (-lr).mul_add(u, p);
            *exp_avg = M::store(m);
            *exp_avg_sq = M::store(v);
        }
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
    fn update(&mut self, start: usize, end: usize) {
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
        for i in 0..rows {
            self.update(first + i * stride, first + i * stride + cols);
        }
        let values = &self.master[first..first + (rows - 1) * stride + cols];
        let rect = Rect {
            values,
            stride,
            rows,
            cols,
        };
        if self.observe {
            let bits = self.isa.run(Amax(rect));
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
