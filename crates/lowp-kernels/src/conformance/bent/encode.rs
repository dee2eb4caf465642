//! Bent encodes, and what other jobs that quantize bend in the same way.

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
pub(super) fn case_and_shape<B: Fenced>(hand: &mut Hand<'_, B>) -> (Case, Shape) {
    let mut case = hand.pick(&cases());
    for spec in &mut case.specs {
        if spec.key.part == Part::BlockScale && hand.often() {
            spec.padded = PaddedForm::TILES_128X4;
        }
    }
    let unit = case.columns();
    let rows = hand.below(70);
    let rows = hand.pick(&[rows, rows, 1, 32, 130]);
    let cols = unit * (1 + hand.below(3));
    (case, Shape::new(rows, hand.pick(&[cols, cols, 0])))
}

pub(super) fn tensor<B: Fenced>(hand: &mut Hand<'_, B>, kernel: &KernelKey) -> TensorInput<B> {
    let slot = Slot {
        buffer: hand.amaxes(3),
        index: hand.below(3),
    };
    let scaled = matches!(kernel.scale, ScaleRule::Tensor | ScaleRule::TwoLevel);
    if !scaled || hand.often() {
        return TensorInput::Known(slot);
    }
    let ways = match kernel.scale {
        ScaleRule::Tensor => &[(false, 0.0), (true, 0.0), (false, 2.5)][..],
        _ => &[(false, 0.0)],
    };
    let (pow2, epsilon) = hand.pick(ways);
    TensorInput::Observed {
        slot,
        pow2,
        epsilon,
    }
}

pub(super) fn bend_tensor<B: Fenced>(input: &mut Option<TensorInput<B>>, hand: &mut Hand<'_, B>) {
    let Some(now) = input else { return };
    let slot = Slot {
        buffer: now.slot().buffer.clone(),
        index: hand.size(1),
    };
    let epsilon = hand.float();
    *input = match (hand.below(4), now.clone()) {
        (0, _) => None,
        (1, _) => Some(TensorInput::Known(slot)),
        (_, TensorInput::Known(slot) | TensorInput::Observed { slot, .. }) => {
            let pow2 = hand.often();
            Some(TensorInput::Observed {
                slot,
                pow2,
                epsilon,
            })
        }
    };
}

