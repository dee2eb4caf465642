//! The only list of kernel ingredients: which element codes and scale rules go together. Plain data, which
//! every backend reads.

use lowp_format::{Axis, Code, KernelKey, MxScale, Orientation, ScaleRule, Shape};

use crate::KernelError;

/// A kind of scale rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleKind {
    /// Values are stored as they are.
    Unscaled,
    /// One scale for the tensor, or for each line.
    PerTensor,
    /// A power of two per block.
    PowerOfTwo,
    /// An E4M3 scale per block under an amax.
    TwoLevel,
    /// The same, with a choice of four over six.
    FourOverSix,
    /// An f32 scale per block.
    BlockFloat,
}

impl RuleKind {
    /// The kind of `rule`.
    pub const fn of(rule: ScaleRule) -> Self {
        match rule {
            ScaleRule::None => Self::Unscaled,
            ScaleRule::Delayed { .. } | ScaleRule::Current { .. } => Self::PerTensor,
            ScaleRule::E8M0(_) => Self::PowerOfTwo,
            ScaleRule::TwoLevel { four_over_six, .. } if four_over_six.is_on() => Self::FourOverSix,
            ScaleRule::TwoLevel { .. } => Self::TwoLevel,
            ScaleRule::BlockF32 { .. } => Self::BlockFloat,
        }
    }
}

/// Every kernel that there is: an element code and a kind of scale rule.
pub const TABLE: [(Code, RuleKind); 12] = {
    use RuleKind::*;
    [
        (Code::F32, Unscaled),
        (Code::Bf16, Unscaled),
        (Code::E4M3, PerTensor),
        (Code::E4M3, PowerOfTwo),
        (Code::E4M3, BlockFloat),
        (Code::E5M2, PerTensor),
        (Code::E5M2, PowerOfTwo),
        (Code::E5M2, BlockFloat),
        (Code::E2M1, PerTensor),
        (Code::E2M1, PowerOfTwo),
        (Code::E2M1, TwoLevel),
        (Code::E2M1, FourOverSix),
    ]
};

/// The blocks that four over six is defined for.
const CHOSEN_BLOCKS: [[usize; 2]; 3] = [[1, 16], [16, 1], [16, 16]];

/// Checks that `key` is in the table, that it has blocks where its rule scales them, and a rule where values are transformed.
///
/// # Errors
/// [`KernelError::Ingredients`] for any other combination.
pub fn known(key: &KernelKey) -> Result<(), KernelError> {
    let kind = RuleKind::of(key.scale);
    let blocks = key.block.is_some() == key.scale.entry().is_some();
    let chosen = kind != RuleKind::FourOverSix
        || key
            .block
            .is_some_and(|block| CHOSEN_BLOCKS.contains(&block));
    // Values that are kept as they are keep NaNs, whose bits a transform would make differ from device to device.
    let kept = kind == RuleKind::Unscaled && key.hadamard;
    if TABLE.contains(&(key.element, kind)) && blocks && chosen && !kept {
        return Ok(());
    }
    Err(KernelError::Ingredients { key: *key })
}

/// Whether a matrix of `shape` with these ingredients, by orientation, is rounded in one pass ([`crate::Work::Round`]): codes with
/// scales of blocks of a row and of a column, FP8 with powers of two for 32 and E2M1 with two levels for 16, of which columns may be
/// transformed.
pub fn rounds([rowwise, columnwise]: &[KernelKey; 2], shape: Shape) -> bool {
    let (side, tile) = match (rowwise.element, rowwise.scale) {
        (Code::E4M3 | Code::E5M2, ScaleRule::E8M0(MxScale::Te | MxScale::OcpFloor)) => {
            (32, [32, 32])
        }
        (Code::E2M1, ScaleRule::TWO_LEVEL) => (16, [128, 64]),
        _ => return false,
    };
    let by = |block, hadamard| KernelKey {
        block: Some(block),
        hadamard,
        ..*rowwise
    };
    let transformed = side == 16 && columnwise.hadamard;
    let blocks = *rowwise == by([1, side], false) && *columnwise == by([side, 1], transformed);
    let whole = shape.rows.is_multiple_of(tile[0]) && shape.cols.is_multiple_of(tile[1]);
    blocks && whole
}

/// As [`rounds`], with scales of blocks alone: nothing of the whole matrix is known first.
pub fn rounds_by_block(kernels: &[KernelKey; 2], shape: Shape) -> bool {
    rounds(kernels, shape) && kernels.iter().all(|kernel| kernel.scale.outer().is_none())
}

/// The axis that rows of codes follow in memory where a rounding fills them: codes of four bits lie along their blocks.
pub fn rounded_axis(key: &KernelKey, orientation: Orientation) -> Axis {
    match orientation {
        Orientation::Columnwise if key.element == Code::E2M1 => Axis::Cols,
        Orientation::Rowwise | Orientation::Columnwise => Axis::Rows,
    }
}

/// Whether elements of `key` can be rounded stochastically.
pub fn is_stochastic(key: &KernelKey) -> bool {
    key.element == Code::E2M1 && RuleKind::of(key.scale) != RuleKind::FourOverSix
}
