//! Mutated encodes, and what other jobs that quantize mutate in the same way.

use lowp_format::{Form, Orientation};

use super::vectors::ElementsOrZero;
use super::*;
use crate::StochasticKey;
use crate::conformance::observed::made;
use crate::reference::{Reference, in_form};

pub(in crate::conformance) fn encode_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, EncodeJob<B>>(rig);
}

const RULES: [ScaleRule; 8] = [
    ScaleRule::None,
    ScaleRule::Tensor,
    ScaleRule::E8M0(MxScale::Te),
    ScaleRule::E8M0(MxScale::OcpFloor),
    ScaleRule::TwoLevel,
    ScaleRule::BlockF32 {
        pow2: true,
        epsilon: 0.5,
    },
    ScaleRule::BlockF32 {
        pow2: false,
        epsilon: f32::NAN,
    },
    ScaleRule::BlockF32 {
        pow2: false,
        epsilon: -1.0,
    },
];

/// A case and a shape that it takes.
pub(super) fn case_and_shape<B: Fenced>(choices: &mut Choices<'_, B>) -> (Case, Shape) {
    let mut case = choices.pick(&cases());
    for spec in &mut case.specs {
        if spec.key.part == Part::BlockScale && choices.coin() {
            spec.padded = PaddedForm::TILES_128X4;
        }
    }
    let unit = case.columns();
    let rows = choices.below(70);
    let rows = choices.pick(&[rows, rows, 1, 32, 130]);
    let cols = unit * (1 + choices.below(3));
    (case, Shape::new(rows, choices.pick(&[cols, cols, 0])))
}

pub(super) fn tensor<B: Fenced>(
    choices: &mut Choices<'_, B>,
    kernel: &KernelKey,
) -> TensorInput<B> {
    let slot = Slot {
        buffer: choices.amaxes(3),
        index: choices.below(3),
    };
    let scaled = matches!(kernel.scale, ScaleRule::Tensor | ScaleRule::TwoLevel);
    if !scaled || choices.coin() {
        return TensorInput::Known(slot);
    }
    let ways = match kernel.scale {
        ScaleRule::Tensor => &[(false, 0.0), (true, 0.0), (false, 2.5)][..],
        _ => &[(false, 0.0)],
    };
    let (pow2, epsilon) = choices.pick(ways);
    TensorInput::Observed {
        slot,
        pow2,
        epsilon,
    }
}

pub(super) fn mutate_tensor<B: Fenced>(
    input: &mut Option<TensorInput<B>>,
    choices: &mut Choices<'_, B>,
) {
    let Some(now) = input else { return };
    let slot = Slot {
        buffer: now.slot().buffer.clone(),
        index: choices.size(1),
    };
    let epsilon = choices.float();
    *input = match (choices.below(4), now.clone()) {
        (0, _) => None,
        (1, _) => Some(TensorInput::Known(slot)),
        (_, TensorInput::Known(slot) | TensorInput::Observed { slot, .. }) => {
            let pow2 = choices.coin();
            Some(TensorInput::Observed {
                slot,
                pow2,
                epsilon,
            })
        }
    };
}

pub(super) fn mutate_kernel<B: Fenced>(
    kernel: &mut KernelKey,
    targets: &mut [Target<B>],
    choices: &mut Choices<'_, B>,
) {
    let KernelKey {
        element,
        scale,
        blocks,
    } = kernel;
    match choices.below(5) {
        0 => *element = choices.pick(&Code::ALL),
        1 => *scale = choices.pick(&RULES),
        2 => *blocks = choices.pick(&[None, Some([[1, 16], [16, 1]]), Some([[8, 8]; 2])]),
        _ => {
            let Some(blocks) = blocks else { return };
            let (which, side) = (choices.below(2), choices.below(2));
            blocks[which][side] = choices.size(blocks[which][side]);
            // Mostly the targets follow, so that such blocks are run, too.
            for spec in targets.iter_mut().map(|target| &mut target.spec) {
                let serves = spec.key.usage.contains(Orientation::ALL[which].usage());
                if spec.key.part == Part::BlockScale && serves && choices.below(4) > 0 {
                    let [height, width] = blocks[which];
                    spec.tile = match spec.axes[0] {
                        Axis::Rows => [height, width],
                        Axis::Cols => [width, height],
                    };
                }
            }
        }
    }
}

pub(super) fn mutate_target<B: Fenced>(target: &mut Target<B>, choices: &mut Choices<'_, B>) {
    let Target { spec, form, bytes } = target;
    let BufferSpec {
        key: BufferKey { usage, part },
        code,
        axes,
        tile,
        padded,
        origin,
    } = spec;
    let side = choices.below(2);
    match choices.below(11) {
        0 => {
            let invalid = [Usage::empty(), Usage::from_bits_retain(7)];
            let all = [
                Usage::ROWWISE,
                Usage::COLUMNWISE,
                Usage::BOTH,
                invalid[0],
                invalid[1],
            ];
            *usage = choices.pick(&all);
        }
        1 => {
            *part = choices.pick(&[
                Part::Data,
                Part::BlockScale,
                Part::DecodeScale,
                Part::TensorAmax,
            ])
        }
        2 => *code = choices.pick(&Code::ALL),
        3 => *axes = choices.pick(&[ROW_MAJOR, TRANSPOSED, [Axis::Rows; 2], [Axis::Cols; 2]]),
        4 => tile[side] = choices.size(tile[side]),
        5 => padded.outer = choices.size(padded.outer),
        6 => padded.block = choices.size(padded.block),
        7 => padded.repeat = !padded.repeat,
        8 => *origin = Origin::Replicated,
        9 => {
            let form_of = (choices.pick(&Form::ALL), choices.pick(&Orientation::ALL));
            *form = choices.pick(&[None, Some(form_of)]);
        }
        _ => *bytes = choices.resized(bytes),
    }
}

