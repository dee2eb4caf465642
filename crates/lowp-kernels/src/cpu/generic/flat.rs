//! Encoding a range of a flattened matrix with agreed amaxes (docs/numerics.md 11).

use lowp_format::codec::e2m1;
use std::sync::Arc;

use lowp_format::{Axis, KernelKey, Orientation, Part, Shape};

use super::convert::{FloatSlice, Rect};
use super::quantize::{Columns, encode_row};
use super::{Context, for_each, source, tensor};
use crate::check::encode::{filled_by, input_of, share_pass, touched};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::bands::{self, Band};
use crate::cpu::ingredients::{ElementCode, ScaleEntry, ScaleKernel, Visit, dispatch};
use crate::lanes::{Isa, Kernel};
use crate::lanes::{Lanes, Portable};
use crate::{FlatEncodeJob, KernelError};

/// Elements of one task, about.
const TASK: usize = 64 * 1024;

/// Agreed amaxes of the blocks of `block`, row-major; consumed, so with a sign.
#[derive(Clone, Copy)]
struct Amaxes<'v> {
    block: [usize; 2],
    values: &'v [f32],
    across: usize,
}

/// The ingredients of a target and what is known of its tensor or lines.
#[derive(Clone)]
struct Known<'v> {
    orientation: Orientation,
    key: &'v KernelKey,
    outer: Arc<Vec<f32>>,
}

impl Known<'_> {
    /// What the tensor, or the line of element `[row, col]`, is scaled by.
    fn at(&self, at: [usize; 2]) -> f32 {
        let line = self.key.scale.line(self.orientation, at);
        self.outer.get(line).copied().unwrap_or(1.0)
    }

    /// The rule of element `[row, col]`, where `rule` is one of its kind.
    fn rule<R: ScaleKernel>(&self, rule: R, at: [usize; 2]) -> R {
        match self.key.scale.is_by_line() {
            true => R::new(self.key.scale, self.at(at)).unwrap_or(rule),
            false => rule,
        }
    }

    fn dispatch<V: Visit>(&self, visitor: V) -> Result<V::Out, KernelError> {
        dispatch(
            self.key,
            self.outer.first().copied().unwrap_or(1.0),
            visitor,
        )
    }
}

/// Elements `first..first + len` of the flattened matrix, into their bytes.
struct Data<'v> {
    isa: Isa,
    job: &'v FlatEncodeJob<Cpu>,
    known: Known<'v>,
    amaxes: Option<Amaxes<'v>>,
    values: FloatSlice<'v>,
    first: usize,
    len: usize,
    band: Band<'v>,
}

impl Visit for Data<'_> {
    type Out = ();

    fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) {
        let Self {
            isa,
            job,
            known,
            amaxes,
            values,
            first,
            len,
            mut band,
        } = self;
        let cols = job.shape.cols;
        let bytes = band.row_mut(0);
        let bits = E::CODE.bits();
        let first_byte = first * bits / 8;
        let mut codes = vec![E::Bits::default(); cols.min(len)];
        let mut multipliers = vec![0f32; codes.len()];
        let mut scratch = Vec::new();
        let (mut at, end) = (first, first + len);
        while at < end {
            let (row, col) = (at / cols, at % cols);
            let count = (cols - col).min(end - at);
            let start = at - job.start;
            let rect = values.rect(
                isa,
                job.source_rounding,
                start,
                count,
                [1, count],
                &mut scratch,
            );
            let multipliers = &mut multipliers[..count];
            let rule_at = |at| known.rule(rule, at);
            fill_multipliers::<E, R>(rule_at, amaxes, [row, col], multipliers);
            let codes = &mut codes[..count];
            isa.run(Apply::<E> {
                rect,
                multipliers,
                codes,
            });
            store::<E>(codes, at, at * bits / 8 - first_byte, bytes);
            at += count;
        }
    }
}

