//! Bent decodes.

use super::encode::{bend_kernel, bend_target, case_and_shape, fit_targets};
use super::vectors::ElementsOrZero;
use super::*;
use crate::DecodeJob;
use crate::reference;

pub(in crate::conformance) fn decode_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, DecodeJob<B>>(rig);
}

impl<B: Fenced> Bent<B> for DecodeJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let (case, shape) = case_and_shape(hand);
        let data: Vec<_> = case
            .specs
            .iter()
            .filter(|s| s.key.part == Part::Data)
            .collect();
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
