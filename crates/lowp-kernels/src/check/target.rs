//! Which targets a kernel can fill: parts, codes, blocks and columns that fit its ingredients.

use std::ops::Range;

use lowp_format::{
    Axis, BufferSpec, Code, Extent, FormatError, KernelKey, Orientation, Part, ScaleLayout,
    ScaleRule, Shape, Usage, cdiv, lcm,
};

use crate::ingredients::{RuleKind, TABLE, known};
use crate::{Backend, KernelError, Slot, Target, TensorInput};

/// Checks the ingredients of one orientation, their blocks and their constants.
///
/// # Errors
/// [`KernelError::Ingredients`], a block or an epsilon that no kernel takes.
pub(super) fn ingredients(orientation: Orientation, key: &KernelKey) -> Result<(), KernelError> {
    known(key)?;
    key.block.map_or(Ok(()), check_block)?;
    // A block under the amax of a line lies within it.
    if let (Some((Extent::Line, _)), Some(block)) = (key.scale.outer(), key.block)
        && block[orientation as usize] != 1
    {
        return Err(KernelError::Ingredients { key: *key });
    }
    match key.scale {
        ScaleRule::BlockF32 { epsilon, .. } | ScaleRule::Current { epsilon, .. } => {
            check_epsilon(epsilon)
        }
        _ => Ok(()),
    }
}

/// Checks a block: the device keeps its sides in 32 bits.
pub(super) fn check_block(block: [usize; 2]) -> Result<(), KernelError> {
    let most = BufferSpec::MAX_SIDE;
    let lines = Orientation::ALL.map(|orientation| Extent::Line.block(orientation));
    if lines.contains(&block) {
        return Ok(());
    }
    match block.iter().find(|side| !(1..=most).contains(*side)) {
        Some(&side) => Err(KernelError::BlockSide { side, most }),
        None => Ok(()),
    }
}

/// Number of blocks of `shape`.
pub(super) fn block_entries(shape: Shape, block: [usize; 2]) -> Result<usize, KernelError> {
    check_block(block)?;
    let blocks = |len: usize, side: usize| match side {
        BufferSpec::WHOLE => 1,
        side => cdiv(len, side),
    };
    Ok(blocks(shape.rows, block[0]) * blocks(shape.cols, block[1]))
}

/// Checks that elements of `element` have a scale of their tensor, which may then be delayed.
pub(super) fn check_delayed(element: Code) -> Result<(), KernelError> {
    if TABLE.contains(&(element, RuleKind::PerTensor)) {
        return Ok(());
    }
    Err(KernelError::DelayedElement { element })
}

/// Checks that a least amax is a magnitude.
pub(super) fn check_epsilon(epsilon: f32) -> Result<(), KernelError> {
    if epsilon >= 0.0 && epsilon.is_finite() {
        return Ok(());
    }
    Err(KernelError::Epsilon { epsilon })
}

/// Whether one of `targets` holds both orientations while `inputs` say different things of their tensor. Ingredients that differ
/// are found with the target; each orientation has lines of its own.
pub(super) fn slots_differ<B: Backend>(
    backend: &B,
    kernels: &[KernelKey; 2],
    inputs: &[Option<TensorInput<B>>; 2],
    targets: &[Target<B>],
) -> bool {
    let [Some(rowwise), Some(columnwise)] = inputs else {
        return false;
    };
    let [key, other] = kernels;
    let shares = key == other && matches!(key.scale.outer(), Some((Extent::Tensor, _)));
    let entry = |input: &TensorInput<B>| {
        let Slot { buffer, index } = input.slot();
        (std::mem::discriminant(input), backend.span(buffer), *index)
    };
    let both = |target: &Target<B>| target.spec.key.usage == Usage::BOTH;
    shares && targets.iter().any(both) && entry(rowwise) != entry(columnwise)
}

