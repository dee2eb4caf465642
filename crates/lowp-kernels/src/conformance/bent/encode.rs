//! Bent jobs that quantize: encodes, flat encodes, decodes, and AdamW with its encode.

use lowp_format::{Form, Orientation};

use super::vectors::{ElementsOrZero, raised};
use super::*;
use crate::conformance::observed::made;
use crate::reference::{self, Reference, in_form};
use crate::{
    AdamMode, AdamwJob, BlockAmax, DecodeJob, FlatBlocks, FlatEncodeJob, Moments, StochasticKey,
};

pub(in crate::conformance) fn encode_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, EncodeJob<B>>(rig);
}

pub(in crate::conformance) fn flat_encode_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, FlatEncodeJob<B>>(rig);
}

pub(in crate::conformance) fn decode_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, DecodeJob<B>>(rig);
}

pub(in crate::conformance) fn adamw_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, AdamwJob<B>>(rig);
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
fn case_and_shape<B: Fenced>(hand: &mut Hand<'_, B>) -> (Case, Shape) {
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

fn tensor<B: Fenced>(hand: &mut Hand<'_, B>, kernel: &KernelKey) -> TensorInput<B> {
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

fn bend_tensor<B: Fenced>(input: &mut Option<TensorInput<B>>, hand: &mut Hand<'_, B>) {
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

fn bend_kernel<B: Fenced>(
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

fn bend_target<B: Fenced>(target: &mut Target<B>, hand: &mut Hand<'_, B>) {
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
            let all = [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH, odd[0], odd[1]];
            *usage = hand.pick(&all);
        }
        1 => *part = hand.pick(&[Part::Data, Part::BlockScale, Part::TensorScale]),
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
fn fit_targets<B: Fenced>(targets: &mut [Target<B>], shape: Shape, hand: &mut Hand<'_, B>) {
    for target in targets {
        if let Some(len) = target.layout(shape).ok().and_then(|l| small(&[l.bytes()])) {
            target.bytes = hand.bytes(len);
        }
    }
}

/// A slot's entry before the run, and the content of its vector after it.
fn tensor_after<B: Backend>(
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
fn encoded<B: Backend>(rig: &Rig<B>, job: &EncodeJob<B>, values: &[f32]) -> Vec<Output<B>> {
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
        if target.spec.key.part == Part::TensorScale {
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

/// Bytes that elements `start..start + len` touch; 0 where that cannot be computed.
fn touched(code: Code, start: usize, len: usize) -> usize {
    let Some(end) = small(&[start]).and_then(|s| small(&[s + len.min(SMALL)])) else {
        return 0;
    };
    (end * code.bits()).div_ceil(8) - start * code.bits() / 8
}

impl<B: Fenced> Bent<B> for FlatEncodeJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let (case, shape) = case_and_shape(hand);
        let all = shape.elements();
        let start = hand.below(all);
        let len = hand.below(all - start + 1);
        let (start, len) = hand.pick(&[(0, all), (start, len)]);
        let mut targets = SmallVec::new();
        for spec in &case.specs {
            let needed = match spec.key.part {
                Part::Data if spec.axes != ROW_MAJOR => continue,
                Part::Data => touched(spec.code, start, len),
                _ => spec.bytes(shape),
            };
            targets.push(Target::new(*spec, hand.bytes(needed)));
        }
        let mut at = 1;
        let mut blocks: SmallVec<[BlockAmax; 2]> = SmallVec::new();
        for block in case.kernel.blocks.into_iter().flatten() {
            if blocks.iter().all(|part| part.block != block) {
                blocks.push(BlockAmax { block, start: at });
                at += shape.rows.div_ceil(block[0]) * shape.cols.div_ceil(block[1]);
            }
        }
        // An amax is never NaN.
        let amaxes = hand.amaxes(at + 1);
        let magnitudes = hand.rig.content::<f32>(&amaxes);
        let magnitudes = magnitudes.iter().map(|x| if x.is_nan() { 2.0 } else { *x });
        let amaxes = hand.buffer(&magnitudes.collect::<Vec<_>>());
        FlatEncodeJob {
            shape,
            start,
            len,
            kernel: case.kernel,
            source: hand.source(len, true),
            source_rounding: hand.rounding(),
            tensor: Some(tensor(hand, &case.kernel)),
            blocks: Some(FlatBlocks { amaxes, blocks }),
            targets,
        }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let FlatEncodeJob {
            shape,
            start,
            len,
            kernel,
            source,
            source_rounding,
            tensor,
            blocks,
            targets,
        } = self;
        let at = hand.below(targets.len());
        match pick % 14 {
            0 => shape.rows = hand.size(shape.rows),
            1 => shape.cols = hand.size(shape.cols),
            2 => *start = hand.size(*start),
            3 => *len = hand.size(*len),
            4 => bend_kernel(kernel, targets, hand),
            5 => {
                let count = hand.length((*len).min(SMALL));
                *source = hand.source(count, true);
            }
            6 => *source_rounding = hand.rounding(),
            7 => bend_tensor(tensor, hand),
            8 => *blocks = None,
            9..12 => {
                let Some(flat) = blocks else { return };
                let part = hand.below(flat.blocks.len());
                let (side, what) = (hand.below(2), hand.below(4));
                let Some(part) = flat.blocks.get_mut(part) else {
                    return;
                };
                match what {
                    0 => part.start = hand.size(part.start),
                    1 => part.block[side] = hand.size(part.block[side]),
                    // A part that no target reads, of few or of many blocks.
                    2 => flat.blocks.push(BlockAmax {
                        block: [4096, 4096],
                        start: 0,
                    }),
                    _ => {
                        let block = hand.pick(&[[1, 16], [3, 5], part.block]);
                        let start = hand.size(part.start);
                        flat.blocks.push(BlockAmax { block, start });
                    }
                }
            }
            _ => {
                if let Some(target) = targets.get_mut(at) {
                    bend_target(target, hand);
                }
            }
        }
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        if let Some(len) = small(&[self.len]) {
            self.source = hand.source(len, true);
        }
        fit_targets(&mut self.targets, self.shape, hand);
        for target in &mut self.targets {
            if target.spec.key.part == Part::Data {
                let len = touched(target.spec.code, self.start, self.len);
                target.bytes = hand.bytes(len);
            }
        }
    }

    fn work(self) -> Work<B> {
        Work::FlatEncode(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let (tensor, spent) = tensor_after(rig, &self.kernel, self.tensor.as_ref());
        let mut outputs: Vec<Output<B>> = spent.into_iter().collect();
        let reference = Reference {
            shape: self.shape,
            kernel: self.kernel,
            values: &widened(rig, &self.source),
            source_rounding: self.source_rounding,
            tensor,
            random: None,
        };
        let entries = |block: [usize; 2]| {
            self.shape.rows.div_ceil(block[0]) * self.shape.cols.div_ceil(block[1])
        };
        let amaxes = self.blocks.as_ref().map(|flat| rig.content::<f32>(&flat.amaxes));
        for target in &self.targets {
            let spec = &target.spec;
            let mut bytes = rig.content::<u8>(&target.bytes);
            let block = spec.key.usage.orientations().find_map(|o| self.kernel.block(o));
            let agreed = block.zip(self.blocks.as_ref()).and_then(|(block, flat)| {
                let part = flat.blocks.iter().find(|part| part.block == block)?;
                let all = amaxes.as_ref()?;
                Some((block, &all[part.start..part.start + entries(block)]))
            });
            reference
                .flat_encode(spec, self.start, agreed, &mut bytes)
                .unwrap();
            outputs.push(match spec.key.part {
                Part::TensorScale => Output::Scale(target.bytes.clone(), bytes),
                _ => Output::Bytes("target", target.bytes.clone(), bytes),
            });
        }
        if let Some((flat, mut after)) = self.blocks.as_ref().zip(amaxes) {
            for part in &flat.blocks {
                for entry in &mut after[part.start..part.start + entries(part.block)] {
                    *entry = -entry.abs();
                }
            }
            outputs.push(Output::Floats("agreed amaxes", flat.amaxes.clone(), after));
        }
        outputs
    }
}

impl<B: Fenced> Bent<B> for DecodeJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let (case, shape) = case_and_shape(hand);
        let data: Vec<_> = case.specs.iter().filter(|s| s.key.part == Part::Data).collect();
        let data = **hand.pick(&data.iter().collect::<Vec<_>>());
        let scale = |s: &&BufferSpec| s.key == key(data.key.usage, Part::BlockScale);
        let scale = case.specs.iter().find(scale).copied();
        let mut target = |spec: BufferSpec| Target::new(spec, hand.bytes(spec.bytes(shape)));
        DecodeJob {
            shape,
            kernel: case.kernel,
            data: target(data),
            block_scale: scale.map(target),
            tensor_scale: Some(hand.bytes(4)),
            out: hand.floats(shape.elements(), false),
        }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let DecodeJob {
            shape,
            kernel,
            data,
            block_scale,
            tensor_scale,
            out,
        } = self;
        match pick % 10 {
            0 => shape.rows = hand.size(shape.rows),
            1 => shape.cols = hand.size(shape.cols),
            2 | 3 => bend_kernel(kernel, block_scale.as_mut_slice(), hand),
            4 => bend_target(data, hand),
            5 => {
                if let Some(target) = block_scale {
                    bend_target(target, hand);
                }
            }
            6 => *block_scale = None,
            7 => {
                let len = hand.length(4);
                *tensor_scale = Some(hand.bytes(len));
            }
            8 => *tensor_scale = None,
            _ => {
                let len = hand.length(shape.elements_or_zero());
                *out = hand.floats(len, false);
            }
        }
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        fit_targets(std::slice::from_mut(&mut self.data), self.shape, hand);
        fit_targets(self.block_scale.as_mut_slice(), self.shape, hand);
        if let Some(all) = small(&[self.shape.rows, self.shape.cols]) {
            self.out = hand.floats(all, false);
        }
    }

    fn work(self) -> Work<B> {
        Work::Decode(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let content = |target: &Target<B>| rig.content::<u8>(&target.bytes);
        let scales = self.block_scale.as_ref().map(|t| (&t.spec, content(t)));
        let tensor = self.tensor_scale.as_ref().map_or(1.0, |bytes| {
            f32::from_le_bytes(rig.content::<u8>(bytes).try_into().unwrap())
        });
        let values = reference::decode(
            self.shape,
            &self.kernel,
            (&self.data.spec, &content(&self.data)),
            scales.as_ref().map(|(spec, bytes)| (*spec, &bytes[..])),
            tensor,
        );
        vec![Output::Floats("values", self.out.clone(), values)]
    }
}

/// Moments of `len` values; squares are not negative.
fn moments<B: Fenced>(hand: &mut Hand<'_, B>, len: usize) -> Moments<B> {
    let seed = hand.word();
    let first = values(len, seed, false);
    let second: Vec<f32> = first.iter().rev().map(|x| x * x).collect();
    if hand.often() {
        let exp_avg = hand.buffer(&first);
        let exp_avg_sq = hand.buffer(&second);
        return Moments::F32 {
            exp_avg,
            exp_avg_sq,
        };
    }
    let [first, second] =
        [first, second].map(|v| v.into_iter().map(bf16::from_f32).collect::<Vec<_>>());
    Moments::Bf16 {
        exp_avg: hand.buffer(&first),
        exp_avg_sq: hand.buffer(&second),
    }
}

impl<B: Fenced> Bent<B> for AdamwJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let mut encode = EncodeJob::good(hand);
        let fused = hand.often();
        let len = if fused {
            encode.shape.elements()
        } else {
            hand.below(3000)
        };
        let master = hand.floats(len, false);
        encode.source = Source::F32(master.clone());
        encode.tensor = encode.tensor.map(|t| TensorInput::Known(t.slot().clone()));
        let amax = Slot {
            buffer: hand.amaxes(3),
            index: hand.below(3),
        };
        of_one_row(AdamwJob {
            master,
            moments: moments(hand, len),
            grad: hand.source(len, false),
            group: hand.below(2),
            mode: hand.pick(&[AdamMode::AdamW, AdamMode::L2]),
            source_rounding: encode.source_rounding,
            amax: hand.pick(&[None, Some(amax)]),
            encode: fused.then(|| Box::new(encode)),
        })
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let AdamwJob {
            master,
            moments: both,
            grad,
            group,
            mode,
            source_rounding,
            amax,
            encode,
        } = self;
        let len = hand.rig.backend.len::<f32>(master);
        match pick % 12 {
            0 => {
                let len = hand.length(len);
                *master = hand.floats(len, false);
            }
            1 => {
                let len = hand.length(len);
                *both = moments(hand, len);
            }
            2 => {
                let len = hand.length(len);
                *grad = hand.source(len, false);
            }
            3 => *group = hand.size(*group),
            4 => *mode = hand.pick(&[AdamMode::AdamW, AdamMode::L2]),
            5 => *source_rounding = hand.rounding(),
            6 => {
                let buffer = hand.amaxes(3);
                let index = hand.size(1);
                *amax = Some(Slot { buffer, index });
            }
            7 => {
                let buffer = master.clone();
                *amax = Some(Slot { buffer, index: 0 });
            }
            8 => *encode = None,
            _ => {
                if let Some(encode) = encode {
                    let (pick, source) = (hand.below(12), encode.source.clone());
                    encode.bend(pick, hand);
                    if hand.below(4) > 0 {
                        encode.source = source;
                    }
                }
            }
        }
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        let now = hand.rig.backend.len::<f32>(&self.master);
        let len = match &self.encode {
            None => now,
            Some(encode) => small(&[encode.shape.rows, encode.shape.cols]).unwrap_or(now),
        };
        self.master = hand.floats(len, false);
        self.moments = moments(hand, len);
        self.grad = hand.source(len, false);
        if let Some(encode) = &mut self.encode {
            fit_targets(&mut encode.targets, encode.shape, hand);
            encode.source = Source::F32(self.master.clone());
            encode.source_rounding = self.source_rounding;
        }
    }

    fn work(self) -> Work<B> {
        Work::Adamw(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let scalars = scalars();
        let (group, scale) = (&scalars.adam[self.group], scalars.grad_scale);
        let mut master = rig.content::<f32>(&self.master);
        let grads = widened(rig, &self.grad);
        let wide = |b: &B::Buffer<bf16>| -> Vec<f32> {
            rig.content::<bf16>(b).iter().map(|x| x.to_f32()).collect()
        };
        let (mut m, mut v) = match &self.moments {
            Moments::F32 {
                exp_avg,
                exp_avg_sq,
            } => (rig.content::<f32>(exp_avg), rig.content::<f32>(exp_avg_sq)),
            Moments::Bf16 {
                exp_avg,
                exp_avg_sq,
            } => (wide(exp_avg), wide(exp_avg_sq)),
        };
        for (i, g) in grads.iter().enumerate() {
            let state = [master[i], m[i], v[i]];
            [master[i], m[i], v[i]] = reference::adamw(state, g * scale, self.mode, group);
        }
        let narrow = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        let mut outputs = match &self.moments {
            Moments::F32 {
                exp_avg,
                exp_avg_sq,
            } => vec![
                Output::Floats("exp_avg", exp_avg.clone(), m),
                Output::Floats("exp_avg_sq", exp_avg_sq.clone(), v),
            ],
            Moments::Bf16 {
                exp_avg,
                exp_avg_sq,
            } => vec![
                Output::Halves(exp_avg.clone(), narrow(&m)),
                Output::Halves(exp_avg_sq.clone(), narrow(&v)),
            ],
        };
        if let Some(Slot { buffer, index }) = &self.amax {
            let mut entries = rig.content::<f32>(buffer);
            if !master.is_empty() {
                let rounded = master.iter().map(|&x| self.source_rounding.apply(x));
                entries[*index] = raised(entries[*index], reference::amax(rounded));
            }
            outputs.push(Output::Floats("amax", buffer.clone(), entries));
        }
        if let Some(encode) = &self.encode {
            outputs.extend(encoded(rig, encode, &master));
        }
        outputs.push(Output::Floats("master", self.master.clone(), master));
        outputs
    }

    fn group(&self) -> usize {
        self.group
    }
}

/// A job whose fused encode has one target of each part and order, as every backend takes it.
fn of_one_row<B: Fenced>(mut job: AdamwJob<B>) -> AdamwJob<B> {
    if let Some(encode) = &mut job.encode {
        let mut seen = Vec::new();
        encode.targets.retain(|target| {
            let name = (target.spec.key.part, target.spec.axes);
            let first = !seen.contains(&name);
            seen.push(name);
            first
        });
    }
    job
}
