//! Mutated momenta and normalizations.

use super::*;
use crate::momentum::{normalized, updated};
use lowp_kernels::{GradContribution, MomentumJob, NormalizeJob};

pub fn momentum_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, MomentumJob<B>>(rig);
}

pub fn normalize_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, NormalizeJob<B>>(rig);
}

const LENGTHS: [usize; 6] = [0, 1, 16, 33, 300, 5000];

impl<B: Fenced> Mutate<B> for MomentumJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "grad",
        "momentum",
        "momentum = grad",
        "out",
        "group",
        "values",
        "values",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let len = choices.pick(&LENGTHS);
        MomentumJob {
            grad: choices.source(len, true),
            momentum: choices.floats(len, true),
            out: choices.halves(len, true),
            group: choices.below(2),
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let len = choices.rig.backend.len::<f32>(&self.momentum);
        match field {
            "grad" => {
                let len = choices.length(len);
                self.grad = choices.source(len, true);
            }
            "momentum" => {
                let len = choices.length(len);
                self.momentum = choices.floats(len, true);
            }
            "momentum = grad" => {
                if let Source::F32(grad) = &self.grad {
                    self.momentum = grad.clone();
                }
            }
            "out" => {
                let len = choices.length(len);
                self.out = choices.halves(len, true);
            }
            "group" => self.group = choices.size(self.group),
            _ => self.momentum = choices.floats(len, true),
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        let len = choices.rig.backend.len::<f32>(&self.momentum);
        self.grad = choices.source(len, true);
        self.out = choices.halves(len, true);
    }

    fn work(self) -> Work<B> {
        Work::Momentum(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let scalars = scalars();
        let given = [scalars.groups[self.group].beta1, scalars.grad_scale];
        let (momentum, out) = updated(rig, self, given);
        vec![
            Output::Floats("momentum", self.momentum.clone(), momentum),
            Output::Halves(self.out.clone(), out),
        ]
    }

    fn group(&self) -> usize {
        self.group
    }
}

impl<B: Fenced> Mutate<B> for NormalizeJob<B> {
    const FIELDS: &'static [&'static str] =
        &["from", "sum", "out", "out = from", "values", "values"];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let len = choices.pick(&LENGTHS);
        let sum = choices.pick(&[0.0, 1e-20, 4.0, 1e300, f64::INFINITY, f64::NAN]);
        let mut bytes = [0; GradContribution::SUMS];
        bytes[..8].copy_from_slice(&f64::to_le_bytes(sum));
        NormalizeJob {
            from: choices.halves(len, true),
            sum: choices.buffer(&bytes),
            out: choices.halves(len, true),
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let len = choices.rig.backend.len::<bf16>(&self.from);
        match field {
            "from" => {
                let len = choices.length(len);
                self.from = choices.halves(len, true);
            }
            "sum" => self.sum = choices.resized(&self.sum),
            "out" => {
                let len = choices.length(len);
                self.out = choices.halves(len, true);
            }
            "out = from" => self.out = self.from.clone(),
            _ => self.from = choices.halves(len, true),
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        let len = choices.rig.backend.len::<bf16>(&self.from);
        self.out = choices.halves(len, true);
        self.sum = choices.bytes(GradContribution::SUMS);
    }

    fn work(self) -> Work<B> {
        Work::Normalize(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        vec![Output::Halves(self.out.clone(), normalized(rig, self))]
    }
}
