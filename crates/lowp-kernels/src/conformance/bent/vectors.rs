//! Bent jobs on vectors: amaxes, histories and sums of squares.

use std::collections::HashMap;

use lowp_format::{AmaxAlgorithm, history};

use super::*;
use crate::reference;
use crate::{AmaxJob, BlockAmax, HistoryJob, SumSquaresJob};

pub(in crate::conformance) fn amax_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, AmaxJob<B>>(rig);
}

pub(in crate::conformance) fn history_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, HistoryJob<B>>(rig);
}

pub(in crate::conformance) fn sum_jobs<B: Fenced>(rig: &Rig<B>) {
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

impl<B: Fenced> Bent<B> for AmaxJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let shape = Shape::new(1 + hand.below(40), 32 * (1 + hand.below(4)));
        let start = hand.below(shape.elements());
        let len = hand.below(shape.elements() - start + 1);
        let (start, len) = hand.pick(&[(0, shape.elements()), (start, len)]);
        let kinds = [[1, 32], [32, 1], [16, 16], [3, 5], [1, 1], [40, 4096]];
        let mut at = 2;
        let mut blocks = Vec::new();
        for _ in 0..hand.below(4) {
            let block = hand.pick(&kinds);
            blocks.push(BlockAmax { block, start: at });
            at += shape.rows.div_ceil(block[0]) * shape.cols.div_ceil(block[1]);
        }
        AmaxJob {
            shape,
            start,
            source: hand.source(len, true),
            source_rounding: hand.rounding(),
            out: hand.amaxes(at + 1),
            tensor: hand.pick(&[None, Some(1)]),
            blocks,
        }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let AmaxJob {
            shape,
            start,
            source,
            source_rounding,
            out,
            tensor,
            blocks,
        } = self;
        let at = hand.below(blocks.len());
        match pick % 10 {
            0 => shape.rows = hand.size(shape.rows),
            1 => shape.cols = hand.size(shape.cols),
            2 => *start = hand.size(*start),
            3 => {
                let len = hand.length(shape.elements_or_zero());
                *source = hand.source(len, true);
            }
            4 => *source_rounding = hand.rounding(),
            5 => {
                let len = hand.length(hand.rig.backend.len::<f32>(out));
                *out = hand.amaxes(len);
            }
            6 => *tensor = Some(hand.size(1)),
            7 | 8 => {
                if let Some(part) = blocks.get_mut(at) {
                    let side = hand.below(2);
                    part.block[side] = hand.size(part.block[side]);
                }
            }
            _ => {
                if let Some(part) = blocks.get_mut(at) {
                    part.start = hand.size(part.start);
                }
            }
        }
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        if let Some(all) = small(&[self.shape.rows, self.shape.cols]) {
            self.source = hand.source(all.saturating_sub(self.start), true);
        }
    }

    fn work(self) -> Work<B> {
        Work::Amax(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let values = widened(rig, &self.source);
        let values: Vec<f32> = values
            .iter()
            .map(|&x| self.source_rounding.apply(x))
            .collect();
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

impl<B: Fenced> Bent<B> for HistoryJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let window = hand.pick(&[1, 2, 3, 40, 1100]);
        // The larger of two zeros may be either: a history has no -0.
        let history = hand.amaxes(window);
        let history = hand.rig.content::<f32>(&history);
        let history: Vec<f32> = history.iter().map(|x| x + 0.0).collect();
        HistoryJob {
            observed: hand.amaxes(4),
            scales: hand.floats(5, false),
            index: hand.below(4),
            history: hand.buffer(&history),
            algorithm: hand.pick(&[AmaxAlgorithm::Max, AmaxAlgorithm::MostRecent]),
            margin: hand.pick(&[0, 1, -3, 64, -64]),
            element: hand.pick(&[Code::E4M3, Code::E5M2]),
        }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let HistoryJob {
            observed,
            scales,
            index,
            history,
            algorithm,
            margin,
            element,
        } = self;
        match pick % 9 {
            0 => *observed = hand.amaxes(1),
            1 => *scales = hand.amaxes(1),
            2 => *scales = observed.clone(),
            3 => *index = hand.size(*index),
            4 => *history = hand.amaxes(0),
            5 => *history = observed.clone(),
            6 => *algorithm = hand.pick(&[AmaxAlgorithm::Max, AmaxAlgorithm::MostRecent]),
            7 => *margin = hand.pick(&[i32::MIN, i32::MIN + 1, -65, 65, 1000, i32::MAX]),
            _ => *element = hand.pick(&Code::ALL),
        }
    }

    fn fit(&mut self, _: &mut Hand<'_, B>) {}

    fn work(self) -> Work<B> {
        Work::History(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let [mut observed, mut scales, mut column] =
            [&self.observed, &self.scales, &self.history].map(|b| rig.content::<f32>(b));
        // A spent entry says that nothing was observed since.
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

impl<B: Fenced> Bent<B> for SumSquaresJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let len = hand.pick(&[0, 1, 300, 5000]);
        let source = hand.source(len, true);
        let mut out = 1.5f64.to_le_bytes().to_vec();
        out.extend(3u64.to_le_bytes());
        let out = hand.buffer(&out);
        SumSquaresJob { source, out }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let SumSquaresJob { source, out } = self;
        if pick.is_multiple_of(2) {
            let len = hand.below(9000);
            *source = hand.source(len, true);
        } else {
            let len = hand.length(16);
            *out = hand.bytes(len);
        }
    }

    fn fit(&mut self, _: &mut Hand<'_, B>) {}

    fn work(self) -> Work<B> {
        Work::SumSquares(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let (sum, odd) = reference::sum_of_squares(&widened(rig, &self.source));
        let out = rig.content::<u8>(&self.out);
        let word = |at: usize| u64::from_le_bytes(out[at..at + 8].try_into().unwrap());
        let total = f64::from_bits(word(0)) + sum;
        vec![Output::Sum(self.out.clone(), total, word(8) + odd)]
    }
}