pub(super) fn bend_kernel<B: Fenced>(
    kernel: &mut KernelKey,
    targets: &mut [Target<B>],
    hand: &mut Hand<'_, B>,
) {
    let KernelKey {
        element,
        scale,
        blocks,
    } = kernel;
    match hand.below(5) {
        0 => *element = hand.pick(&Code::ALL),
        1 => *scale = hand.pick(&RULES),
        2 => *blocks = hand.pick(&[None, Some([[1, 16], [16, 1]]), Some([[8, 8]; 2])]),
        _ => {
            let Some(blocks) = blocks else { return };
            let (which, side) = (hand.below(2), hand.below(2));
            blocks[which][side] = hand.size(blocks[which][side]);
            // Often the targets follow, so that odd blocks are run, too.
            for spec in targets.iter_mut().map(|target| &mut target.spec) {
                let serves = spec.key.usage.contains(Orientation::ALL[which].usage());
                if spec.key.part == Part::BlockScale && serves && hand.below(4) > 0 {
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

pub(super) fn bend_target<B: Fenced>(target: &mut Target<B>, hand: &mut Hand<'_, B>) {
    let Target { spec, form, bytes } = target;
    let BufferSpec {
        key: BufferKey { usage, part },
        code,
        axes,
        tile,
        padded,
        origin,
    } = spec;
    let side = hand.below(2);
    match hand.below(11) {
        0 => {
            let odd = [Usage::empty(), Usage::from_bits_retain(7)];
            let all = [
                Usage::ROWWISE,
                Usage::COLUMNWISE,
                Usage::BOTH,
                odd[0],
                odd[1],
            ];
            *usage = hand.pick(&all);
        }
        1 => {
            let all = [
                Part::Data,
                Part::BlockScale,
                Part::DecodeScale,
                Part::TensorAmax,
            ];
            *part = hand.pick(&all);
        }
        2 => *code = hand.pick(&Code::ALL),
        3 => *axes = hand.pick(&[ROW_MAJOR, TRANSPOSED, [Axis::Rows; 2], [Axis::Cols; 2]]),
        4 => tile[side] = hand.size(tile[side]),
        5 => padded.outer = hand.size(padded.outer),
        6 => padded.block = hand.size(padded.block),
        7 => padded.repeat = !padded.repeat,
        8 => *origin = Origin::Replicated,
        9 => {
            let form_of = (hand.pick(&Form::ALL), hand.pick(&Orientation::ALL));
            *form = hand.pick(&[None, Some(form_of)]);
        }
        _ => {
            let len = hand.length(hand.rig.backend.len::<u8>(bytes));
            *bytes = hand.bytes(len);
        }
    }
}

/// Gives every target the bytes of its layout.
pub(super) fn fit_targets<B: Fenced>(
    targets: &mut [Target<B>],
    shape: Shape,
    hand: &mut Hand<'_, B>,
) {
    for target in targets {
        if let Some(len) = target.layout(shape).ok().and_then(|l| small(&[l.bytes()])) {
            target.bytes = hand.bytes(len);
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
    let (tensor, spent) = tensor_after(rig, &job.kernel, job.tensor.as_ref());
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
    job.targets.iter().map(output).chain(spent).collect()
}

impl<B: Fenced> Bent<B> for EncodeJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let (case, shape) = case_and_shape(hand);
        let mut targets = SmallVec::new();
        for spec in &case.specs {
            let orientation = spec.key.usage.orientations().next();
            let form = hand.pick(&[Form::Compact, Form::Compact, Form::Padded, Form::Swizzled]);
            let mut target = Target::new(*spec, hand.bytes(spec.bytes(shape)));
            if let (Part::BlockScale, Some(orientation)) = (spec.key.part, orientation) {
                target.form = Some((form, orientation));
            }
            match target.layout(shape) {
                Ok(layout) => target.bytes = hand.bytes(layout.bytes()),
                Err(_) => target.form = None,
            }
            if hand.below(6) > 0 {
                targets.push(target);
            }
        }
        let key = StochasticKey {
            seed: hand.word(),
            stream: hand.word(),
            first: hand.pick(&[0, 7, u64::MAX - 5, 1 << 40]),
        };
        let stochastic = case.kernel.element == Code::E2M1 && hand.often();
        EncodeJob {
            shape,
            kernel: case.kernel,
            source: hand.source(shape.elements(), true),
            source_rounding: hand.rounding(),
            tensor: Some(tensor(hand, &case.kernel)),
            targets,
            stochastic: stochastic.then_some(key),
        }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let EncodeJob {
            shape,
            kernel,
            source,
            source_rounding,
            tensor,
            targets,
            stochastic,
        } = self;
        let at = hand.below(targets.len());
        match pick % 12 {
            0 => shape.rows = hand.size(shape.rows),
            1 => shape.cols = hand.size(shape.cols),
            2 | 3 => bend_kernel(kernel, targets, hand),
            4 => {
                let len = hand.length(shape.elements_or_zero());
                *source = hand.source(len, true);
            }
            5 => *source_rounding = hand.rounding(),
            6 => bend_tensor(tensor, hand),
            7 => {
                *stochastic = Some(StochasticKey {
                    seed: 1,
                    stream: u64::MAX,
                    first: u64::MAX,
                });
            }
            8 if !targets.is_empty() => {
                let twice = targets[at].clone();
                targets.push(twice);
            }
            _ => {
                if let Some(target) = targets.get_mut(at) {
                    bend_target(target, hand);
                }
            }
        }
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        if let Some(all) = small(&[self.shape.rows, self.shape.cols]) {
            self.source = hand.source(all, true);
        }
        fit_targets(&mut self.targets, self.shape, hand);
    }

    fn work(self) -> Work<B> {
        Work::Encode(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        encoded(rig, self, &widened(rig, &self.source))
    }
}
