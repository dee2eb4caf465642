//! Mutated flat encodes.

use super::encode::{
    case_and_shape, known_and_consumed, mutate_kernels, mutate_target, mutate_tensor,
    resize_targets, tensor,
};
use super::*;
use crate::flat::{blocks_of, flat_specs, flat_usage};
use lowp_kernels::reference::BlockAmaxes;
use lowp_kernels::{BlockAmax, FlatBlocks, FlatEncodeJob};

pub fn flat_encode_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, FlatEncodeJob<B>>(rig);
}

/// Bytes that elements `start..start + len` touch; 0 where that cannot be computed.
fn touched(code: Code, start: usize, len: usize) -> usize {
    let Some(end) = small(&[start]).and_then(|s| small(&[s + len.min(SMALL)])) else {
        return 0;
    };
    (end * code.bits()).div_ceil(8) - start * code.bits() / 8
}

impl<B: Fenced> Mutate<B> for FlatEncodeJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "shape.rows",
        "shape.cols",
        "start",
        "len",
        "kernels",
        "source",
        "source_rounding",
        "tensor",
        "blocks = None",
        "blocks[i]",
        "blocks[i]",
        "blocks[i]",
        "targets[i]",
        "targets[i]",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let (case, shape) = loop {
            let (case, shape) = case_and_shape(choices);
            if !flat_usage(&case).is_empty() {
                break (case, shape);
            }
        };
        let all = shape.elements();
        let start = choices.below(all);
        let len = choices.below(all - start + 1);
        let (start, len) = choices.pick(&[(0, all), (start, len)]);
        let mut targets = Vec::new();
        for spec in &flat_specs(&case) {
            let needed = match spec.key.part {
                Part::Data => touched(spec.code, start, len),
                _ => spec.bytes(shape),
            };
            targets.push(Target::new(*spec, choices.bytes(needed)));
        }
        let (blocks, at) = blocks_of(&case, shape, flat_usage(&case));
        // An amax is never NaN.
        let amaxes = choices.amaxes(at + 1);
        let magnitudes = choices.rig.content::<f32>(&amaxes);
        let magnitudes = magnitudes.iter().map(|x| if x.is_nan() { 2.0 } else { *x });
        let amaxes = choices.buffer(&magnitudes.collect::<Vec<_>>());
        FlatEncodeJob {
            shape,
            start,
            len,
            kernels: case.kernels(),
            source: choices.source(len, true),
            source_rounding: choices.rounding(),
            tensor: tensor(choices, &case, shape),
            blocks: Some(FlatBlocks { amaxes, blocks }),
            targets,
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let FlatEncodeJob {
            shape,
            start,
            len,
            kernels,
            source,
            source_rounding,
            tensor,
            blocks,
            targets,
        } = self;
        let at = choices.below(targets.len());
        match field {
            "shape.rows" => shape.rows = choices.size(shape.rows),
            "shape.cols" => shape.cols = choices.size(shape.cols),
            "start" => *start = choices.size(*start),
            "len" => *len = choices.size(*len),
            "kernels" => mutate_kernels(kernels, targets, choices),
            "source" => {
                let count = choices.length((*len).min(SMALL));
                *source = choices.source(count, true);
            }
            "source_rounding" => *source_rounding = choices.rounding(),
            "tensor" => mutate_tensor(tensor, choices),
            "blocks = None" => *blocks = None,
            "blocks[i]" => {
                let Some(flat) = blocks else { return };
                let part = choices.below(flat.blocks.len());
                let (side, what) = (choices.below(2), choices.below(4));
                let Some(part) = flat.blocks.get_mut(part) else {
                    return;
                };
                match what {
                    0 => part.start = choices.size(part.start),
                    1 => part.block[side] = choices.size(part.block[side]),
                    // A part that no target reads, of few or of many blocks.
                    2 => flat.blocks.push(BlockAmax {
                        block: [4096, 4096],
                        start: 0,
                    }),
                    _ => {
                        let block = choices.pick(&[[1, 16], [3, 5], part.block]);
                        let start = choices.size(part.start);
                        flat.blocks.push(BlockAmax { block, start });
                    }
                }
            }
            _ => {
                if let Some(target) = targets.get_mut(at) {
                    mutate_target(target, choices);
                }
            }
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        if let Some(len) = small(&[self.len]) {
            self.source = choices.source(len, true);
        }
        resize_targets(&mut self.targets, self.shape, choices);
        for target in &mut self.targets {
            if target.spec.key.part == Part::Data {
                let len = touched(target.spec.code, self.start, self.len);
                target.bytes = choices.bytes(len);
            }
        }
    }

    fn work(self) -> Work<B> {
        Work::FlatEncode(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let (outer, mut outputs) = known_and_consumed(rig, self.shape, &self.kernels, &self.tensor);
        let oracle = Oracle {
            shape: self.shape,
            kernels: self.kernels,
            values: &rig.widened(&self.source),
            source_rounding: self.source_rounding,
            outer,
            random: None,
        };
        let entries = |block: [usize; 2]| {
            self.shape.rows.div_ceil(block[0]) * self.shape.cols.div_ceil(block[1])
        };
        let amaxes = self
            .blocks
            .as_ref()
            .map(|flat| rig.content::<f32>(&flat.amaxes));
        for target in &self.targets {
            let spec = &target.spec;
            let mut bytes = rig.content::<u8>(&target.bytes);
            let orientation = match spec.key.usage {
                Usage::COLUMNWISE => Orientation::Columnwise,
                _ => Orientation::Rowwise,
            };
            let block = self.kernels[orientation as usize].block;
            let agreed = block.zip(self.blocks.as_ref()).and_then(|(block, flat)| {
                let part = flat.blocks.iter().find(|part| part.block == block)?;
                let all = amaxes.as_ref()?;
                Some(BlockAmaxes {
                    block,
                    amaxes: &all[part.start..part.start + entries(block)],
                })
            });
            oracle
                .of(orientation)
                .flat_encode(spec, self.start, agreed, &mut bytes)
                .unwrap();
            outputs.push(match spec.key.part {
                Part::DecodeScale | Part::Amax => Output::Scale(target.bytes.clone(), bytes),
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
