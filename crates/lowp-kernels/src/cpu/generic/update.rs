//! Updates by the rules of optimizers (docs/numerics.md 12), with the amax and the encode of the new master in the same pass:
//! each chunk is encoded while it is still in cache.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use lowp_format::{STATE_BLOCK, SourceRounding, StateBits};

use super::amax::{raise, raise_all, raise_lines, round_bits, rows_of_columns_task};
use super::convert::{Rect, Stream, Values, round_rect};
use super::encode::{Encoder, Load, Tile};
use super::rule::adam::Adam;
use super::rule::lion::Lion;
use super::rule::sgd::{Momentum, Sgd};
use super::rule::{LaneRule, Step};
use super::state::{RandomBits, StateMut};
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
        let step = Step::new(lanes, &self.scalars, self.grad_scale);
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
    step: &Step<L>,
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
    /// What its states in fp8 round by.
    random: Option<RandomBits>,
    rule: Rule,
    rounding: SourceRounding,
    master: &'v mut [f32],
    /// Those of the rule.
    states: Vec<StateMut<'v>>,
    grad: Values<'v>,
    /// Row length; the whole length where there are no rows.
    stride: usize,
    /// Whether all of it is updated; otherwise loads update what they return.
    updated: bool,
    /// The amax of the new master so far, as bits.
    amax: u32,
    /// Updated values of several rows, without gaps.
    packed: Vec<f32>,
    scratch: Vec<f32>,
}

impl Part<'_> {
    /// Whether a row begins within a block of states.
    fn cuts_blocks(&self) -> bool {
        let mut states = self.states.iter();
        let fp8 = states.any(|state| matches!(state, StateMut::Fp8 { .. }));
        fp8 && !self.stride.is_multiple_of(STATE_BLOCK)
    }

    /// Updates all of it.
    fn update_all(&mut self) {
        self.update(0..self.master.len());
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

    /// By a rule with two states.
    fn with_two<R: LaneRule>(&mut self, range: Range<usize>) -> f32 {
        use StateMut::{Bf16, F32};
        let all = range.clone();
        let mut states = std::mem::take(&mut self.states);
        let amax = match &mut states[..] {
            [F32(m), F32(v)] => self.run::<R, _, _>(range, &mut m[all.clone()], &mut v[all]),
            [Bf16(m), F32(v)] => self.run::<R, _, _>(range, &mut m[all.clone()], &mut v[all]),
            [Bf16(m), Bf16(v)] => self.run::<R, _, _>(range, &mut m[all.clone()], &mut v[all]),
            states => self.in_blocks::<R>(range, states),
        };
        self.states = states;
        amax
    }

    /// By a rule with one.
    fn with_one<R: LaneRule>(&mut self, range: Range<usize>) -> f32 {
        let all = range.clone();
        let none = &mut *vec![(); range.len()];
        let mut states = std::mem::take(&mut self.states);
        let amax = match &mut states[..] {
            [StateMut::F32(m)] => self.run::<R, _, _>(range, &mut m[all], none),
            [StateMut::Bf16(m)] => self.run::<R, _, _>(range, &mut m[all], none),
            states => self.in_blocks::<R>(range, states),
        };
        self.states = states;
        amax
    }

    /// By a rule without one.
    fn with_none<R: LaneRule>(&mut self, range: Range<usize>) -> f32 {
        let none = || vec![(); range.len()];
        self.run::<R, _, _>(range.clone(), &mut none(), &mut none())
    }

    /// By a rule whose states are not all in the dtypes that lanes read: through binary32, a few blocks at a time.
    fn in_blocks<R: LaneRule>(&mut self, range: Range<usize>, states: &mut [StateMut<'_>]) -> f32 {
        const BLOCKS: usize = 16 * STATE_BLOCK;
        let mut wide = [[0.0; BLOCKS]; Rule::MOST_STATES];
        let mut amax = 0f32;
        for start in range.clone().step_by(BLOCKS) {
            let part = start..range.end.min(start + BLOCKS);
            let len = part.len();
            for (state, wide) in states.iter().zip(&mut wide) {
                state.widen(part.clone(), &mut wide[..len]);
            }
            let [first, second] = &mut wide;
            let run = self.run::<R, _, _>(part.clone(), &mut first[..len], &mut second[..len]);
            amax = amax.max(run);
            let mut bits = [StateBits::NEAREST; BLOCKS];
            if let Some(random) = &self.random {
                random.fill(part.start, &mut bits[..len]);
            }
            for (state, wide) in states.iter_mut().zip(&wide) {
                state.narrow(part.clone(), &wide[..len], &bits);
            }
        }
        amax
    }

    fn run<R: LaneRule, M: Stored, V: Stored>(
        &mut self,
        range: Range<usize>,
        first: &mut [M],
        second: &mut [V],
    ) -> f32 {
        let master = &mut self.master[range.clone()];
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
            Values::F32(grad) => run!(grad),
            Values::Bf16(grad) => run!(grad),
        }
    }
}

impl Load for Part<'_> {
    /// Nothing: prefetching four arrays costs more than it hides (docs/notes/cpu-kernels.md).
    fn ahead(&self, _: [usize; 2], _: [usize; 2]) -> Option<Stream> {
        None
    }

    /// Updates a rectangle, unless it is updated, and returns the new master values.
    fn load(&mut self, [row, col]: [usize; 2], [rows, cols]: [usize; 2]) -> Rect<'_> {
        let stride = self.stride;
        let first = row * stride + col;
        let rect = if rows == 1 || cols == stride {
            let all = first..first + rows * cols;
            self.load_range(all.clone());
            Rect::dense(&self.master[all], cols)
        } else {
            self.packed.clear();
            for start in (0..rows).map(|i| first + i * stride) {
                self.load_range(start..start + cols);
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
    job: &'v UpdateJob<Cpu>,
    layout: &'v Layout,
    context: &Context<'_>,
    views: &mut AllViews<'v>,
) -> Result<Vec<Task<'v>>, KernelError> {
    let mut master = views.floats.take(&job.master)?;
    job.check_states()?;
    let names = job.rule.states().iter().zip(&job.states);
    let states = names.map(|(name, state)| StateMut::take(state, name.code(), views));
    let mut states = states.collect::<Result<Vec<_>, _>>()?;
    let grad = source(&job.grad, views)?;
    let mut done = 0;
    let mut part = |len: usize, stride: usize| {
        let (head, tail) = std::mem::take(&mut master).split_at_mut(len);
        master = tail;
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
            master: head,
            states: states
                .iter_mut()
                .map(|state| state.split_off(len))
                .collect(),
            grad: grad.slice(done - len..done),
            stride,
            updated: false,
            amax: 0,
            packed: Vec::new(),
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
