//! Mutated jobs on vectors: amaxes, histories and sums of squares.

use std::collections::HashMap;

use lowp_format::{AmaxAlgorithm, Extent, Orientation, hadamard_rows, history};

use super::*;
use lowp_kernels::reference;
use lowp_kernels::{AmaxJob, BlockAmax, HistoryJob, SumSquaresJob};

pub fn amax_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, AmaxJob<B>>(rig);
}

pub fn history_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, HistoryJob<B>>(rig);
}

pub fn sum_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, SumSquaresJob<B>>(rig);
}

/// `max(entry, amax)`; an entry that is negative or NaN is replaced.
pub(super) fn raised(entry: f32, amax: f32) -> f32 {
    if entry.is_sign_positive() && entry >= amax {
        entry
    } else {
        amax
    }
}

impl<B: Fenced> Mutate<B> for AmaxJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "shape.rows",
        "shape.cols",
        "start",
        "source",
        "source_rounding",
        "out",
        "tensor",
        "blocks[i].block",
        "blocks[i].block",
        "blocks[i].start",
        "hadamard",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let shape = Shape::new(1 + choices.below(40), 32 * (1 + choices.below(4)));
        let start = choices.below(shape.elements());
        let len = choices.below(shape.elements() - start + 1);
        let (start, len) = choices.pick(&[(0, shape.elements()), (start, len)]);
        let lines = Orientation::ALL.map(|orientation| Extent::Line.block(orientation));
        let kinds = [
            [1, 32],
            [32, 1],
            [16, 16],
            [3, 5],
            [1, 1],
            [40, 4096],
            lines[0],
            lines[1],
        ];
        let mut at = 2;
        let mut blocks = Vec::new();
        for _ in 0..choices.below(4) {
            let block = choices.pick(&kinds);
            blocks.push(BlockAmax { block, start: at });
            at += shape.rows.div_ceil(block[0]) * shape.cols.div_ceil(block[1]);
        }
        let hadamard = choices.below(4) == 0;
        let (start, len) = if hadamard {
            (0, shape.elements())
        } else {
            (start, len)
        };
        if hadamard {
            blocks.clear();
        }
        AmaxJob {
            hadamard,
            shape,
            start,
            source: choices.source(len, true),
            source_rounding: choices.rounding(),
            out: choices.amaxes(at + 1),
            tensor: choices.pick(&[None, Some(1)]),
            blocks,
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let AmaxJob {
            shape,
            start,
            source,
            source_rounding,
            out,
            tensor,
            blocks,
            hadamard,
        } = self;
        let at = choices.below(blocks.len());
        match field {
            "shape.rows" => shape.rows = choices.size(shape.rows),
            "shape.cols" => shape.cols = choices.size(shape.cols),
            "start" => *start = choices.size(*start),
            "source" => {
                let len = choices.length(shape.elements_or_zero());
                *source = choices.source(len, true);
            }
            "source_rounding" => *source_rounding = choices.rounding(),
            "out" => {
                let len = choices.length(choices.rig.backend.len::<f32>(out));
                *out = choices.amaxes(len);
            }
            "tensor" => *tensor = Some(choices.size(1)),
            "hadamard" => *hadamard = !*hadamard,
            "blocks[i].block" => {
                if let Some(part) = blocks.get_mut(at) {
                    let side = choices.below(2);
                    part.block[side] = choices.size(part.block[side]);
                }
            }
            _ => {
                if let Some(part) = blocks.get_mut(at) {
                    part.start = choices.size(part.start);
                }
            }
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        if let Some(all) = small(&[self.shape.rows, self.shape.cols]) {
            self.source = choices.source(all.saturating_sub(self.start), true);
        }
    }

    fn work(self) -> Work<B> {
        Work::Amax(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let values = rig.widened(&self.source);
        let mut values: Vec<f32> = values
            .iter()
            .map(|&x| self.source_rounding.apply(x))
            .collect();
        if self.hadamard {
            hadamard_rows(&mut values, self.shape.cols);
        }
        let mut out = rig.content::<f32>(&self.out);
        if let (Some(entry), false) = (self.tensor, values.is_empty()) {
            out[entry] = raised(out[entry], reference::amax(values.iter().copied()));
        }
        for part in &self.blocks {
            let [height, width] = part.block;
            let mut amaxes = HashMap::new();
            for (at, &x) in (self.start..).zip(&values) {
                let (row, col) = (at / self.shape.cols, at % self.shape.cols);
                let block = row / height * self.shape.cols.div_ceil(width) + col / width;
                let amax = amaxes.entry(block).or_insert(0f32);
                *amax = reference::amax([*amax, x]);
            }
            for (block, amax) in amaxes {
                let entry = &mut out[part.start + block];
                *entry = raised(*entry, amax);
            }
        }
        vec![Output::Floats("amaxes", self.out.clone(), out)]
    }
}

/// The number of elements, where it can be computed.
pub(super) trait ElementsOrZero {
    fn elements_or_zero(self) -> usize;
}

impl ElementsOrZero for Shape {
    fn elements_or_zero(self) -> usize {
        small(&[self.rows, self.cols]).unwrap_or(0)
    }
}

impl<B: Fenced> Mutate<B> for HistoryJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "observed",
        "scales",
        "scales = observed",
        "index",
        "history",
        "history = observed",
        "algorithm",
        "margin",
        "element",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let window = choices.pick(&[1, 2, 3, 40, 1100]);
        // The larger of two zeros may be either: a history has no -0.
        let history = choices.amaxes(window);
        let history = choices.rig.content::<f32>(&history);
        let history: Vec<f32> = history.iter().map(|x| x + 0.0).collect();
        HistoryJob {
            observed: choices.amaxes(4),
            scales: choices.floats(5, false),
            index: choices.below(4),
            history: choices.buffer(&history),
            algorithm: choices.pick(&[AmaxAlgorithm::Max, AmaxAlgorithm::MostRecent]),
            margin: choices.pick(&[0, 1, -3, 64, -64]),
            element: choices.pick(&[Code::E4M3, Code::E5M2]),
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let HistoryJob {
            observed,
            scales,
            index,
            history,
            algorithm,
            margin,
            element,
        } = self;
        match field {
            "observed" => *observed = choices.amaxes(1),
            "scales" => *scales = choices.amaxes(1),
            "scales = observed" => *scales = observed.clone(),
            "index" => *index = choices.size(*index),
            "history" => *history = choices.amaxes(0),
            "history = observed" => *history = observed.clone(),
            "algorithm" => {
                *algorithm = choices.pick(&[AmaxAlgorithm::Max, AmaxAlgorithm::MostRecent])
            }
            "margin" => *margin = choices.pick(&[i32::MIN, i32::MIN + 1, -65, 65, 1000, i32::MAX]),
            _ => *element = choices.pick(&Code::ALL),
        }
    }

    fn resize(&mut self, _: &mut Choices<'_, B>) {}

    fn work(self) -> Work<B> {
        Work::History(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let [mut observed, mut scales, mut column] =
            [&self.observed, &self.scales, &self.history].map(|b| rig.content::<f32>(b));
        // A consumed entry says that nothing was observed since.
        let amax = match observed[self.index] {
            x if x > 0.0 => x,
            _ => 0.0,
        };
        observed[self.index] = 0.0;
        column[0] = column[0].max(amax);
        scales[self.index] = history(
            &mut column,
            scales[self.index],
            Some(amax),
            self.element,
            self.algorithm,
            self.margin,
        );
        vec![
            Output::Floats("observed", self.observed.clone(), observed),
            Output::Floats("scales", self.scales.clone(), scales),
            Output::Floats("history", self.history.clone(), column),
        ]
    }
}

impl<B: Fenced> Mutate<B> for SumSquaresJob<B> {
    const FIELDS: &'static [&'static str] = &["source", "out"];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let len = choices.pick(&[0, 1, 300, 5000]);
        let source = choices.source(len, true);
        let mut out = 1.5f64.to_le_bytes().to_vec();
        out.extend(3u64.to_le_bytes());
        let out = choices.buffer(&out);
        SumSquaresJob { source, out }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let SumSquaresJob { source, out } = self;
        if field == "source" {
            let len = choices.below(9000);
            *source = choices.source(len, true);
        } else {
            let len = choices.length(16);
            *out = choices.bytes(len);
        }
    }

    fn resize(&mut self, _: &mut Choices<'_, B>) {}

    fn work(self) -> Work<B> {
        Work::SumSquares(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let (sum, non_finite) = reference::sum_of_squares(&rig.widened(&self.source));
        let out = rig.content::<u8>(&self.out);
        let word = |at: usize| u64::from_le_bytes(out[at..at + 8].try_into().unwrap());
        let total = f64::from_bits(word(0)) + sum;
        vec![Output::Sum(self.out.clone(), total, word(8) + non_finite)]
    }
}
