//! Codes and scale rules as rows have them, by orientation, and what is written of a tensor or its lines.

use lowp_format::{Code, FourOverSix, KernelKey, MxScale, Orientation, ScaleRule};

use super::super::handle::Cuda;
use super::super::table::{Ingredients, Outer, code, extent, rule};
use super::job::{place, put};
use crate::check::encode::{filled_by, input_of, outer_kernel_of};
use crate::{KernelError, Slot, Target, TensorInput};

fn code_of(code: Code) -> u8 {
    match code {
        Code::E4M3 => code::E4M3,
        Code::E5M2 => code::E5M2,
        Code::E2M1 => code::E2M1,
        Code::E8M0 => code::E8M0,
        Code::Bf16 => code::BF16,
        Code::F32 => code::F32,
    }
}

fn rule_of(rule: ScaleRule) -> u8 {
    match rule {
        ScaleRule::None => rule::NONE,
        ScaleRule::Delayed { .. } | ScaleRule::Current { .. } => rule::TENSOR,
        ScaleRule::E8M0(MxScale::Te) => rule::E8M0_TE,
        ScaleRule::E8M0(MxScale::OcpFloor) => rule::E8M0_FLOOR,
        ScaleRule::E8M0(MxScale::Even) => rule::E8M0_EVEN,
        ScaleRule::TwoLevel { four_over_six, .. } if four_over_six.is_on() => rule::FOUR_OVER_SIX,
        ScaleRule::TwoLevel { .. } => rule::TWO_LEVEL,
        ScaleRule::BlockF32 { .. } => rule::BLOCK_F32,
    }
}

fn slot(slot: Option<&Slot<Cuda>>) -> u64 {
    slot.map_or(0, |slot| slot.buffer.at(slot.index))
}

/// The ingredients of `orientation`; `tensor` is where its scales or amaxes are, if it has any.
pub(super) fn ingredients(
    orientation: Orientation,
    key: &KernelKey,
    tensor: u64,
    observed: bool,
) -> Ingredients {
    let (pow2, epsilon) = match key.scale {
        ScaleRule::Current { pow2, epsilon, .. } | ScaleRule::BlockF32 { pow2, epsilon } => {
            (pow2, epsilon)
        }
        _ => (false, 0.0),
    };
    let choice = match key.scale {
        ScaleRule::TwoLevel { four_over_six, .. } => four_over_six,
        _ => FourOverSix::Off,
    };
    Ingredients {
        tensor,
        largest: choice.largest(),
        epsilon,
        pow2: u8::from(pow2),
        element: code_of(key.element),
        rule: rule_of(key.scale),
        extent: match key.scale.is_by_line() {
            true => [extent::ROWS, extent::COLUMNS][orientation as usize],
            false => extent::TENSOR,
        },
        observed: u8::from(observed),
        squares: u8::from(choice.squares()),
        hadamard: u8::from(key.hadamard),
        reserved: 0,
    }
}

/// The ingredients that targets of an encode have, by orientation; `share` says that one pass fills both.
pub(super) fn known(
    kernels: &[KernelKey; 2],
    inputs: &[Option<TensorInput<Cuda>>; 2],
    share: bool,
) -> [Ingredients; 2] {
    Orientation::ALL.map(|orientation| {
        let key = &kernels[orientation as usize];
        let input = input_of(inputs, orientation, share);
        let tensor = match key.scale.outer() {
            Some(_) => slot(input.map(TensorInput::slot)),
            None => 0,
        };
        let observed = tensor != 0 && matches!(input, Some(TensorInput::Observed(_)));
        ingredients(orientation, key, tensor, observed)
    })
}

/// What is written and consumed of the tensor or its lines, but for the targets: each entry by one orientation.
pub(super) fn outers(
    known: &[Ingredients; 2],
    inputs: &[Option<TensorInput<Cuda>>; 2],
    share: bool,
) -> [Outer; 2] {
    let mut outers = [Outer::default(); 2];
    for (index, outer) in outers.iter_mut().enumerate() {
        let used = inputs[index].is_some() && known[index].tensor != 0;
        if used && (index == 0 || !share || inputs[0].is_none()) {
            outer.ingredients = known[index];
        }
    }
    outers
}

/// Puts a target of the tensor or its lines where nothing is.
pub(super) fn put_outer(
    outers: &mut [Outer; 2],
    known: &[Ingredients; 2],
    orientation: Orientation,
    pointer: u64,
) -> bool {
    let outer = &mut outers[orientation as usize];
    outer.ingredients = known[orientation as usize];
    put(&mut outer.to, pointer)
}

/// The orientation whose pass fills `target`. None where nothing is left to do: it has no bytes, or it is of the tensor or
/// its lines, and was put into the `outer` of a job.
pub(super) fn filling<J: Copy>(
    jobs: &mut Vec<J>,
    base: J,
    kernels: &[KernelKey; 2],
    known: &[Ingredients; 2],
    share: bool,
    target: &Target<Cuda>,
    outer: impl Fn(&mut J) -> &mut [Outer; 2],
) -> Result<Option<Orientation>, KernelError> {
    let (pointer, key) = (target.bytes.pointer(), target.spec.key);
    if pointer == 0 {
        return Ok(None);
    }
    if !key.part.is_outer() {
        return Ok(Some(filled_by(key.usage, share)));
    }
    let (orientation, _) = outer_kernel_of(kernels, key.usage)?;
    place(jobs, base, |job| {
        put_outer(outer(job), known, orientation, pointer)
    })?;
    Ok(None)
}
