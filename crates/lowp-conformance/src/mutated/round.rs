//! Mutated roundings.

use super::encode::{encoded, tensor};
use super::vectors::ElementsOrZero;
use super::*;
use crate::round::in_order;
use lowp_format::{Buffer, Quantizer, Quantizers};
use lowp_kernels::testing::is_stochastic;
use lowp_kernels::{RoundJob, StochasticKey, reference, rounds};

pub fn round_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, RoundJob<B>>(rig);
}

impl<B: Fenced> Mutate<B> for RoundJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "shape.rows",
        "shape.cols",
        "kernels",
        "source",
        "source_rounding",
        "tensor",
        "stochastic",
        "targets",
        "targets[i]",
        "values",
        "values",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        // A device asks for aligned buffers.
        choices.shift = Some(0);
        let shape = Shape::new(128, 64 * (1 + choices.below(2)));
        let known = |case: &Case| rounds(&case.kernels(), shape) && in_order(case);
        let known: Vec<Case> = cases().into_iter().filter(known).collect();
        let case = choices.pick(&known);
        let [rounded, coded] = choices.pick(&[
            [Usage::BOTH, Usage::empty()],
            [Usage::ROWWISE, Usage::COLUMNWISE],
            [Usage::COLUMNWISE, Usage::ROWWISE],
            [Usage::COLUMNWISE, Usage::empty()],
        ]);
        let specs = match coded.is_empty() {
            true => Vec::new(),
            false => case.of_usage(coded),
        };
        let key = StochasticKey {
            seed: choices.word(),
            stream: choices.word(),
            first: choices.pick(&[0, 7, u64::MAX - 5, 1 << 40]),
        };
        let stochastic = case.kernels().iter().all(is_stochastic) && choices.coin();
        let values = Orientation::ALL.map(|orientation| {
            let here = rounded.contains(orientation.usage());
            here.then(|| choices.halves(shape.elements(), false))
        });
        let target = |spec: &BufferSpec| Target::new(*spec, choices.bytes(spec.bytes(shape)));
        let targets = specs.iter().map(target).collect();
        let encode = EncodeJob {
            shape,
            kernels: case.kernels(),
            source: Source::Bf16(choices.halves(shape.elements(), true)),
            source_rounding: choices.rounding(),
            tensor: tensor(choices, &case, shape),
            targets,
            stochastic: stochastic.then_some(key),
        };
        RoundJob { encode, values }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        if field != "values" {
            return self.encode.mutate(field, choices);
        }
        let len = choices.length(self.encode.shape.elements_or_zero());
        let side = choices.below(2);
        self.values[side] = match choices.below(3) {
            0 => None,
            1 => self.values[1 - side].clone(),
            _ => Some(choices.halves(len, false)),
        };
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        self.encode.resize(choices);
        let Shape { rows, cols } = self.encode.shape;
        if let Some(all) = small(&[rows, cols]) {
            self.encode.source = Source::Bf16(choices.halves(all, true));
            for values in self.values.iter_mut().flatten() {
                *values = choices.halves(all, false);
            }
        }
    }

    fn work(self) -> Work<B> {
        Work::Round(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let source = rig.widened(&self.encode.source);
        let mut all = encoded(rig, &self.encode, &source);
        for (orientation, into) in Orientation::ALL.into_iter().zip(&self.values) {
            if let Some(into) = into {
                let values = decoded(rig, &self.encode, orientation, &source);
                all.push(Output::of("values", &Source::Bf16(into.clone()), values));
            }
        }
        all
    }
}

/// What codes of `orientation` decode to.
fn decoded<B: Backend>(
    rig: &Rig<B>,
    encode: &EncodeJob<B>,
    orientation: Orientation,
    source: &[f32],
) -> Vec<f32> {
    let kernel = encode.kernels[orientation as usize];
    let [of, other] =
        [kernel, KernelKey::new(Code::F32, ScaleRule::None)].map(Quantizer::row_major);
    let quantizers = match orientation {
        Orientation::Rowwise => Quantizers::independent(of, other),
        Orientation::Columnwise => Quantizers::independent(other, of),
    };
    let specs = quantizers.buffers(orientation.usage());
    let target = |spec: &BufferSpec| Target::new(*spec, rig.buffer::<u8>(&[]));
    let codes = EncodeJob {
        targets: specs.iter().map(target).collect(),
        ..encode.clone()
    };
    let made = encoded(rig, &codes, source);
    let part = |part| {
        let (spec, output) = specs
            .iter()
            .zip(&made)
            .find(|(spec, _)| spec.key.part == part)?;
        match output {
            Output::Bytes(_, _, bytes) | Output::Scale(_, bytes) => Some(Buffer {
                spec: *spec,
                storage: &bytes[..],
            }),
            _ => None,
        }
    };
    let outer = kernel.scale.outer().and_then(|(_, outer)| part(outer));
    let tensor = outer.map_or(Vec::new(), |buffer| {
        let entries = buffer.storage.as_chunks().0.iter();
        entries.map(|bytes| f32::from_le_bytes(*bytes)).collect()
    });
    reference::decode(
        encode.shape,
        orientation,
        &kernel,
        &part(Part::Data).expect("codes"),
        part(Part::BlockScale).as_ref(),
        &tensor,
    )
}