/// The multipliers of row `row` from column `col` on.
fn fill_multipliers<E: ElementCode, R: ScaleKernel>(
    rule_at: impl Fn([usize; 2]) -> R,
    amaxes: Option<Amaxes<'_>>,
    [row, col]: [usize; 2],
    multipliers: &mut [f32],
) {
    let Some(Amaxes {
        block: [height, width],
        values,
        across,
    }) = amaxes
    else {
        for (i, multiplier) in multipliers.iter_mut().enumerate() {
            *multiplier = rule_at([row, col + i]).encode::<E>(0.0).1;
        }
        return;
    };
    let line = &values[row / height * across..][..across];
    let (mut at, end) = (col, col + multipliers.len());
    while at < end {
        let next = ((at / width + 1) * width).min(end);
        let (_, multiplier) = rule_at([row, at]).encode::<E>(line[at / width].abs());
        multipliers[at - col..next - col].fill(multiplier);
        at = next;
    }
}

/// Writes codes of elements from `at` on to `bytes` from `byte` on; half bytes of other elements
/// keep their bits.
fn store<E: ElementCode>(codes: &[E::Bits], at: usize, byte: usize, bytes: &mut [u8]) {
    let mut nibble = [0u8];
    let mut put = |code: &E::Bits, index: usize, bytes: &mut [u8]| {
        E::pack(Portable, std::slice::from_ref(code), &mut nibble);
        e2m1::set_nibble(bytes, index, nibble[0]);
    };
    if E::CODE.bits() >= 8 {
        let len = E::CODE.bytes(codes.len());
        E::pack(Portable, codes, &mut bytes[byte..byte + len]);
        return;
    }
    let (mut codes, mut byte) = (codes, byte);
    if at % 2 == 1 {
        let Some((first, rest)) = codes.split_first() else {
            return;
        };
        put(first, 1, &mut bytes[byte..]);
        (codes, byte) = (rest, byte + 1);
    }
    let (whole, last) = codes.split_at(codes.len() / 2 * 2);
    E::pack(Portable, whole, &mut bytes[byte..byte + whole.len() / 2]);
    if let [last] = last {
        put(last, 0, &mut bytes[byte + whole.len() / 2..]);
    }
}

struct Apply<'a, E: ElementCode> {
    rect: Rect<'a>,
    multipliers: &'a [f32],
    codes: &'a mut [E::Bits],
}

impl<E: ElementCode> Kernel for Apply<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let values = self.rect.row(0);
        if E::SCALED {
            let multipliers = Columns(self.multipliers);
            encode_row::<E, L>(lanes, values, multipliers, None, 0, self.codes);
        } else {
            for (code, &x) in self.codes.iter_mut().zip(values) {
                *code = E::encode(x);
            }
        }
    }
}

/// All scales of one Compact buffer, from agreed amaxes.
struct Scales<'v> {
    shape: Shape,
    known: Known<'v>,
    amaxes: Amaxes<'v>,
    transposed: bool,
    out: &'v mut [u8],
}

impl Visit for Scales<'_> {
    type Out = ();

    fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) {
        let Amaxes {
            block,
            values,
            across,
        } = self.amaxes;
        // Rows without columns have no blocks, however many they are.
        let down = match across {
            0 => 0,
            _ => self.shape.rows.div_ceil(block[0]),
        };
        let size = R::Entry::BYTES;
        for i in 0..down {
            for j in 0..across {
                let rule = self.known.rule(rule, [i * block[0], j * block[1]]);
                let (entry, _) = rule.encode::<E>(values[i * across + j].abs());
                let at = if self.transposed {
                    j * down + i
                } else {
                    i * across + j
                };
                R::Entry::store(&[entry], &mut self.out[at * size..][..size]);
            }
        }
    }
}

