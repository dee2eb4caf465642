//! Which targets a kernel can fill: parts, codes, blocks and columns that fit its ingredients.

use std::ops::Range;

use lowp_format::{
    Axis, BufferSpec, Code, FormatError, KernelKey, Orientation, Part, ScaleLayout, ScaleRule,
    Shape, Usage, lcm,
};

use crate::ingredients::{Traits, traits};
use crate::{Backend, KernelError, Target};

/// The traits of the kernel of `key`, whose blocks and constants are checked.
///
/// # Errors
/// [`KernelError::Ingredients`], a block or an epsilon that no kernel takes.
pub(super) fn ingredients(key: &KernelKey) -> Result<Traits, KernelError> {
    let traits = traits(key)?;
    for &block in key.blocks.iter().flatten() {
        check_block(block)?;
    }
    if let ScaleRule::BlockF32 { epsilon, .. } = key.scale {
        check_epsilon(epsilon)?;
    }
    Ok(traits)
}

/// Checks a block: the device keeps its sides in 32 bits.
pub(super) fn check_block(block: [usize; 2]) -> Result<(), KernelError> {
    let most = BufferSpec::MAX_SIDE;
    match block.iter().find(|side| !(1..=most).contains(*side)) {
        Some(&side) => Err(KernelError::BlockSide { side, most }),
        None => Ok(()),
    }
}

/// Checks that a least amax is a magnitude.
pub(super) fn check_epsilon(epsilon: f32) -> Result<(), KernelError> {
    if epsilon >= 0.0 && epsilon.is_finite() {
        return Ok(());
    }
    Err(KernelError::Epsilon { epsilon })
}

/// The block that every orientation of `usage` has.
pub(crate) fn block_of(key: &KernelKey, usage: Usage) -> Result<Option<[usize; 2]>, KernelError> {
    let mut blocks = usage
        .orientations()
        .map(|orientation| key.block(orientation));
    let first = blocks.next().flatten();
    if blocks.any(|block| block != first) {
        return Err(KernelError::BlocksDiffer { blocks: key.blocks });
    }
    Ok(first)
}

/// Checks that a target is made of the ingredients of `key`.
pub(crate) fn check_target<B: Backend>(
    shape: Shape,
    key: &KernelKey,
    traits: &Traits,
    target: &Target<B>,
) -> Result<(), KernelError> {
    let spec = &target.spec;
    let (at, scale) = (spec.key, key.scale);
    let holds = |block: [usize; 2], needed: Option<(Code, [usize; 2])>| {
        if needed == Some((spec.code, block)) {
            return Ok(());
        }
        Err(KernelError::TargetEntries {
            key: at,
            code: spec.code,
            block,
            needed,
        })
    };
    spec.check(shape)?;
    if at.usage.is_empty() || !Usage::BOTH.contains(at.usage) {
        return Err(KernelError::TargetUsage { key: at });
    }
    if let Some((form, orientation)) = target.form
        && (at.part != Part::BlockScale || !at.usage.contains(orientation.usage()))
    {
        return Err(KernelError::TargetForm {
            key: at,
            form,
            orientation,
        });
    }
    match at.part {
        part @ (Part::DecodeScale | Part::TensorAmax) => {
            if key.scale.tensor_part() != Some(part) {
                return Err(KernelError::TargetPart { key: at, scale });
            }
            return holds(spec.tile, Some((Code::F32, spec.tile)));
        }
        Part::Data => holds(spec.tile, Some((key.element, [1, 1])))?,
        Part::BlockScale => {
            let block = block_of(key, at.usage)?;
            holds(spec.block(), traits.entry.zip(block))?;
        }
    }
    let packed = if spec.axes[1] == Axis::Cols {
        spec.code.entries_per_byte()
    } else {
        1
    };
    let multiple = Orientation::ALL
        .into_iter()
        .filter(|o| spec.key.usage.contains(o.usage()))
        .filter_map(|o| key.block(o))
        .fold(packed, |unit, block| lcm(unit, block[1]));
    if !shape.cols.is_multiple_of(multiple) {
        let recipe = "the kernel";
        return Err(FormatError::Columns {
            recipe,
            shape,
            multiple,
        }
        .into());
    }
    Ok(())
}

/// Checks that scales are in Compact form.
pub(super) fn compact<B: Backend>(
    target: &Target<B>,
    what: &'static str,
) -> Result<(), KernelError> {
    match target.form {
        Some((form, _)) if !target.is_compact() => Err(KernelError::NotCompact {
            what,
            key: target.spec.key,
            form,
        }),
        _ => Ok(()),
    }
}

/// Whether `from` has an entry for every entry of `to`.
pub(super) fn covers(from: &ScaleLayout, to: &ScaleLayout) -> bool {
    let [rows, cols] = to.entries();
    let Some(last) = rows.checked_sub(1).zip(cols.checked_sub(1)) else {
        return true;
    };
    let [row, col] = to.element(last.0, last.1);
    let (tile, entries) = (from.tile(), from.entries());
    let at = match from.axes()[0] {
        Axis::Rows => [row / tile[0], col / tile[1]],
        Axis::Cols => [col / tile[0], row / tile[1]],
    };
    at[0] < entries[0] && at[1] < entries[1]
}

/// The bytes that elements `start..start + len` touch.
pub(crate) fn touched(code: Code, start: usize, len: usize) -> Range<usize> {
    let bits = code.bits();
    start * bits / 8..((start + len) * bits).div_ceil(8)
}
