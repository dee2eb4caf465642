//! Which tensors of a model `--tensors`, `--ignore`, `--skip-unsupported` and `--amax-group` choose.

use super::summary::{Kept, Summary};
use crate::output::{message, note, shown};
use crate::usage::{AMAX_GROUP, input_error, of_patterns};
use anyhow::Result;
use lowp_file::patterns::{Pattern, amax_groups, are_patterns};
use lowp_file::select::{Choices, is_integer, is_matrix};
use lowp_file::{Model, Setup};
use lowp_format::{Recipe, has_tensor_scale};

#[derive(Debug)]
pub(super) struct Select {
    /// What is quantized; no pattern means all matrices.
    pub(super) tensors: Vec<Pattern>,
    /// What is not, whatever else matches it.
    pub(super) ignored: Vec<Pattern>,
    pub(super) amax_groups: Vec<String>,
    pub(super) skip_unsupported: bool,
}

/// The error of a pattern, given by `option`, that matches no `kind` of `model`.
fn unmatched(pattern: &Pattern, option: &str, kind: &str, model: &Model) -> anyhow::Error {
    input_error(format!(
        "{option} '{}' matches no {kind} of {}; `lowp inspect` lists their names",
        shown(&pattern.text),
        model.path().display()
    ))
}

/// What becomes of the tensors of a model.
#[derive(Debug)]
pub(super) struct Chosen<'a> {
    pub(super) choices: Choices<'a>,
    /// Matrices of integers, and their dtypes.
    integers: Vec<Kept<'a>>,
}

impl Select {
    /// Decides for every tensor of `model`, in the order of names.
    pub(super) fn choose<'a>(&self, model: &'a Model, setup: &Setup) -> Result<Chosen<'a>> {
        let mut choices = Choices::new(model, setup, |name| self.selects(name))?;
        self.check_patterns(model)?;
        if let Some((name, why)) = choices
            .unsupported()
            .first()
            .filter(|_| !self.skip_unsupported)
        {
            return Err(input_error(format!(
                "{}: '{}' cannot be quantized: {}; --skip-unsupported passes such tensors through, --ignore this one",
                model.path().display(),
                shown(name),
                message(why)
            )));
        }
        let groups = self.groups(&choices, setup)?;
        choices.group(&groups)?;
        let integers = model.tensors().filter(|tensor| {
            tensor.shape.len() >= 2 && is_integer(tensor.dtype) && !self.ignores(tensor.name)
        });
        let integers = integers.map(|tensor| (tensor.name, tensor.dtype.to_string()));
        Ok(Chosen {
            integers: integers.collect(),
            choices,
        })
    }

    fn check_patterns(&self, model: &Model) -> Result<()> {
        for pattern in &self.tensors {
            let matching = || {
                model
                    .tensors()
                    .filter(|tensor| pattern.matches(tensor.name))
            };
            let kind = match (matching().next(), matching().find(is_matrix)) {
                (_, Some(_)) => continue,
                (Some(_), None) => "tensor of two or more dimensions that does not hold integers",
                (None, None) => "tensor",
            };
            return Err(unmatched(pattern, "--tensors", kind, model));
        }
        for pattern in &self.ignored {
            if !model.tensors().any(|tensor| pattern.matches(tensor.name)) {
                return Err(unmatched(pattern, "--ignore", "tensor", model));
            }
        }
        Ok(())
    }

    /// The groups that have one amax, as numbers of tensors that are quantized.
    fn groups(&self, choices: &Choices<'_>, setup: &Setup) -> Result<Vec<Vec<usize>>> {
        let recipe = &setup.recipe;
        if are_patterns(&self.amax_groups) {
            if !has_tensor_scale(recipe) {
                return Err(input_error(format!(
                    "{AMAX_GROUP}: no scale of {} depends on the amax of a whole tensor; leave the option out",
                    recipe.name()
                )));
            }
        } else if !has_tensor_scale(recipe) || setup.delayed_scale.is_some() {
            // No amax, or a scale that is given.
            return Ok(Vec::new());
        }
        let names = choices.quantized();
        let groups = amax_groups(&self.amax_groups, &names, || {
            format!(
                "{} tensors are quantized; `lowp inspect` lists them",
                names.len()
            )
        });
        Ok(groups.map_err(of_patterns(AMAX_GROUP))?)
    }

    fn selects(&self, name: &str) -> bool {
        let asked = self.tensors.is_empty() || self.tensors.iter().any(|p| p.matches(name));
        asked && !self.ignores(name)
    }

    fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|pattern| pattern.matches(name))
    }
}

impl Chosen<'_> {
    /// Says what was done with them: `verb` is the past tense of it.
    pub(super) fn tell(&self, verb: &str, summary: &Summary, read: u64, written: u64) {
        let (all, quantized) = (self.choices.all(), self.choices.quantized().len());
        if quantized == 0 {
            note("warning: nothing was quantized: every tensor was copied unchanged");
        }
        summary.kept(
            "tensors that the recipe cannot take and",
            self.choices.unsupported(),
        );
        if summary.is_watched() {
            summary.kept("matrices of integers", &self.integers);
            let groups = all.iter().filter_map(|choice| choice.group).max();
            if let Some(last) = groups {
                note(&format!(
                    "note: tensors of {} groups have one amax each ({AMAX_GROUP} none gives every tensor its own)",
                    last + 1
                ));
            }
        }
        let what = format!("{verb} {quantized} of {} tensors", all.len());
        summary.done(&what, read, written);
    }
}
