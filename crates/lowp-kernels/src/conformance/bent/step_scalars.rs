//! Bent jobs that make the scalars of a step.

use super::*;
use crate::conformance::step_scalars::{Input, job, outputs, parts};
use crate::{StepCounts, StepReport, StepScalarsJob};

pub(in crate::conformance) fn step_scalars_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, StepScalarsJob<B>>(rig);
}

impl<B: Fenced> Bent<B> for StepScalarsJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let input = Input::random(hand.word());
        job(&input, |bytes| hand.buffer(bytes))
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let length = |hand: &mut Hand<'_, B>, buffer: &B::Buffer<u8>| {
            let now = hand.rig.backend.len::<u8>(buffer);
            let record = hand.pick(&[now.saturating_sub(32), now + 32]);
            let other = hand.length(now);
            hand.pick(&[record, other])
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
        match pick % 9 {
            0 => {
                let len = length(hand, parts);
                *parts = hand.bytes(len);
            }
            1 => *shards = hand.size(*shards),
            2 => *replica = hand.size(*replica),
            3 => {
                let len = length(hand, options);
                *options = hand.bytes(len);
            }
            4 => {
                let len = length(hand, counts);
                *counts = hand.bytes(len);
            }
            5 => {
                let len = length(hand, out);
                *out = hand.bytes(len);
            }
            6 => {
                let len = length(hand, report);
                *report = hand.bytes(len);
            }
            7 => *out = options.clone(),
            _ => *report = parts.clone(),
        }
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        if let Some(bytes) = small(&[self.shards, 32]) {
            let replicas = small(&[self.replica, bytes]).map_or(1, |_| self.replica + 1);
            self.parts = hand.bytes(replicas * bytes);
        }
        let options = hand.rig.backend.len::<u8>(&self.options);
        self.out = hand.bytes(options);
        self.counts = hand.bytes(StepCounts::BYTES);
        self.report = hand.bytes(StepReport::BYTES);
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
