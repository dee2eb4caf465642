//! The only list of kernel ingredients: which element codes and scale rules go together, and what each
//! combination needs. Plain data, which every backend reads.

use lowp_format::{Code, KernelKey, ScaleRule};

use crate::KernelError;

/// A kind of scale rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RuleKind {
    /// Values are stored as they are.
    Unscaled,
    /// One scale for the tensor.
    PerTensor,
    /// A power of two per block.
    PowerOfTwo,
    /// An E4M3 scale per block under the tensor amax.
    TwoLevel,
    /// An f32 scale per block.
    BlockFloat,
}

impl RuleKind {
    /// The kind of `rule`.
    pub(crate) const fn of(rule: ScaleRule) -> Self {
        match rule {
            ScaleRule::None => Self::Unscaled,
            ScaleRule::Tensor => Self::PerTensor,
            ScaleRule::E8M0(_) => Self::PowerOfTwo,
            ScaleRule::TwoLevel => Self::TwoLevel,
            ScaleRule::BlockF32 { .. } => Self::BlockFloat,
        }
    }

    /// The code of a stored block scale, where blocks have scales.
    pub(crate) const fn entry(self) -> Option<Code> {
        match self {
            Self::Unscaled | Self::PerTensor => None,
            Self::PowerOfTwo => Some(Code::E8M0),
            Self::TwoLevel => Some(Code::E4M3),
            Self::BlockFloat => Some(Code::F32),
        }
    }

    /// Whether a tensor-level scale or amax is used.
    pub(crate) const fn tensor(self) -> bool {
        matches!(self, Self::PerTensor | Self::TwoLevel)
    }
}

/// Every kernel that there is: an element code and a kind of scale rule.
pub(crate) const TABLE: [(Code, RuleKind); 11] = {
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
    ]
};

/// What a combination of ingredients needs and offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Traits {
    /// Whether a tensor-level scale or amax is used.
    pub(crate) tensor: bool,
    /// The code of a stored block scale, where blocks have scales.
    pub(crate) entry: Option<Code>,
    /// Whether stochastic rounding exists.
    pub(crate) stochastic: bool,
}

/// The traits of `key`.
///
/// # Errors
/// [`KernelError::Ingredients`] for a combination outside the table.
pub(crate) fn traits(key: &KernelKey) -> Result<Traits, KernelError> {
    let kind = RuleKind::of(key.scale);
    let entry = kind.entry();
    if !TABLE.contains(&(key.element, kind)) || key.blocks.is_some() != entry.is_some() {
        return Err(KernelError::Ingredients { key: *key });
    }
    Ok(Traits {
        tensor: kind.tensor(),
        entry,
        stochastic: key.element == Code::E2M1,
    })
}
