//! [`Groups`]: tensors that have one amax, that of them all.

use crate::cast::observe;
use crate::error::Result;
use crate::model::Tensor;
use crate::select::Choice;
use crate::source::{Room, load_in, mapped};
use lowp_format::Recipe;
use lowp_kernels::Backend;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// Values that are loaded at a time where they are not mapped. Tests load often.
const LOADED: usize = if cfg!(test) { 1 << 10 } else { 8 << 20 };

#[derive(Debug, Default)]
pub(crate) struct Groups<'a> {
    members: BTreeMap<usize, Vec<Tensor<'a>>>,
}

impl<'a> Groups<'a> {
    pub(crate) fn of(choices: &[Choice<'a>]) -> Self {
        let mut groups = Self::default();
        for choice in choices {
            if let Some(group) = choice.group {
                let members = groups.members.entry(group).or_default();
                members.push(choice.tensor);
            }
        }
        groups
    }

    /// What the metadata of a tensor in `group` say: the names of all that are in it.
    pub(crate) fn names(&self, group: Option<usize>) -> Option<Vec<String>> {
        let members = self.members.get(&group?)?;
        Some(
            members
                .iter()
                .map(|tensor| tensor.name.to_owned())
                .collect(),
        )
    }
}

/// The amaxes of groups, each of which is found once: of whole tensors, or of a rank's part of each.
#[derive(Debug, Default)]
pub(crate) struct Amaxes(RefCell<BTreeMap<usize, f32>>);

impl Amaxes {
    /// That of `group`, of whose tensors `part` says which elements count.
    pub(crate) fn of<B: Backend>(
        &self,
        backend: &B,
        recipe: &impl Recipe,
        groups: &Groups<'_>,
        group: Option<usize>,
        part: impl Fn(&Tensor<'_>) -> Result<Range<usize>>,
    ) -> Result<Option<f32>> {
        let Some(group) = group else {
            return Ok(None);
        };
        if let Some(amax) = self.0.borrow().get(&group) {
            return Ok(Some(*amax));
        }
        let amax = backend.alloc::<f32>(1)?;
        // Reads of their own, which are no part of the work that is counted.
        let room = Room::default();
        for tensor in groups.members.get(&group).into_iter().flatten() {
            let part = part(tensor)?;
            if let Some(mapped) = mapped(tensor) {
                observe(backend, recipe, mapped.view(backend, part)?, &amax)?;
                continue;
            }
            for start in part.clone().step_by(LOADED) {
                let some = start..part.end.min(start + LOADED);
                let source = load_in(backend, &room, LOADED.min(part.len()), tensor, some, &())?;
                observe(backend, recipe, source, &amax)?;
            }
        }
        let amax = backend.download::<f32>(&amax)?[0];
        self.0.borrow_mut().insert(group, amax);
        Ok(Some(amax))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;
    use half::{bf16, f16};
    use lowp_format::AnyRecipe;
    use lowp_kernels::Cpu;
    use std::fs;

    /// The amax of a group is the largest of all parts, however few of their values are loaded at a time.
    #[test]
    fn values_that_are_not_mapped_count() -> Result<()> {
        let len = 2 * LOADED + 7;
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("in.safetensors");
        let entry = |name: &str, dtype: &str, at: usize| {
            let (start, end) = (at * 2 * len, (at + 1) * 2 * len);
            format!(
                "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":[{len}],\"data_offsets\":[{start},{end}]}}"
            )
        };
        let header = format!("{{{},{}}}", entry("a", "BF16", 0), entry("b", "F16", 1));
        // Not aligned.
        let end = header.len().next_multiple_of(8) + 1;
        let header = format!("{header:end$}");
        let write = |narrow: &[f32], half: &[f32]| {
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend(header.bytes());
            let values = narrow
                .iter()
                .map(|&value| bf16::from_f32(value).to_le_bytes());
            file.extend(values.flatten());
            let values = half.iter().map(|&value| f16::from_f32(value).to_le_bytes());
            file.extend(values.flatten());
            fs::write(&path, file)
        };
        let recipe = AnyRecipe::from_name("nvfp4-2d", &Default::default())?;
        for (tensor, at) in [0, 1]
            .into_iter()
            .flat_map(|tensor| [3, LOADED, 2 * LOADED + 6].map(|at| (tensor, at)))
        {
            let mut values = [vec![0.5; len], vec![-0.25; len]];
            values[tensor][at] = -3.0;
            write(&values[0], &values[1])?;
            let model = Model::open(&path)?;
            let mut groups = Groups::default();
            groups.members.insert(0, model.tensors().collect());
            let of = |part: Range<usize>| {
                let part = |_: &Tensor<'_>| Ok(part.clone());
                Amaxes::default().of(&Cpu, &recipe, &groups, Some(0), part)
            };
            assert_eq!(of(0..len)?, Some(3.0), "{tensor} {at}");
            assert_eq!(of(at..at + 1)?, Some(3.0));
            // A part that begins after the largest magnitude.
            assert_eq!(
                of(at + 1..len)?,
                (at + 1 < len).then_some(0.5).or(Some(0.0))
            );
        }
        Ok(())
    }
}
