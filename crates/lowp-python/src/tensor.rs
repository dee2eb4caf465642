//! Buffers by name as a [`QuantizedTensor`].

use lowp_format::{AnyRecipe, BufferKey, BufferSpec, QuantizedTensor, Recipe, Shape, Usage};

use crate::error::Error;
use crate::place::{Memory, MemoryArg, Place};

/// Buffers with their names.
pub(crate) type Named = Vec<(String, MemoryArg)>;

/// The tensor whose buffers are `named`: some or all that one usage has.
pub(crate) fn tensor<B: Place>(
    backend: &B,
    recipe: AnyRecipe,
    shape: Shape,
    named: Named,
) -> Result<QuantizedTensor<B::Buffer<u8>>, Error> {
    let names: Vec<&str> = named.iter().map(|(name, _)| name.as_str()).collect();
    let specs = specs(recipe, &names)?;
    let mut memory: Vec<Option<Memory>> = named.into_iter().map(|(_, m)| Some(m.into())).collect();
    let mut at = 0;
    QuantizedTensor::with_buffers(recipe, shape, specs, |spec, bytes| {
        let memory = memory[at].take();
        at += 1;
        let found = memory.as_ref().map_or(0, |m| m.span().len());
        match memory {
            Some(memory) if found == bytes => backend.wrap(memory),
            _ => Err(Error::new(format!(
                "{} of {} {shape} has {found} bytes; give a buffer of {bytes} bytes",
                spec.key,
                recipe.name()
            ))),
        }
    })
}

/// The specs of `names`, in their order.
fn specs(recipe: AnyRecipe, names: &[&str]) -> Result<Vec<BufferSpec>, Error> {
    for usage in [Usage::BOTH, Usage::ROWWISE, Usage::COLUMNWISE] {
        let all = recipe.buffers(usage);
        let find = |name: &&str| all.iter().find(|spec| spec.key.to_string() == **name);
        let found: Option<Vec<BufferSpec>> = names.iter().map(|n| find(n).copied()).collect();
        if let Some(found) = found {
            return Ok(found);
        }
    }
    Err(Error::new(format!(
        "{} has no tensor with the buffers {}; give those of one usage (both, rowwise or columnwise)",
        recipe.name(),
        names.join(", ")
    )))
}

/// The name of a buffer.
pub(crate) fn name(key: BufferKey) -> String {
    key.to_string()
}
