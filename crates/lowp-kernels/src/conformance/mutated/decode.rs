//! Mutated decodes.

use super::encode::{case_and_shape, mutate_kernel, mutate_target, resize_targets};
use super::vectors::ElementsOrZero;
use super::*;
use crate::DecodeJob;
use crate::reference;

pub(in crate::conformance) fn decode_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, DecodeJob<B>>(rig);
}

impl<B: Fenced> Mutate<B> for DecodeJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "shape.rows",
        "shape.cols",
        "kernel",
        "kernel",
        "data",
        "block_scale",
        "block_scale = None",
        "tensor_scale",
        "tensor_scale = None",
        "out",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let (case, shape) = case_and_shape(choices);
        let data: Vec<_> = case
            .specs
            .iter()
            .filter(|s| s.key.part == Part::Data)
            .collect();
        let data = **choices.pick(&data.iter().collect::<Vec<_>>());
        let scale = |s: &&BufferSpec| s.key == key(data.key.usage, Part::BlockScale);
        let scale = case.specs.iter().find(scale).copied();
        let mut target = |spec: BufferSpec| Target::new(spec, choices.bytes(spec.bytes(shape)));
        DecodeJob {
            shape,
            kernel: case.kernel,
            data: target(data),
            block_scale: scale.map(target),
            tensor_scale: Some(choices.bytes(4)),
            out: choices.floats(shape.elements(), false),
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let DecodeJob {
            shape,
            kernel,
            data,
            block_scale,
            tensor_scale,
            out,
        } = self;
        match field {
            "shape.rows" => shape.rows = choices.size(shape.rows),
            "shape.cols" => shape.cols = choices.size(shape.cols),
            "kernel" => mutate_kernel(kernel, block_scale.as_mut_slice(), choices),
            "data" => mutate_target(data, choices),
            "block_scale" => {
                if let Some(target) = block_scale {
                    mutate_target(target, choices);
                }
            }
            "block_scale = None" => *block_scale = None,
            "tensor_scale" => {
                let len = choices.length(4);
                *tensor_scale = Some(choices.bytes(len));
            }
            "tensor_scale = None" => *tensor_scale = None,
            _ => {
                let len = choices.length(shape.elements_or_zero());
                *out = choices.floats(len, false);
            }
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        resize_targets(std::slice::from_mut(&mut self.data), self.shape, choices);
        resize_targets(self.block_scale.as_mut_slice(), self.shape, choices);
        if let Some(all) = small(&[self.shape.rows, self.shape.cols]) {
            self.out = choices.floats(all, false);
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