enum Task<'v> {
    Data(Data<'v>),
    Scales(Scales<'v>),
}

/// Where the range of `job` is cut: at its ends and at whole rows, which begin on a byte.
fn cuts(job: &FlatEncodeJob<Cpu>) -> Vec<usize> {
    let end = job.start + job.len;
    let cols = job.shape.cols.max(1);
    let unit = cols * (TASK / cols).max(1);
    let mut cuts = vec![job.start];
    let mut next = (job.start / unit + 1) * unit;
    while next < end {
        cuts.push(next);
        next += unit;
    }
    cuts.push(end);
    cuts
}

/// Runs every flat encode of a plan.
pub(crate) fn run<'v>(
    jobs: &'v [FlatEncodeJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'v>,
) -> Result<(), KernelError> {
    for job in jobs {
        tensor::consume(job.shape, &job.kernels, &job.tensor, views)?;
        for (flat, part) in job
            .blocks
            .iter()
            .flat_map(|f| f.blocks.iter().map(move |p| (f, p)))
        {
            let [rows, cols] = [job.shape.rows, job.shape.cols];
            let count = rows.div_ceil(part.block[0]) * cols.div_ceil(part.block[1]);
            if count > 0 {
                tensor::consume_range(&flat.amaxes, part.start, count, views)?;
            }
        }
    }
    let mut tasks = Vec::new();
    for job in jobs {
        let FlatEncodeJob {
            shape,
            kernels,
            targets,
            ..
        } = job;
        tensor::write(*shape, kernels, &job.tensor, targets, views)?;
        let share = share_pass(&Cpu, kernels, &job.tensor);
        let values = source(&job.source, views)?;
        for target in targets {
            let spec = &target.spec;
            if spec.key.part.is_outer() {
                continue;
            }
            let orientation = filled_by(spec.key.usage, share);
            let key = &kernels[orientation as usize];
            let input = input_of(&job.tensor, orientation, share);
            let outer = Arc::new(tensor::values(*shape, orientation, key, input, views)?);
            let known = Known {
                orientation,
                key,
                outer,
            };
            let block = key.block;
            let amaxes = match (block, &job.blocks) {
                (Some(block), Some(flat)) => {
                    let part = flat.blocks.iter().find(|part| part.block == block);
                    let start = part.map_or(0, |part| part.start);
                    // Without blocks the vector is not part of the plan.
                    let values: &[f32] = match job.shape.elements() {
                        0 => &[],
                        _ => {
                            views.floats.freeze(&flat.amaxes)?;
                            &views.floats.read(&flat.amaxes)?[start..]
                        }
                    };
                    Some(Amaxes {
                        block,
                        values,
                        across: job.shape.cols.div_ceil(block[1]),
                    })
                }
                _ => None,
            };
            match (spec.key.part, amaxes) {
                (Part::Data, _) if job.len == 0 => {}
                (Part::Data, _) => {
                    let cuts = cuts(job);
                    let base = touched(key.element, job.start, job.len);
                    let byte = |&at: &usize| {
                        let at = if at == job.start + job.len {
                            base.end
                        } else {
                            at * key.element.bits() / 8
                        };
                        at - base.start
                    };
                    let bytes = views.bytes.take(&target.bytes)?;
                    let positions: Vec<usize> = cuts.iter().map(byte).collect();
                    let bands = bands::split(bytes, 1, &positions);
                    for (cut, band) in cuts.windows(2).zip(bands) {
                        let (first, len, isa) = (cut[0], cut[1] - cut[0], context.isa);
                        let data = Data {
                            isa,
                            job,
                            known: known.clone(),
                            amaxes,
                            values,
                            first,
                            len,
                            band,
                        };
                        tasks.push(Task::Data(data));
                    }
                }
                // Any number of rows of nothing.
                (_, Some(_)) if job.shape.elements() == 0 => {}
                (_, Some(amaxes)) => {
                    let out = views.bytes.take(&target.bytes)?;
                    let transposed = spec.axes[0] == Axis::Cols;
                    let scales = Scales {
                        shape: job.shape,
                        known,
                        amaxes,
                        transposed,
                        out,
                    };
                    tasks.push(Task::Scales(scales));
                }
                (_, None) => {}
            }
        }
    }
    for_each(context, tasks, |task| match task {
        Task::Data(data) => data.known.clone().dispatch(data),
        Task::Scales(scales) => scales.known.clone().dispatch(scales),
    })
}
