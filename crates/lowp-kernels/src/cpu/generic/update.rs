//! Updates by the rules of optimizers (docs/numerics.md 12), with the amax and the encode of the new master in the same pass:
//! each chunk is encoded while it is still in cache.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use lowp_format::{STATE_BLOCK, SourceRounding};

use super::amax::{raise, raise_all, raise_lines, round_bits, rows_of_columns_task};
use super::convert::{FloatSlice, Rect, Stream};
use super::encode::{Encoder, Load, Tile};
use super::maxima::Amax;
use super::rule::adam::Adam;
use super::rule::lion::Lion;
use super::rule::sgd::{Momentum, Sgd};
use super::rule::{LaneRule, StepLanes};
use super::state::{RandomBits, StoredMut};
use super::stored::Stored;
use super::{Context, map, source};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::layout::Layout;
use crate::lanes::{Isa, Kernel};
use crate::lanes::{LANES, Lanes, Line};
use crate::{GroupScalars, KernelError, Rule, UpdateAmax, UpdateJob};

/// Elements of one task of an update without encode.
const TASK: usize = 64 * 1024;

/// The update of consecutive elements by a rule.
struct Update<'a, R, M, V, G> {
    rule: PhantomData<R>,
    scalars: GroupScalars,
    grad_scale: f32,
    master: &'a mut [f32],
    first: &'a mut [M],
    second: &'a mut [V],
    grad: &'a [G],
}

