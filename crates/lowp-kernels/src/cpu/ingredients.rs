//! Ingredients as types: every kernel is compiled for exactly the combinations of
//! [`crate::ingredients::TABLE`], and no loop asks what it is made of.

use lowp_format::KernelKey;

pub(crate) use super::element::{Bf16, E2M1, E4M3, E5M2, ElementCode, F32};
pub(crate) use super::scaling::{
    BlockFloat, ChosenTwoLevel, PerTensor, PowerOfTwo, ScaleEntry, ScaleKernel, TwoLevel, Unscaled,
};
use crate::KernelError;

/// Something to be compiled for every combination of ingredients.
pub(crate) trait Visit {
    /// What the visit returns.
    type Out;
    /// Runs the visitor for one combination.
    fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) -> Self::Out;
}

macro_rules! dispatch {
    ($($Element:ident: $($Rule:ident),+;)+) => {
        /// Runs `visitor` with the types that `key` names; `tensor` is the scale or amax of the tensor or
        /// of a line, where the rule has one.
        pub(crate) fn dispatch<V: Visit>(
            key: &KernelKey,
            tensor: f32,
            visitor: V,
        ) -> Result<V::Out, KernelError> {
            $($(
                if key.element == $Element::CODE
                    && key.block.is_some() == $Rule::BLOCKS
                    && let Some(rule) = $Rule::new(key.scale, tensor)
                {
                    return Ok(visitor.visit::<$Element, $Rule>(rule));
                }
            )+)+
            Err(KernelError::Ingredients { key: *key })
        }
    };
}

dispatch! {
    F32: Unscaled;
    Bf16: Unscaled;
    E4M3: PerTensor, PowerOfTwo, BlockFloat;
    E5M2: PerTensor, PowerOfTwo, BlockFloat;
    E2M1: PerTensor, PowerOfTwo, TwoLevel, ChosenTwoLevel;
}

#[cfg(test)]
mod tests {
    use lowp_format::{Code, Extent, FourOverSix, MxScale, ScaleRule};

    use super::*;
    use crate::ingredients::{TABLE, is_stochastic, known};

    /// Bytes of a stored block scale, and whether stochastic rounding exists.
    struct Ask;
    impl Visit for Ask {
        type Out = (Option<usize>, bool);
        fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) -> Self::Out {
            let stochastic = E::STOCHASTIC && rule.choice().is_none();
            (R::BLOCKS.then_some(R::Entry::BYTES), stochastic)
        }
    }

    #[test]
    fn the_types_are_those_of_the_table() {
        let (pow2, epsilon, extent) = (true, 0.0, Extent::Tensor);
        let rules = [
            ScaleRule::None,
            ScaleRule::Current {
                extent,
                pow2,
                epsilon,
            },
            ScaleRule::E8M0(MxScale::Te),
            ScaleRule::TWO_LEVEL,
            ScaleRule::TwoLevel {
                extent,
                four_over_six: FourOverSix::Mae,
            },
            ScaleRule::BlockF32 { pow2, epsilon },
        ];
        let mut kernels = 0;
        for (element, scale) in Code::ALL.into_iter().flat_map(|e| rules.map(|r| (e, r))) {
            for block in [None, Some([16, 16])] {
                let key = KernelKey {
                    block,
                    ..KernelKey::new(element, scale)
                };
                let entry = scale.entry().map(|code| code.bytes(1));
                let expected = known(&key).map(|()| (entry, is_stochastic(&key)));
                assert_eq!(dispatch(&key, 1.0, Ask), expected, "{key:?}");
                kernels += usize::from(expected.is_ok());
            }
        }
        assert_eq!(kernels, TABLE.len());
    }
}
