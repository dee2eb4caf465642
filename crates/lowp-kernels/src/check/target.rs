//! Which targets a kernel can fill: parts, codes, blocks and columns that fit its ingredients.

use lowp_format::{
    Axis, BufferSpec, Code, FormatError, KernelKey, Orientation, Part, ScaleLayout, ScaleRule,
    Shape, Usage, lcm,
};

use crate::table::{Traits, traits};
use crate::{Backend, KernelError, Target};

/// The traits of the kernel of `key`, whose blocks and constants are checked.
///
/// # Errors
/// [`KernelError::NoKernel`].
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

/// Refuses a block that no kernel takes: the device keeps its sides in 32 bits.
pub(super) fn check_block(block: [usize; 2]) -> Result<(), KernelError> {
    let most = BufferSpec::MAX_SIDE;
    match block.iter().find(|side| !(1..=most).contains(*side)) {
        Some(side) => Err(KernelError::NoKernel {
            what: format!("blocks with a side of {side}; block sides are 1 to {most}"),
        }),
        None => Ok(()),
    }
}

/// Refuses a least amax that is no magnitude.
pub(super) fn check_epsilon(epsilon: f32) -> Result<(), KernelError> {
    if epsilon >= 0.0 && epsilon.is_finite() {
        return Ok(());
    }
    let what = format!("an epsilon of {epsilon}; the least amax is finite and not negative");
    Err(KernelError::NoKernel { what })
}

/// The block that every orientation of `usage` has.
pub(crate) fn block_of(key: &KernelKey, usage: Usage) -> Result<Option<[usize; 2]>, KernelError> {
    let mut blocks = usage
        .orientations()
        .map(|orientation| key.block(orientation));
    let first = blocks.next().flatten();
    if blocks.any(|block| block != first) {
        let what = format!(
            "one buffer for both orientations where their blocks differ ({:?})",
            key.blocks
        );
        return Err(KernelError::NoKernel { what });
    }
    Ok(first)
}

/// Refuses a target that is not made of the ingredients of `key`.
pub(crate) fn check_target<B: Backend>(
    shape: Shape,
    key: &KernelKey,
    traits: &Traits,
    target: &Target<B>,
) -> Result<(), KernelError> {
    let spec = &target.spec;
    let refuse = |why: String| {
        Err(KernelError::NoKernel {
            what: format!("{}: {why}", spec.key),
        })
    };
    spec.check(shape)?;
    if spec.key.usage.is_empty() || !Usage::BOTH.contains(spec.key.usage) {
        return refuse("it serves no orientation".to_owned());
    }
    if let Some((form, orientation)) = target.form {
        if spec.key.part != Part::BlockScale {
            return refuse(format!("only block scales have a {} form", form.name()));
        }
        if !spec.key.usage.contains(orientation.usage()) {
            let form = form.name();
            return refuse(format!(
                "it has no {form} form for {orientation:?}, which it does not serve"
            ));
        }
    }
    match spec.key.part {
        part @ (Part::DecodeScale | Part::TensorAmax) => {
            if key.scale.tensor_part() != Some(part) {
                return refuse(format!("{:?} scales have no {part:?}", key.scale));
            }
            if spec.code != Code::F32 {
                return refuse(format!("a {part:?} is F32, not {}", spec.code));
            }
            return Ok(());
        }
        Part::Data if spec.code != key.element || spec.tile != [1, 1] => {
            let tile = spec.tile;
            let [code, element] = [spec.code, key.element];
            return refuse(format!(
                "{code} entries of {tile:?} elements, not {element} of 1"
            ));
        }
        Part::Data => {}
        Part::BlockScale => {
            let block = block_of(key, spec.key.usage)?;
            if Some(spec.code) != traits.entry || Some(spec.block()) != block {
                let [code, found] = [format!("{}", spec.code), format!("{:?}", spec.block())];
                return refuse(format!(
                    "{code} entries over {found} blocks, the kernel {block:?}"
                ));
            }
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

/// Refuses scales in another form than Compact.
pub(super) fn compact<B: Backend>(target: &Target<B>, what: &str) -> Result<(), KernelError> {
    match target.form {
        Some((form, _)) if !target.is_compact() => Err(KernelError::NoKernel {
            what: format!(
                "{what} with the {} form of {}; repack it from or to Compact",
                form.name(),
                target.spec.key
            ),
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