impl<R: LaneRule, M: Stored, V: Stored, G: Stored> Kernel for Update<'_, R, M, V, G> {
    /// The amax of the new master.
    type Out = f32;
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> f32 {
        let mut amax = lanes.splat(0.0);
        let step = StepLanes::new(lanes, &self.scalars, self.grad_scale);
        let (masters, master) = self.master.as_chunks_mut::<LANES>();
        let (ms, m) = self.first.as_chunks_mut::<LANES>();
        let (vs, v) = self.second.as_chunks_mut::<LANES>();
        let (gs, g) = self.grad.as_chunks::<LANES>();
        for (((master, m), v), g) in masters.iter_mut().zip(ms).zip(vs).zip(gs) {
            amax = lanes.raise(amax, line::<R, M, V, G, L>(&step, master, m, v, g));
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
            line::<R, M, V, G, L>(&step, &mut lines.0, &mut lines.1, &mut lines.2, &grad);
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

/// Updates one line; returns the new master.
#[inline(always)]
fn line<R: LaneRule, M: Stored, V: Stored, G: Stored, L: Lanes>(
    step: &StepLanes<L>,
    master: &mut Line,
    first: &mut [M; LANES],
    second: &mut [V; LANES],
    grad: &[G; LANES],
) -> L::F {
    let l = step.lanes;
    let values = [l.load(master), M::load(l, first), V::load(l, second)];
    // A factor of 1 leaves every number's bits.
    let g = l.mul(G::load(l, grad), step.grad_scale);
    let [p, m, v] = R::update(step, values, g);
    l.store(p, master);
    M::store(l, m, first);
    V::store(l, v, second);
    p
}

/// Consecutive elements of one parameter.
struct Part<'v> {
    isa: Isa,
    scalars: GroupScalars,
    grad_scale: f32,
    /// What its master and its states round by.
    random: Option<RandomBits>,
    rule: Rule,
    rounding: SourceRounding,
    /// Elements.
    len: usize,
    /// The master, then the states of the rule.
    values: Vec<StoredMut<'v>>,
    grad: FloatSlice<'v>,
    /// Row length; the whole length where there are no rows.
    stride: usize,
    /// Whether all of it is updated; otherwise loads update what they return.
    updated: bool,
    /// The amax of the new master so far, as bits.
    amax: u32,
    scratch: Vec<f32>,
}

impl Part<'_> {
    /// Whether a row begins within a block of states.
    fn cuts_blocks(&self) -> bool {
        let mut states = self.values.iter();
        let fp8 = states.any(|state| matches!(state, StoredMut::Fp8 { .. }));
        fp8 && !self.stride.is_multiple_of(STATE_BLOCK)
    }

    /// Updates all elements of the task.
    fn update_all(&mut self) {
        self.update(0..self.len);
        self.updated = true;
    }

    /// Updates a range, if that is left to do.
    fn load_range(&mut self, range: Range<usize>) {
        if !self.updated {
            self.update(range);
        }
    }

    /// Updates a range. The code of a rule is compiled for every set of dtypes that its states and the gradient can have, and for
    /// every instruction set.
    fn update(&mut self, range: Range<usize>) {
        let amax = match self.rule {
            Rule::AdamW => self.with_two::<Adam<false>>(range),
            Rule::AdamL2 => self.with_two::<Adam<true>>(range),
            Rule::Lion => self.with_one::<Lion>(range),
            // What it keeps belongs to another pass.
            Rule::Sgd | Rule::Muon | Rule::Moonlight => self.with_none::<Sgd>(range),
            Rule::SgdMomentum => self.with_one::<Momentum<false>>(range),
            Rule::SgdNesterov => self.with_one::<Momentum<true>>(range),
        };
        self.amax = self.amax.max(round_bits(amax.to_bits(), self.rounding));
    }

    /// Updates `range` by a rule with two states.
    fn with_two<R: LaneRule>(&mut self, range: Range<usize>) -> f32 {
        use StoredMut::{Bf16, F32};
        let all = || range.clone();
        let mut values = std::mem::take(&mut self.values);
        let amax = match &mut values[..] {
            [F32(p), F32(m), F32(v)] => {
                self.run::<R, _, _>(all(), &mut p[all()], &mut m[all()], &mut v[all()])
            }
            [F32(p), Bf16(m), F32(v)] => {
                self.run::<R, _, _>(all(), &mut p[all()], &mut m[all()], &mut v[all()])
            }
            [F32(p), Bf16(m), Bf16(v)] => {
                self.run::<R, _, _>(all(), &mut p[all()], &mut m[all()], &mut v[all()])
            }
            values => self.in_blocks::<R>(all(), values),
        };
        self.values = values;
        amax
    }

    /// Updates `range` by a rule with one state.
    fn with_one<R: LaneRule>(&mut self, range: Range<usize>) -> f32 {
        use StoredMut::{Bf16, F32};
        let all = || range.clone();
        let none = &mut *vec![(); range.len()];
        let mut values = std::mem::take(&mut self.values);
        let amax = match &mut values[..] {
            [F32(p), F32(m)] => self.run::<R, _, _>(all(), &mut p[all()], &mut m[all()], none),
            [F32(p), Bf16(m)] => self.run::<R, _, _>(all(), &mut p[all()], &mut m[all()], none),
            values => self.in_blocks::<R>(all(), values),
        };
        self.values = values;
        amax
    }

    /// By a rule without one, or whose states belong to another pass.
    fn with_none<R: LaneRule>(&mut self, range: Range<usize>) -> f32 {
        let none = || vec![(); range.len()];
        let all = || range.clone();
        let mut values = std::mem::take(&mut self.values);
        let amax = match &mut values[..] {
            [StoredMut::F32(p), ..] => {
                self.run::<R, _, _>(all(), &mut p[all()], &mut none(), &mut none())
            }
            values => self.in_blocks::<R>(all(), &mut values[..1]),
        };
        self.values = values;
        amax
    }

    /// Updates a master and states of which some are in dtypes that lanes do not read: widened to binary32, a few blocks at a time.
    fn in_blocks<R: LaneRule>(&mut self, range: Range<usize>, values: &mut [StoredMut<'_>]) -> f32 {
        const BLOCKS: usize = 16 * STATE_BLOCK;
        let mut wide = [[0.0; BLOCKS]; 1 + Rule::MOST_STATES];
        let mut amax = 0f32;
        for start in range.clone().step_by(BLOCKS) {
            let part = start..range.end.min(start + BLOCKS);
            let len = part.len();
            for (values, wide) in values.iter().zip(&mut wide) {
                values.widen(self.isa, part.clone(), &mut wide[..len]);
            }
            let mut lines = wide.each_mut().map(|wide| &mut wide[..len]);
            let [master, first, second] = &mut lines;
            let mut run = self.run::<R, _, _>(part.clone(), master, first, second);
            let mut words = [0; BLOCKS];
            if let Some(random) = &self.random {
                random.fill(self.isa, part.start, &mut words[..len]);
            }
            for (values, wide) in values.iter_mut().zip(&wide) {
                values.narrow(self.isa, part.clone(), &wide[..len], &words[..len]);
            }
            if let StoredMut::StochasticBf16(_) = &values[0] {
                values[0].widen(self.isa, part, &mut wide[0][..len]);
                run = self.isa.run(Amax(Rect::dense(&wide[0][..len], len)));
            }
            amax = amax.max(run);
        }
        amax
    }

    fn run<R: LaneRule, M: Stored, V: Stored>(
        &mut self,
        range: Range<usize>,
        master: &mut [f32],
        first: &mut [M],
        second: &mut [V],
    ) -> f32 {
        let (rule, scalars, grad_scale) = (PhantomData::<R>, self.scalars, self.grad_scale);
        macro_rules! run {
            ($grad:expr) => {
                self.isa.run(Update {
                    rule,
                    scalars,
                    grad_scale,
                    master,
                    first,
                    second,
                    grad: &$grad[range],
                })
            };
        }
        match self.grad {
            FloatSlice::F32(grad) => run!(grad),
            FloatSlice::Bf16(grad) => run!(grad),
        }
    }
}

impl Load for Part<'_> {
    /// Nothing: prefetching four arrays costs more than it hides (docs/notes/cpu-kernels.md).
    fn ahead(&self, _: [usize; 2], _: [usize; 2]) -> Option<Stream> {
        None
    }

    /// Updates a rectangle, unless it is updated, and returns the new master values.
    fn load(&mut self, [row, col]: [usize; 2], size: [usize; 2]) -> Rect<'_> {
        let (isa, rounding, stride) = (self.isa, self.rounding, self.stride);
        let first = row * stride + col;
        let [rows, cols] = size;
        if rows == 1 || cols == stride {
            self.load_range(first..first + rows * cols);
        } else {
            for start in (0..rows).map(|i| first + i * stride) {
                self.load_range(start..start + cols);
            }
        }
        let master = self.values[0].values();
        master.rect(isa, rounding, first, stride, size, &mut self.scratch)
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
    job: &'v UpdateJob<Cpu>,
    layout: &'v Layout,
    context: &Context<'_>,
    views: &mut AllViews<'v>,
) -> Result<Vec<Task<'v>>, KernelError> {
    job.check_states()?;
    let mut values = vec![StoredMut::master(&job.master, views)?];
    for (name, state) in job.rule.states().iter().zip(&job.states) {
        values.push(StoredMut::take(state, name.code(), views)?);
    }
    let grad = source(&job.grad, views)?;
    let mut done = 0;
    let mut part = |len: usize, stride: usize| {
        done += len;
        Part {
            isa: context.isa,
            scalars: context.scalars.groups[job.group],
            grad_scale: job.rule.grad_factor(context.scalars.grad_scale),
            random: job.random.map(|random| RandomBits {
                random,
                step: context.scalars.random_step,
                first: done - len,
            }),
            rule: job.rule,
            rounding: job.source_rounding,
            len,
            values: values.iter_mut().map(|all| all.split_off(len)).collect(),
            grad: grad.slice(done - len..done),
            stride,
            updated: false,
            amax: 0,
            scratch: Vec::new(),
        }
    };
    let Some(encode) = &job.encode else {
        // Tasks that raise the amaxes of lines have whole rows, and all have whole blocks of states.
        let unit = match &job.amax {
            Some(amax) if amax.blocks().next().is_some() => {
                let rows = rows_of_columns_task(amax.shape);
                amax.shape.cols.max(1)
                    * rows.next_multiple_of(if job.in_fp8() { STATE_BLOCK } else { 1 })
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
    jobs: &'v [UpdateJob<Cpu>],
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
            Some((encoder, tile)) => {
                if part.cuts_blocks() {
                    part.update_all();
                }
                encoder.encode(tile, &mut part)?;
            }
            None => part.update_all(),
        }
        let lines = |amax: &UpdateAmax<Cpu>| -> Vec<(usize, Vec<u32>)> {
            let shape = amax.shape;
            if amax.blocks().next().is_none() {
                return Vec::new();
            }
            let (len, f32, mut scratch) = (part.len, SourceRounding::F32, Vec::new());
            let master = part.values[0].values();
            let master = master.rect(context.isa, f32, 0, len, [1, len], &mut scratch);
            let row = first / shape.cols.max(1);
            let (isa, rounding) = (context.isa, jobs[job].source_rounding);
            let raised = |block| raise_lines(isa, shape, block, row, master.values, rounding);
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