/// Gives every target the bytes of its layout.
pub(super) fn resize_targets<B: Fenced>(
    targets: &mut [Target<B>],
    shape: Shape,
    choices: &mut Choices<'_, B>,
) {
    for target in targets {
        if let Some(len) = target.layout(shape).ok().and_then(|l| small(&[l.bytes()])) {
            target.bytes = choices.bytes(len);
        }
    }
}

/// A slot's entry before the run, and the content of its vector after it.
pub(super) fn tensor_after<B: Backend>(
    rig: &Rig<B>,
    kernel: &KernelKey,
    input: Option<&TensorInput<B>>,
) -> (f32, Option<Output<B>>) {
    let Some(input) = input else {
        return (1.0, None);
    };
    let Slot { buffer, index } = input.slot();
    let mut entries = rig.content::<f32>(buffer);
    let entry = entries[*index];
    let tensor = match *input {
        TensorInput::Known(_) => entry,
        TensorInput::Observed { pow2, epsilon, .. } => {
            entries[*index] = -entry.abs();
            made(kernel, entry.abs(), (pow2, epsilon))
        }
    };
    let output = Output::Floats("slots", buffer.clone(), entries);
    (tensor, Some(output))
}

/// What an encode of `values` writes.
pub(super) fn encoded<B: Backend>(
    rig: &Rig<B>,
    job: &EncodeJob<B>,
    values: &[f32],
) -> Vec<Output<B>> {
    let (tensor, consumed) = tensor_after(rig, &job.kernel, job.tensor.as_ref());
    let random = job.stochastic.map(|key| {
        let stream = key.stream.wrapping_add(scalars().random_step << 32);
        (Philox::new(key.seed, stream), key.first)
    });
    let reference = Reference {
        shape: job.shape,
        kernel: job.kernel,
        values,
        source_rounding: job.source_rounding,
        tensor,
        random,
    };
    let output = |target: &Target<B>| {
        let mut expected = reference.encode(&target.spec).unwrap();
        if target.spec.key.part.is_per_tensor() {
            return Output::Scale(target.bytes.clone(), expected);
        }
        if target.form.is_some() {
            let compact = Target::<B>::new(target.spec, target.bytes.clone());
            let from = compact.layout(job.shape).unwrap();
            expected = in_form(&from, &target.layout(job.shape).unwrap(), &expected);
        }
        Output::Bytes("target", target.bytes.clone(), expected)
    };
    job.targets.iter().map(output).chain(consumed).collect()
}

impl<B: Fenced> Mutate<B> for EncodeJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "shape.rows",
        "shape.cols",
        "kernel",
        "kernel",
        "source",
        "source_rounding",
        "tensor",
        "stochastic",
        "targets",
        "targets[i]",
        "targets[i]",
        "targets[i]",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let (case, shape) = case_and_shape(choices);
        let mut targets = Vec::new();
        for spec in &case.specs {
            let orientation = spec.key.usage.orientations().next();
            let form = choices.pick(&[Form::Compact, Form::Compact, Form::Padded, Form::Swizzled]);
            let mut target = Target::new(*spec, choices.bytes(spec.bytes(shape)));
            if let (Part::BlockScale, Some(orientation)) = (spec.key.part, orientation) {
                target.form = Some((form, orientation));
            }
            match target.layout(shape) {
                Ok(layout) => target.bytes = choices.bytes(layout.bytes()),
                Err(_) => target.form = None,
            }
            if choices.below(6) > 0 {
                targets.push(target);
            }
        }
        let key = StochasticKey {
            seed: choices.word(),
            stream: choices.word(),
            first: choices.pick(&[0, 7, u64::MAX - 5, 1 << 40]),
        };
        let stochastic = case.kernel.element == Code::E2M1 && choices.coin();
        EncodeJob {
            shape,
            kernel: case.kernel,
            source: choices.source(shape.elements(), true),
            source_rounding: choices.rounding(),
            tensor: Some(tensor(choices, &case.kernel)),
            targets,
            stochastic: stochastic.then_some(key),
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let EncodeJob {
            shape,
            kernel,
            source,
            source_rounding,
            tensor,
            targets,
            stochastic,
        } = self;
        let at = choices.below(targets.len());
        match field {
            "shape.rows" => shape.rows = choices.size(shape.rows),
            "shape.cols" => shape.cols = choices.size(shape.cols),
            "kernel" => mutate_kernel(kernel, targets, choices),
            "source" => {
                let len = choices.length(shape.elements_or_zero());
                *source = choices.source(len, true);
            }
            "source_rounding" => *source_rounding = choices.rounding(),
            "tensor" => mutate_tensor(tensor, choices),
            "stochastic" => {
                *stochastic = Some(StochasticKey {
                    seed: 1,
                    stream: u64::MAX,
                    first: u64::MAX,
                });
            }
            "targets" if !targets.is_empty() => {
                let twice = targets[at].clone();
                targets.push(twice);
            }
            _ => {
                if let Some(target) = targets.get_mut(at) {
                    mutate_target(target, choices);
                }
            }
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        if let Some(all) = small(&[self.shape.rows, self.shape.cols]) {
            self.source = choices.source(all, true);
        }
        resize_targets(&mut self.targets, self.shape, choices);
    }

    fn work(self) -> Work<B> {
        Work::Encode(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        encoded(rig, self, &widened(rig, &self.source))
    }
}
