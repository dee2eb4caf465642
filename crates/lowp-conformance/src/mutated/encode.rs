//! Mutated encodes, and what other jobs that quantize mutate in the same way.

use lowp_format::{Extent, Form, FourOverSix, Orientation};

use super::vectors::ElementsOrZero;
use super::*;
use lowp_kernels::StochasticKey;
use lowp_kernels::reference::{RandomBytes, Reference};
use lowp_kernels::testing::is_stochastic;

pub fn encode_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, EncodeJob<B>>(rig);
}

fn rules() -> Vec<ScaleRule> {
    let current = |extent, epsilon| ScaleRule::Current {
        extent,
        pow2: true,
        epsilon,
    };
    let float = |pow2, epsilon| ScaleRule::BlockF32 { pow2, epsilon };
    let two_level = |extent, four_over_six| ScaleRule::TwoLevel {
        extent,
        four_over_six,
    };
    let (tensor, line) = (Extent::Tensor, Extent::Line);
    vec![
        ScaleRule::None,
        ScaleRule::Delayed {
            window: 0,
            algorithm: lowp_format::AmaxAlgorithm::Max,
            margin: 99,
        },
        current(tensor, 0.5),
        current(line, 0.0),
        current(line, f32::INFINITY),
        ScaleRule::E8M0(MxScale::Te),
        ScaleRule::E8M0(MxScale::OcpFloor),
        ScaleRule::TWO_LEVEL,
        two_level(line, FourOverSix::Off),
        two_level(tensor, FourOverSix::Mae),
        two_level(tensor, FourOverSix::Mse448),
        two_level(line, FourOverSix::Mse),
        float(true, 0.5),
        float(false, f32::NAN),
        float(false, -1.0),
    ]
}

/// A case and a shape that it takes.
pub(super) fn case_and_shape<B: Fenced>(choices: &mut Choices<'_, B>) -> (Case, Shape) {
    let case = choices.pick(&cases());
    let case = if choices.coin() { case.padded() } else { case };
    let unit = case.columns();
    let rows = choices.below(70);
    let rows = choices.pick(&[rows, rows, 1, 32, 130]);
    let cols = unit * (1 + choices.below(3));
    (case, Shape::new(rows, choices.pick(&[cols, cols, 0])))
}

/// What is known of a matrix of `shape`: for orientations that share it, the same.
pub(super) fn tensor<B: Fenced>(
    choices: &mut Choices<'_, B>,
    case: &Case,
    shape: Shape,
) -> [Option<TensorInput<B>>; 2] {
    let make = |choices: &mut Choices<'_, B>, orientation: Orientation| {
        let key = case.kernels()[orientation as usize];
        let entries = match key.scale.outer() {
            None => 1,
            Some((extent, _)) => extent.entries(orientation, shape),
        };
        let index = choices.below(3);
        let slot = Slot {
            buffer: choices.amaxes(index + entries.max(1) + 1),
            index,
        };
        Some(match key.scale.waits_for_amax() && choices.coin() {
            true => TensorInput::Observed(slot),
            false => TensorInput::Known(slot),
        })
    };
    let row = make(choices, Orientation::Rowwise);
    let col = match case.shares() {
        true => row.clone(),
        false => make(choices, Orientation::Columnwise),
    };
    [row, col]
}

pub(super) fn mutate_tensor<B: Fenced>(
    inputs: &mut [Option<TensorInput<B>>; 2],
    choices: &mut Choices<'_, B>,
) {
    let side = choices.below(2);
    let Some(now) = inputs[side].clone() else {
        return;
    };
    let slot = Slot {
        buffer: now.slot().buffer.clone(),
        index: choices.size(1),
    };
    inputs[side] = match choices.below(5) {
        0 => None,
        1 => Some(TensorInput::Known(slot)),
        2 => inputs[1 - side].clone(),
        3 => Some(TensorInput::Observed(slot)),
        _ => Some(TensorInput::Observed(now.slot().clone())),
    };
}

/// Mutates the ingredients of one orientation, or of both in the same way.
pub(super) fn mutate_kernels<B: Fenced>(
    kernels: &mut [KernelKey; 2],
    targets: &mut [Target<B>],
    choices: &mut Choices<'_, B>,
) {
    let side = choices.below(2);
    match choices.below(8) {
        0 => kernels.swap(0, 1),
        1 => kernels[side] = kernels[1 - side],
        _ => {
            let usage = Orientation::ALL[side].usage();
            mutate_kernel(&mut kernels[side], usage, targets, choices);
        }
    }
}

