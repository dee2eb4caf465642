//! [`Recipe`]: the answers from which everything else follows.

use enum_dispatch::enum_dispatch;

use super::{Operand, RecipeOptions, Role, Rounding};
use crate::buffer::{col_quantum, row_quantum};
use crate::{
    BufferList, FormatError, KernelKey, Orientation, Quantizers, Shape, SourceRounding, Usage,
    gather,
};

/// A low-precision format: the answers from which layouts, casts and gathers follow. Implementations
/// are `Copy` values without state, and equal ones quantize alike; amax histories and scales belong to the training loop.
#[enum_dispatch]
pub trait Recipe: Copy + PartialEq + std::fmt::Debug + Send + Sync + 'static {
    /// The name in options, tables and file metadata.
    fn name(&self) -> &'static str;

    /// How a tensor in `role` is quantized while weights live in this recipe.
    fn quantizers(&self, role: Role) -> Quantizers;

    /// How a source value is rounded before it is quantized.
    fn source_rounding(&self) -> SourceRounding {
        SourceRounding::F32
    }

    /// How values of a tensor in `role` are rounded to codes.
    fn rounding(&self, role: Role) -> Rounding {
        let _ = role;
        Rounding::Nearest
    }

    /// The options that make this value again; together with the name it is the file metadata.
    fn options(&self) -> RecipeOptions {
        RecipeOptions::default()
    }

    /// The ingredients of `orientation` of a weight.
    fn kernel(&self, orientation: Orientation) -> KernelKey {
        self.quantizers(Role::Weight).of(orientation).kernel
    }

    /// The buffers of a weight that serves `usage`, in a fixed order.
    fn buffers(&self, usage: Usage) -> BufferList {
        self.quantizers(Role::Weight).buffers(usage)
    }

    /// How the operand of a GEMM is quantized while a weight lives in this recipe.
    fn operand(&self, role: Role) -> Operand {
        Operand {
            quantizers: self.quantizers(role),
            source_rounding: self.source_rounding(),
            rounding: self.rounding(role),
            quantized: Usage::BOTH,
        }
    }

    /// The multiple at which the rows of shards that serve `usage` are cut.
    fn row_quantum(&self, usage: Usage) -> usize {
        row_quantum(&self.stored(usage))
    }

    /// The buffers that a rank stores of its shard so that `usage` can be gathered.
    fn stored(&self, usage: Usage) -> BufferList {
        gather::stored(self, usage)
    }

    /// The buffers that a rank stores of a shard whose rows may begin and end within blocks: codes in the order of rows, and every scale of the whole
    /// tensor.
    fn stored_cut_anywhere(&self, usage: Usage) -> BufferList {
        gather::stored_cut_anywhere(self, usage)
    }

    /// Whether a tensor may have this shape.
    ///
    /// # Errors
    /// Columns that are not a multiple of the block length, or an odd number of columns of a 4-bit code.
    fn check(&self, shape: Shape) -> Result<(), FormatError> {
        let multiple = col_quantum(&self.buffers(Usage::BOTH));
        if shape.cols.is_multiple_of(multiple) {
            Ok(())
        } else {
            Err(FormatError::Columns {
                recipe: self.name(),
                shape,
                multiple,
            })
        }
    }
}
