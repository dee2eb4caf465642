//! The only list of kernel ingredients: which element codes and scale rules go together.
//!
//! A [`KernelKey`] becomes types here ([`dispatch`]), so that every kernel is compiled for exactly
//! the combinations of the table, and no loop asks what it is made of.

use lowp_format::{Code, KernelKey};

use crate::KernelError;
pub(crate) use crate::element::{
    Bf16, E2M1, E4M3, E5M2, ElementCode, F32, bf16_bits, bf16_value, round_bf16,
};
pub(crate) use crate::scaling::{
    BlockFloat, PerTensor, PowerOfTwo, ScaleEntry, ScaleKernel, TwoLevel, Unscaled,
};

/// Something to be compiled for every combination of ingredients.
pub(crate) trait Visit {
    /// What it returns.
    type Out;
    /// Runs it for one combination.
    fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) -> Self::Out;
}

macro_rules! ingredients {
    ($($Element:ident: $($Rule:ident),+;)+) => {
        /// Runs `visitor` with the types that `key` names; `tensor` is the tensor-level scale or
        /// amax, where the rule has one.
        ///
        /// # Errors
        /// [`KernelError::NoKernel`] for a combination outside the table.
        pub(crate) fn dispatch<V: Visit>(
            key: &KernelKey,
            tensor: f32,
            visitor: V,
        ) -> Result<V::Out, KernelError> {
            $($(
                if key.element == $Element::CODE
                    && key.blocks.is_some() == $Rule::BLOCKS
                    && let Some(rule) = $Rule::new(key.scale, tensor)
                {
                    return Ok(visitor.visit::<$Element, $Rule>(rule));
                }
            )+)+
            Err(no_kernel(key))
        }

        /// Every row of the table: the element code, whether blocks have scales, and the rules of
        /// the row's kind.
        #[cfg(test)]
        pub(crate) fn rows() -> Vec<(Code, bool, &'static [lowp_format::ScaleRule])> {
            vec![$($(($Element::CODE, $Rule::BLOCKS, $Rule::RULES)),+),+]
        }
    };
}

ingredients! {
    F32: Unscaled;
    Bf16: Unscaled;
    E4M3: PerTensor, PowerOfTwo, BlockFloat;
    E5M2: PerTensor, PowerOfTwo, BlockFloat;
    E2M1: PerTensor, PowerOfTwo, TwoLevel;
}

fn no_kernel(key: &KernelKey) -> KernelError {
    let KernelKey {
        element,
        scale,
        blocks,
    } = key;
    let what = match blocks {
        None => format!("{element} elements with {scale:?} scales and no blocks"),
        Some([row, col]) => format!(
            "{element} elements with {scale:?} scales over {}x{} and {}x{} blocks",
            row[0], row[1], col[0], col[1]
        ),
    };
    KernelError::NoKernel { what }
}

/// What a combination of ingredients needs and offers.
#[derive(Clone, Copy, Debug)]
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
/// [`KernelError::NoKernel`] for a combination outside the table.
pub(crate) fn traits(key: &KernelKey) -> Result<Traits, KernelError> {
    struct Ask;
    impl Visit for Ask {
        type Out = Traits;
        fn visit<E: ElementCode, R: ScaleKernel>(self, _: R) -> Traits {
            Traits {
                tensor: R::TENSOR,
                entry: R::BLOCKS.then_some(R::ENTRY),
                stochastic: E::STOCHASTIC,
            }
        }
    }
    dispatch(key, 1.0, Ask)
}
