//! Mutated jobs that make the scalars of a step.

use super::*;
use crate::step_scalars::{Input, job, outputs, parts};
use lowp_kernels::{StepCounts, StepRecord, StepScalarsJob};

pub fn step_scalars_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, StepScalarsJob<B>>(rig);
}

impl<B: Fenced> Mutate<B> for StepScalarsJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "parts",
        "shards",
        "replica",
        "options",
        "counts",
        "out",
        "report",
        "out = options",
        "report = parts",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let input = Input::random(choices.word());
        job(&input, |bytes| choices.buffer(bytes))
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let length = |choices: &mut Choices<'_, B>, buffer: &B::Buffer<u8>| {
            let now = choices.rig.backend.len::<u8>(buffer);
            let record = choices.pick(&[now.saturating_sub(32), now + 32]);
            let other = choices.length(now);
            choices.pick(&[record, other])
        };
        let Self {
            parts,
            shards,
            replica,
            options,
            counts,
            out,
            report,
        } = self;
        match field {
            "parts" => {
                let len = length(choices, parts);
                *parts = choices.bytes(len);
            }
            "shards" => *shards = choices.size(*shards),
            "replica" => *replica = choices.size(*replica),
            "options" => {
                let len = length(choices, options);
                *options = choices.bytes(len);
            }
            "counts" => {
                let len = length(choices, counts);
                *counts = choices.bytes(len);
            }
            "out" => {
                let len = length(choices, out);
                *out = choices.bytes(len);
            }
            "report" => {
                let len = length(choices, report);
                *report = choices.bytes(len);
            }
            "out = options" => *out = options.clone(),
            _ => *report = parts.clone(),
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        if let Some(bytes) = small(&[self.shards, 32]) {
            let replicas = self.replica.saturating_add(1);
            let all = small(&[replicas, bytes]).unwrap_or(bytes);
            self.parts = choices.bytes(all);
        }
        let options = choices.rig.backend.len::<u8>(&self.options);
        self.out = choices.bytes(options);
        self.counts = choices.bytes(StepCounts::BYTES);
        self.report = choices.bytes(StepRecord::BYTES);
    }

    fn work(self) -> Work<B> {
        Work::StepScalars(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let bytes = |buffer| rig.content::<u8>(buffer);
        let input = Input {
            parts: parts(&bytes(&self.parts)),
            shards: self.shards,
            replica: self.replica,
            options: StepScalars::from_bytes(&bytes(&self.options)).unwrap(),
            counts: StepCounts::from_bytes(bytes(&self.counts).first_chunk().unwrap()),
        };
        let expected = outputs(&input);
        let names = ["scalars", "counts", "report"];
        let buffers = [&self.out, &self.counts, &self.report];
        let output = |((name, buffer), bytes): ((_, &B::Buffer<u8>), _)| {
            Output::Bytes(name, buffer.clone(), bytes)
        };
        let named = names.into_iter().zip(buffers);
        named.zip(expected).map(output).collect()
    }
}