/// The ingredients that every orientation of `usage` has, of which there is at least one.
pub(crate) fn kernel_of(
    kernels: &[KernelKey; 2],
    usage: Usage,
) -> Result<(Orientation, &KernelKey), KernelError> {
    let columnwise = usage == Usage::COLUMNWISE;
    if usage == Usage::BOTH && kernels[0] != kernels[1] {
        let kernels = Box::new(*kernels);
        return Err(KernelError::KernelsDiffer { kernels });
    }
    Ok(match columnwise {
        true => (Orientation::Columnwise, &kernels[1]),
        false => (Orientation::Rowwise, &kernels[0]),
    })
}

/// The same for what stands above block scales, whatever the blocks are.
pub(crate) fn outer_kernel_of(
    kernels: &[KernelKey; 2],
    usage: Usage,
) -> Result<(Orientation, &KernelKey), KernelError> {
    let without_blocks = kernels.map(|key| KernelKey { block: None, ..key });
    match usage == Usage::BOTH && without_blocks[0] == without_blocks[1] {
        true => Ok((Orientation::Rowwise, &kernels[0])),
        false => kernel_of(kernels, usage),
    }
}

/// Whether one quantization fills the targets of both orientations of a job: their ingredients are the same, and so is
/// what they know of the tensor.
pub(crate) fn share_pass<B: Backend>(
    backend: &B,
    kernels: &[KernelKey; 2],
    inputs: &[Option<TensorInput<B>>; 2],
) -> bool {
    let lines = matches!(kernels[0].scale.outer(), Some((Extent::Line, _)));
    if kernels[0] != kernels[1] || lines {
        return false;
    }
    let place = |input: &TensorInput<B>| {
        let slot = input.slot();
        (backend.span(&slot.buffer).start, slot.index)
    };
    match [inputs[0].as_ref(), inputs[1].as_ref()] {
        [Some(a), Some(b)] => place(a) == place(b),
        _ => true,
    }
}

/// The orientation whose ingredients fill a target of `usage`, where orientations that `share` are filled by the first.
pub(crate) fn filled_by(usage: Usage, share: bool) -> Orientation {
    match usage == Usage::COLUMNWISE && !share {
        true => Orientation::Columnwise,
        false => Orientation::Rowwise,
    }
}

/// What is known for the pass of `orientation`: if the orientations `share`, either of the two.
pub(crate) fn input_of<B: Backend>(
    inputs: &[Option<TensorInput<B>>; 2],
    orientation: Orientation,
    share: bool,
) -> Option<&TensorInput<B>> {
    let own = inputs[orientation as usize].as_ref();
    match share {
        true => own.or(inputs[1 - orientation as usize].as_ref()),
        false => own,
    }
}

/// Checks that a target is made of the ingredients of the orientations that it serves.
pub(crate) fn check_target<B: Backend>(
    shape: Shape,
    kernels: &[KernelKey; 2],
    target: &Target<B>,
) -> Result<(), KernelError> {
    let spec = &target.spec;
    let at = spec.key;
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
    let (orientation, key) = match at.part.is_outer() {
        true => outer_kernel_of(kernels, at.usage)?,
        false => kernel_of(kernels, at.usage)?,
    };
    let scale = key.scale;
    match at.part {
        Part::DecodeScale | Part::Amax => {
            let outer = scale.outer();
            let Some((extent, _)) = outer.filter(|(_, part)| *part == at.part) else {
                return Err(KernelError::TargetPart { key: at, scale });
            };
            // Lines lie one after another, whatever the order of the axes.
            let both = at.usage == Usage::BOTH && extent == Extent::Line;
            let block = if both {
                [0, 0]
            } else {
                extent.block(orientation)
            };
            return holds(spec.block(), Some((Code::F32, block)));
        }
        Part::Data => holds(spec.tile, Some((key.element, [1, 1])))?,
        Part::BlockScale => holds(spec.block(), scale.entry().zip(key.block))?,
    }
    let packed = if spec.axes[1] == Axis::Cols {
        spec.code.entries_per_byte()
    } else {
        1
    };
    let multiple = match (scale, key.block) {
        // The last blocks of a row may have fewer columns.
        (ScaleRule::BlockF32 { .. }, _) | (_, None) => packed,
        (_, Some(block)) => lcm(packed, block[1]),
    };
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
