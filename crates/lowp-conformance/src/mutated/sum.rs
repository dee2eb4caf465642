//! Mutated sums and conversions.

use super::*;
use crate::sum::summed;
use lowp_kernels::{ConvertJob, SumJob};

pub fn add_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, SumJob<B>>(rig);
}

pub fn convert_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, ConvertJob<B>>(rig);
}

fn len<B: Fenced>(choices: &Choices<'_, B>, source: &Source<B>) -> usize {
    match source {
        Source::F32(buffer) => choices.rig.backend.len::<f32>(buffer),
        Source::Bf16(buffer) => choices.rig.backend.len::<bf16>(buffer),
    }
}

/// Mutates one of two vectors.
fn mutate<B: Fenced>(
    from: &mut Source<B>,
    into: &mut Source<B>,
    field: &str,
    choices: &mut Choices<'_, B>,
) {
    match field {
        "from" => {
            let len = choices.length(len(choices, from));
            *from = choices.source(len, true);
        }
        "into" => {
            let len = choices.length(len(choices, into));
            *into = choices.source(len, true);
        }
        "into = from" => *into = from.clone(),
        // Another dtype, or other values.
        _ => {
            let len = len(choices, from);
            *from = choices.source(len, true);
        }
    }
}

impl<B: Fenced> Mutate<B> for SumJob<B> {
    const FIELDS: &'static [&'static str] = &["from", "into", "into = from", "from", "from"];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let len = choices.pick(&[0, 1, 16, 33, 300, 9000]);
        let [from, into] = [0, 1].map(|_| choices.source(len, true));
        SumJob { from, into }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        mutate(&mut self.from, &mut self.into, field, choices);
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        let len = len(choices, &self.from);
        self.into = choices.source(len, true);
    }

    fn work(self) -> Work<B> {
        Work::Sum(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        vec![Output::of(
            "vector",
            &self.into,
            summed(rig, &self.from, &self.into),
        )]
    }
}

impl<B: Fenced> Mutate<B> for ConvertJob<B> {
    const FIELDS: &'static [&'static str] = &["from", "into", "into = from", "from", "from"];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let SumJob { from, into } = SumJob::good(choices);
        ConvertJob { from, into }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        mutate(&mut self.from, &mut self.into, field, choices);
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        let len = len(choices, &self.from);
        self.into = choices.source(len, true);
    }

    fn work(self) -> Work<B> {
        Work::Convert(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        vec![Output::of("vector", &self.into, rig.widened(&self.from))]
    }
}
