//! Bent flat encodes.

use super::encode::{bend_kernel, bend_target, bend_tensor, case_and_shape, fit_targets};
use super::encode::{tensor, tensor_after};
use super::*;
use crate::reference::Reference;
use crate::{BlockAmax, FlatBlocks, FlatEncodeJob};

pub(in crate::conformance) fn flat_encode_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, FlatEncodeJob<B>>(rig);
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
        let amaxes = self
            .blocks
            .as_ref()
            .map(|flat| rig.content::<f32>(&flat.amaxes));
        for target in &self.targets {
            let spec = &target.spec;
            let mut bytes = rig.content::<u8>(&target.bytes);
            let block = spec
                .key
                .usage
                .orientations()
                .find_map(|o| self.kernel.block(o));
            let agreed = block.zip(self.blocks.as_ref()).and_then(|(block, flat)| {
                let part = flat.blocks.iter().find(|part| part.block == block)?;
                let all = amaxes.as_ref()?;
                Some((block, &all[part.start..part.start + entries(block)]))
            });
            reference
                .flat_encode(spec, self.start, agreed, &mut bytes)
                .unwrap();
            outputs.push(match spec.key.part {
                Part::DecodeScale | Part::TensorAmax => Output::Scale(target.bytes.clone(), bytes),
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
