//! Mutated sums and conversions.

use super::*;
use crate::sum::{summed, summed_parts};
use lowp_kernels::{ConvertJob, OwnPart, SumJob, SumPartsJob};

pub fn add_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, SumJob<B>>(rig);
}

pub fn convert_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, ConvertJob<B>>(rig);
}

pub fn add_parts_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, SumPartsJob<B>>(rig);
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

/// `count` values of the dtype of `like`.
fn of_dtype<B: Fenced>(choices: &mut Choices<'_, B>, like: &Source<B>, count: usize) -> Source<B> {
    match like.dtype() {
        FloatDtype::F32 => Source::F32(choices.floats(count, true)),
        FloatDtype::Bf16 => Source::Bf16(choices.halves(count, true)),
    }
}

impl<B: Fenced> Mutate<B> for SumPartsJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "parts",
        "count",
        "own",
        "number",
        "into",
        "into = parts",
        "accumulate",
        "values",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let (len, count) = (
            choices.pick(&[0, 1, 16, 33, 300, 5000]),
            choices.pick(&[1, 2, 3, 9]),
        );
        let parts = choices.source(count * len, true);
        let own = choices.coin().then(|| {
            let values = of_dtype(choices, &parts, len);
            OwnPart {
                number: choices.below(count),
                values,
            }
        });
        Self {
            parts,
            count,
            own,
            into: choices.floats(len, true),
            accumulate: choices.coin(),
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        match field {
            "parts" => {
                let len = choices.length(len(choices, &self.parts));
                self.parts = choices.source(len, true);
            }
            "count" => self.count = choices.size(self.count),
            "own" => {
                let len = choices.length(choices.rig.backend.len::<f32>(&self.into));
                self.own = Some(OwnPart {
                    number: choices.below(self.count),
                    values: choices.source(len, true),
                });
            }
            "number" => {
                if let Some(own) = &mut self.own {
                    own.number = choices.size(own.number);
                }
            }
            "into" => {
                let len = choices.length(choices.rig.backend.len::<f32>(&self.into));
                self.into = choices.floats(len, true);
            }
            "into = parts" => {
                if let Source::F32(parts) = &self.parts {
                    self.into = parts.clone();
                }
            }
            "accumulate" => self.accumulate = !self.accumulate,
            _ => {
                let len = len(choices, &self.parts);
                self.parts = of_dtype(choices, &self.parts, len);
            }
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        let len = choices.rig.backend.len::<f32>(&self.into);
        if let Some(all) = small(&[self.count, len]) {
            self.parts = of_dtype(choices, &self.parts, all);
        }
        if let Some(own) = &mut self.own {
            own.values = of_dtype(choices, &self.parts, len);
        }
    }

    fn work(self) -> Work<B> {
        Work::SumParts(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let sums = summed_parts(rig, self);
        vec![Output::Floats("sum", self.into.clone(), sums)]
    }
}
