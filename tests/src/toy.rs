//! A recipe that `lowp-format` does not know: FP8 with one f32 scale per 1x128, made of known
//! kernel ingredients. That it runs through plan, quantize, shard, gather and optimizer shows that
//! nothing outside the recipe folder depends on the list of recipes.

use lowp_format::{
    Axis, BufferList, BufferSpec, Code, KernelKey, Orientation, Origin, PaddedForm, Recipe,
    ScaleRule, ScaleSource, Usage,
};

/// E4M3 with power-of-two f32 scales over 1x128 (rowwise) and 128x1 (columnwise) blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ToyBlockFp8;

/// Block rows x columns, rowwise and columnwise.
const BLOCKS: [[usize; 2]; 2] = [[1, 128], [128, 1]];

impl Recipe for ToyBlockFp8 {
    fn name(&self) -> &'static str {
        "toy-block-fp8"
    }

    fn kernel(&self) -> KernelKey {
        KernelKey {
            element: Code::E4M3,
            scale: ScaleRule::BlockF32 {
                pow2: true,
                epsilon: 0.0,
            },
            blocks: Some(BLOCKS),
        }
    }

    fn scale_source(&self) -> ScaleSource {
        ScaleSource::BlockAmax
    }

    fn buffers(&self, usage: Usage) -> BufferList {
        let pad = PaddedForm {
            outer: 4,
            block: 1,
            repeat: false,
        };
        // Data columnwise is transposed; scales lie with the block axis outside in both.
        let data_axes = [[Axis::Rows, Axis::Cols], [Axis::Cols, Axis::Rows]];
        let scale_axes = [[Axis::Cols, Axis::Rows], [Axis::Rows, Axis::Cols]];
        let mut buffers = BufferList::new();
        for o in Orientation::ALL {
            let (serves, i) = (o.usage(), o as usize);
            if usage.contains(serves) {
                let (code, origin) = (Code::F32, Origin::Quantized);
                buffers.push(BufferSpec::data(serves, Code::E4M3, data_axes[i], origin));
                let scale =
                    BufferSpec::block_scale(serves, code, scale_axes[i], BLOCKS[i], pad, origin);
                buffers.push(scale);
            }
        }
        buffers
    }
}
