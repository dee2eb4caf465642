//! A recipe whose derived buffer is no transpose of its source is rejected before anything is
//! gathered.

use crate::common::{Comm, failing, ranks};
use lowp_format::{
    Axis, BufferKey, BufferList, BufferSpec, Code, KernelKey, Origin, PaddedForm, Part, Quantizer,
    Quantizers, Recipe, Role, ScaleRule, Shape, Usage,
};
use lowp_kernels::Cpu;
use lowp_shard::{GatherGroup, GatherPool, ShardError, ShardSpec, ShardedTensor};

/// Rowwise E4M3, and a columnwise buffer that says it is the transpose.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Derived {
    code: Code,
    axes: [Axis; 2],
    /// Elements per entry of the columnwise buffer.
    block: [usize; 2],
}

const TRANSPOSE: Derived = Derived {
    code: Code::E4M3,
    axes: [Axis::Cols, Axis::Rows],
    block: [1, 1],
};

impl Recipe for Derived {
    fn name(&self) -> &'static str {
        "derived"
    }

    fn quantizers(&self, _: Role) -> Quantizers {
        let kernel = KernelKey::new(Code::E4M3, ScaleRule::None);
        Quantizers::transposed(Quantizer::row_major(kernel))
    }

    fn buffers(&self, usage: Usage) -> BufferList {
        let mut buffers = BufferList::new();
        let axes = [Axis::Rows, Axis::Cols];
        if usage.contains(Usage::ROWWISE) {
            let origin = Origin::Quantized;
            buffers.push(BufferSpec::data(Usage::ROWWISE, Code::E4M3, axes, origin));
        }
        if usage.contains(Usage::COLUMNWISE) {
            let origin = Origin::TransposeOf(BufferKey::new(Usage::ROWWISE, Part::Data));
            let pad = PaddedForm::NONE;
            let entries = BufferSpec::block_scale(
                Usage::COLUMNWISE,
                self.code,
                self.axes,
                self.block,
                pad,
                origin,
            );
            let key = BufferKey::new(Usage::COLUMNWISE, Part::Data);
            buffers.push(BufferSpec { key, ..entries });
        }
        buffers
    }
}

fn plan(recipe: Derived, comm: &Comm) -> Result<(), ShardError> {
    let spec = ShardSpec::new(&recipe, Shape::new(8, 8), comm.world_size(), comm.rank())?;
    let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
    let pool = GatherPool::new(&Cpu);
    GatherGroup::new(&Cpu, comm.clone(), &pool, vec![shard], true).map(drop)
}

#[test]
fn what_is_no_transpose_is_rejected_with_the_reason() {
    ranks(2, |_, comm| plan(TRANSPOSE, &comm));
    for (recipe, why) in [
        (
            Derived {
                code: Code::E5M2,
                ..TRANSPOSE
            },
            "encoded differently",
        ),
        (
            Derived {
                axes: [Axis::Rows, Axis::Cols],
                ..TRANSPOSE
            },
            "follow the same axes",
        ),
        (
            Derived {
                block: [1, 2],
                ..TRANSPOSE
            },
            "not exchanged",
        ),
    ] {
        let failed = failing(2, |_, comm| plan(recipe, &comm));
        let text = failed.cause.to_string();
        assert!(text.contains(why) && text.contains("derived"), "{text}");
    }
}