/// Mutates the ingredients of the orientation of `usage`.
pub(super) fn mutate_kernel<B: Fenced>(
    kernel: &mut KernelKey,
    usage: Usage,
    targets: &mut [Target<B>],
    choices: &mut Choices<'_, B>,
) {
    let KernelKey {
        element,
        scale,
        block,
        hadamard,
    } = kernel;
    match choices.below(6) {
        0 => *element = choices.pick(&Code::ALL),
        1 => *scale = choices.pick(&rules()),
        2 => *block = choices.pick(&[None, Some([1, 16]), Some([16, 1]), Some([8, 8])]),
        3 => *hadamard = !*hadamard,
        _ => {
            let Some(block) = block else { return };
            let side = choices.below(2);
            block[side] = choices.size(block[side]);
            // Mostly the targets follow, so that such blocks are run, too.
            for spec in targets.iter_mut().map(|target| &mut target.spec) {
                let serves = spec.key.usage.contains(usage);
                if spec.key.part == Part::BlockScale && serves && choices.below(4) > 0 {
                    let [height, width] = *block;
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
        1 => *part = choices.pick(&[Part::Data, Part::BlockScale, Part::DecodeScale, Part::Amax]),
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

/// What an encode knows, as the reference takes it, and the vectors of its observed amaxes after it.
pub(super) fn known_and_consumed<B: Backend>(
    rig: &Rig<B>,
    shape: Shape,
    kernels: &[KernelKey; 2],
    inputs: &[Option<TensorInput<B>>; 2],
) -> (Outer, Vec<Output<B>>) {
    let mut known = Outer::default();
    let mut vectors: Vec<(B::Buffer<f32>, Vec<f32>)> = Vec::new();
    for orientation in Orientation::ALL {
        let key = kernels[orientation as usize];
        let (Some(input), Some((extent, _))) = (&inputs[orientation as usize], key.scale.outer())
        else {
            continue;
        };
        let Slot { buffer, index } = input.slot();
        let count = extent.entries(orientation, shape);
        let entries = match count {
            0 => Vec::new(),
            _ => rig.content::<f32>(buffer)[*index..][..count].to_vec(),
        };
        let TensorInput::Observed(_) = input else {
            known[orientation as usize] = entries;
            continue;
        };
        let span = rig.backend.span::<f32>(buffer);
        let at = vectors
            .iter()
            .position(|(other, _)| rig.backend.span::<f32>(other) == span);
        let at = at.unwrap_or_else(|| {
            vectors.push((buffer.clone(), rig.content::<f32>(buffer)));
            vectors.len() - 1
        });
        let after = &mut vectors[at].1;
        if count > 0 {
            after[*index..][..count]
                .iter_mut()
                .for_each(|x| *x = -x.abs());
        }
        let reference = Reference {
            shape,
            orientation,
            kernel: key,
            values: &[],
            source_rounding: SourceRounding::F32,
            tensor: &[],
            random: None,
        };
        let magnitudes: Vec<f32> = entries.iter().map(|x| x.abs()).collect();
        known[orientation as usize] = reference.encode_scales(&magnitudes);
    }
    let output = |(buffer, entries)| Output::Floats("slots", buffer, entries);
    (known, vectors.into_iter().map(output).collect())
}

/// What an encode of `values` writes.
pub(super) fn encoded<B: Backend>(
    rig: &Rig<B>,
    job: &EncodeJob<B>,
    values: &[f32],
) -> Vec<Output<B>> {
    let (outer, consumed) = known_and_consumed(rig, job.shape, &job.kernels, &job.tensor);
    let random = job.stochastic.map(|key| {
        let stream = key.stream.wrapping_add(scalars().random_step << 32);
        RandomBytes {
            philox: Philox::new(key.seed, stream),
            first: key.first,
        }
    });
    let oracle = Oracle {
        shape: job.shape,
        kernels: job.kernels,
        values,
        source_rounding: job.source_rounding,
        outer,
        random,
    };
    let output = |target: &Target<B>| {
        let expected = oracle.target(target);
        if target.spec.key.part.is_outer() {
            return Output::Scale(target.bytes.clone(), expected);
        }
        Output::Bytes("target", target.bytes.clone(), expected)
    };
    job.targets.iter().map(output).chain(consumed).collect()
}

impl<B: Fenced> Mutate<B> for EncodeJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "shape.rows",
        "shape.cols",
        "kernels",
        "kernels",
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
        for spec in &case.specs() {
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
        let stochastic = case.kernels().iter().all(is_stochastic) && choices.coin();
        EncodeJob {
            shape,
            kernels: case.kernels(),
            source: choices.source(shape.elements(), true),
            source_rounding: choices.rounding(),
            tensor: tensor(choices, &case, shape),
            targets,
            stochastic: stochastic.then_some(key),
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let EncodeJob {
            shape,
            kernels,
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
            "kernels" => mutate_kernels(kernels, targets, choices),
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
        encoded(rig, self, &rig.widened(&self.source))
    }
}
