//! Bent sums and conversions.

use super::*;
use crate::conformance::sum::summed;
use crate::{ConvertJob, SumJob};

pub(in crate::conformance) fn add_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, SumJob<B>>(rig);
}

pub(in crate::conformance) fn convert_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, ConvertJob<B>>(rig);
}

fn len<B: Fenced>(hand: &Hand<'_, B>, source: &Source<B>) -> usize {
    match source {
        Source::F32(buffer) => hand.rig.backend.len::<f32>(buffer),
        Source::Bf16(buffer) => hand.rig.backend.len::<bf16>(buffer),
    }
}

/// Bends one of two vectors.
fn bend<B: Fenced>(
    from: &mut Source<B>,
    into: &mut Source<B>,
    pick: usize,
    hand: &mut Hand<'_, B>,
) {
    match pick % 5 {
        0 => {
            let len = hand.length(len(hand, from));
            *from = hand.source(len, true);
        }
        1 => {
            let len = hand.length(len(hand, into));
            *into = hand.source(len, true);
        }
        2 => *into = from.clone(),
        // Another dtype, or other values.
        _ => {
            let len = len(hand, from);
            *from = hand.source(len, true);
        }
    }
}

/// A destination that holds `values`.
fn output<B: Backend>(into: &Source<B>, values: Vec<f32>) -> Vec<Output<B>> {
    vec![match into {
        Source::F32(buffer) => Output::Floats("vector", buffer.clone(), values),
        Source::Bf16(buffer) => {
            let halves = values.into_iter().map(bf16::from_f32).collect();
            Output::Halves(buffer.clone(), halves)
        }
    }]
}

impl<B: Fenced> Bent<B> for SumJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let len = hand.pick(&[0, 1, 16, 33, 300, 9000]);
        let [from, into] = [0, 1].map(|_| hand.source(len, true));
        SumJob { from, into }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        bend(&mut self.from, &mut self.into, pick, hand);
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        let len = len(hand, &self.from);
        self.into = hand.source(len, true);
    }

    fn work(self) -> Work<B> {
        Work::Sum(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        output(&self.into, summed(rig, &self.from, &self.into))
    }
}

impl<B: Fenced> Bent<B> for ConvertJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let SumJob { from, into } = SumJob::good(hand);
        ConvertJob { from, into }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        bend(&mut self.from, &mut self.into, pick, hand);
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        let len = len(hand, &self.from);
        self.into = hand.source(len, true);
    }

    fn work(self) -> Work<B> {
        Work::Convert(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        output(&self.into, widened(rig, &self.from))
    }
}
