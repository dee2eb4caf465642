//! Mutated decodes.

use super::encode::{case_and_shape, mutate_kernel, mutate_target, resize_targets};
use super::vectors::ElementsOrZero;
use super::*;
use lowp_kernels::DecodeJob;

pub fn decode_jobs<B: Fenced>(rig: &Rig<B>) {
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
        let orientation = choices.pick(&Orientation::ALL);
        let specs = case.specs();
        let spec = |part| {
            specs
                .iter()
                .find(|s| s.key.serves(orientation, part))
                .copied()
        };
        let mut target = |spec: BufferSpec| Target::new(spec, choices.bytes(spec.bytes(shape)));
        let (data, scale) = (spec(Part::Data).unwrap(), spec(Part::BlockScale));
        let (data, block_scale) = (target(data), scale.map(target));
        let kernel = case.kernels()[orientation as usize];
        let outer = kernel.scale.outer().and_then(|(_, part)| spec(part));
        let bytes = outer.map_or(4, |spec| spec.bytes(shape));
        DecodeJob {
            shape,
            kernel,
            data,
            block_scale,
            tensor_scale: Some(choices.bytes(bytes)),
            out: choices.source(shape.elements(), false),
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
            "kernel" => {
                let usage = data.spec.key.usage;
                mutate_kernel(kernel, usage, block_scale.as_mut_slice(), choices);
            }
            "data" => mutate_target(data, choices),
            "block_scale" => {
                if let Some(target) = block_scale {
                    mutate_target(target, choices);
                }
            }
            "block_scale = None" => *block_scale = None,
            "tensor_scale" => {
                let now = tensor_scale
                    .as_ref()
                    .map_or(4, |b| choices.rig.backend.len::<u8>(b));
                let len = choices.length(now);
                *tensor_scale = Some(choices.bytes(len));
            }
            "tensor_scale = None" => *tensor_scale = None,
            _ => {
                let len = choices.length(shape.elements_or_zero());
                *out = choices.source(len, false);
            }
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        resize_targets(std::slice::from_mut(&mut self.data), self.shape, choices);
        resize_targets(self.block_scale.as_mut_slice(), self.shape, choices);
        let usage = self.data.spec.key.usage;
        let orientation = usage.orientations().next().unwrap_or(Orientation::Rowwise);
        let bytes = match self.kernel.scale.outer() {
            Some((Extent::Line, _)) => small(&[Axis::outer(orientation).len(self.shape), 4]),
            _ => Some(4),
        };
        if let Some(bytes) = bytes {
            self.tensor_scale = Some(choices.bytes(bytes));
        }
        if let Some(all) = small(&[self.shape.rows, self.shape.cols]) {
            self.out = choices.source(all, false);
        }
    }

    fn work(self) -> Work<B> {
        Work::Decode(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let values = crate::decode::expected(rig, self);
        vec![Output::of("values", &self.out, values)]
    }
}
