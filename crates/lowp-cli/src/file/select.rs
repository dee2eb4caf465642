//! Which tensors of a model are quantized, and which pass through.

use super::args::Setup;
use super::fields;
use super::input_error::{file_error, input_error};
use super::interchange::record::PREFIX;
use super::meta;
use super::model::{Model, Tensor};
use super::names::Named;
use super::summary::{Kept, Summary};
use crate::amax_groups::{self, OPTION};
use crate::globs;
use crate::output::{message, note, shown};
use crate::train::has_tensor_scale;
use anyhow::Result;
use globset::GlobMatcher;
use lowp_format::{Recipe, Shape};
use safetensors::Dtype;

/// The rule that `--tensors`, `--ignore` and `--keep-unfit` make.
#[derive(Debug)]
pub(super) struct Select {
    /// What is quantized; no pattern means all matrices.
    pub(super) tensors: Vec<Pattern>,
    /// What is not, whatever else matches it.
    pub(super) ignored: Vec<Pattern>,
    /// Patterns of tensors that have one amax.
    pub(super) amax_groups: Vec<String>,
    pub(super) keep_unfit: bool,
}

/// A pattern of tensor names, with its text.
#[derive(Debug)]
pub(super) struct Pattern {
    pub(super) text: String,
    pub(super) glob: GlobMatcher,
}

impl Pattern {
    fn matches(&self, tensor: &Tensor<'_>) -> bool {
        globs::is_match(&self.glob, tensor.name)
    }

    /// The error of a pattern, given by `option`, that matches no `kind` of `model`.
    fn unmatched(&self, option: &str, kind: &str, model: &Model) -> anyhow::Error {
        input_error(format!(
            "{option} '{}' matches no {kind} of {}; `lowp inspect` lists their names",
            shown(&self.text),
            model.path().display()
        ))
    }
}

/// A tensor and what becomes of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice<'a> {
    pub(super) tensor: Tensor<'a>,
    /// The matrix to quantize; `None` passes the tensor through.
    pub(super) matrix: Option<Matrix>,
    /// The number of those that it has one amax with.
    pub(super) group: Option<usize>,
}

/// What becomes of the tensors of a model.
#[derive(Debug)]
pub(super) struct Choices<'a> {
    /// All of them, in the order of names.
    pub(super) all: Vec<Choice<'a>>,
    /// Those that the recipe cannot take, and why.
    unfit: Vec<Kept<'a>>,
    /// Matrices of integers, and their dtypes.
    integers: Vec<Kept<'a>>,
}

impl Choices<'_> {
    /// Says what was done with them: `verb` is the past tense of it.
    pub(super) fn tell(&self, verb: &str, summary: &Summary, read: u64, written: u64) {
        let quantized = self
            .all
            .iter()
            .filter(|choice| choice.matrix.is_some())
            .count();
        if quantized == 0 {
            note("warning: nothing was quantized: every tensor passed through as it was");
        }
        summary.kept("tensors that the recipe cannot take and", &self.unfit);
        if summary.is_told() {
            summary.kept("matrices of integers", &self.integers);
            let groups = self.all.iter().filter_map(|choice| choice.group).max();
            if let Some(last) = groups {
                note(&format!(
                    "note: tensors of {} groups have one amax each ({OPTION} none gives every tensor its own)",
                    last + 1
                ));
            }
        }
        let what = format!("{verb} {quantized} of {} tensors", self.all.len());
        summary.done(&what, read, written);
    }
}

/// A matrix and how it is quantized.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) shape: Shape,
    pub(super) setup: Setup,
}

/// Rejects a model that holds quantized tensors.
///
/// # Errors
/// Names the first.
pub(super) fn reject_quantized(model: &Model) -> Result<()> {
    if model.metadata().keys().any(|key| key.starts_with(PREFIX)) {
        return Err(file_error(
            model.path(),
            "it was written by lowp export and is quantized already; give the model before it was, or `lowp import` it first",
        ));
    }
    match meta::quantized(model)?.keys().next() {
        None => Ok(()),
        Some(name) => Err(file_error(
            model.path(),
            format!(
                "'{}' is quantized already; give the model before it was, or decode it first (lowp dequantize)",
                shown(name)
            ),
        )),
    }
}

impl Select {
    /// Decides for every tensor of `model`, in the order of names.
    ///
    /// # Errors
    /// A tensor that the recipe cannot take, unless such are kept; a pattern that no matrix, or one to ignore that no
    /// tensor matches; a model that is quantized already.
    pub(super) fn choose<'a>(&self, model: &'a Model, setup: &Setup) -> Result<Choices<'a>> {
        reject_quantized(model)?;
        for pattern in &self.tensors {
            let matching = || model.tensors().filter(|tensor| pattern.matches(tensor));
            let kind = match (matching().next(), matching().find(is_matrix)) {
                (_, Some(_)) => continue,
                (Some(_), None) => "tensor of two or more dimensions that are no integers",
                (None, None) => "tensor",
            };
            return Err(pattern.unmatched("--tensors", kind, model));
        }
        for pattern in &self.ignored {
            if !model.tensors().any(|tensor| pattern.matches(&tensor)) {
                return Err(pattern.unmatched("--ignore", "tensor", model));
            }
        }
        let mut chosen = Choices {
            all: Vec::new(),
            unfit: Vec::new(),
            integers: Vec::new(),
        };
        for tensor in model.tensors() {
            let mut matrix = None;
            if self.selects(&tensor) {
                match fit(&tensor, setup) {
                    Ok(shape) => {
                        matrix = Some(Matrix {
                            shape,
                            setup: *setup,
                        });
                    }
                    Err(why) if self.keep_unfit => chosen.unfit.push((tensor.name, why)),
                    Err(why) => {
                        let why = format!(
                            "'{}' cannot be quantized: {}; --keep-unfit passes such tensors through, --ignore this one",
                            shown(tensor.name),
                            message(&why)
                        );
                        return Err(file_error(model.path(), why));
                    }
                }
            } else if tensor.shape.len() >= 2 && is_integer(tensor.dtype) && !self.ignores(&tensor)
            {
                chosen
                    .integers
                    .push((tensor.name, tensor.dtype.to_string()));
            }
            chosen.all.push(Choice {
                tensor,
                matrix,
                group: None,
            });
        }
        self.group(&mut chosen.all, setup)?;
        Ok(chosen)
    }

    /// Notes the groups that have one amax.
    fn group(&self, choices: &mut [Choice<'_>], setup: &Setup) -> Result<()> {
        if amax_groups::are_patterns(&self.amax_groups) {
            shares_amax(&setup.recipe)?;
        } else if !has_tensor_scale(&setup.recipe) || setup.delayed_scale.is_some() {
            // No amax, or a scale that is given.
            return Ok(());
        }
        let mut quantized: Vec<&mut Choice<'_>> = choices
            .iter_mut()
            .filter(|choice| choice.matrix.is_some())
            .collect();
        let names: Vec<&str> = quantized.iter().map(|choice| choice.tensor.name).collect();
        let groups = amax_groups::groups(&self.amax_groups, &names, || {
            format!(
                "{} tensors are quantized; `lowp inspect` lists them",
                names.len()
            )
        })?;
        for (number, group) in groups.into_iter().enumerate() {
            for member in group {
                quantized[member].group = Some(number);
            }
        }
        Ok(())
    }

    fn selects(&self, tensor: &Tensor<'_>) -> bool {
        let asked = self.tensors.is_empty() || self.tensors.iter().any(|p| p.matches(tensor));
        is_matrix(tensor) && asked && !self.ignores(tensor)
    }

    fn ignores(&self, tensor: &Tensor<'_>) -> bool {
        self.ignored.iter().any(|pattern| pattern.matches(tensor))
    }
}

/// Checks that a scale of `recipe` follows from the amax of the tensor, so that tensors can have one together.
///
/// # Errors
/// Its scales are all of blocks or lines.
pub(super) fn shares_amax(recipe: &impl Recipe) -> Result<()> {
    match has_tensor_scale(recipe) {
        true => Ok(()),
        false => Err(input_error(format!(
            "{OPTION}: no scale of {} follows from the amax of a whole tensor; leave it out",
            recipe.name()
        ))),
    }
}

/// Most rows or columns of a tensor without elements that have a scale or an amax each: a file states any number of them.
const MAX_EMPTY_LINES: usize = 1 << 20;

/// Whether a tensor is one of those that are quantized; others pass through.
fn is_matrix(tensor: &Tensor<'_>) -> bool {
    tensor.shape.len() >= 2 && !is_integer(tensor.dtype)
}

/// Whether a dtype counts: indices, masks and packed codes are no weights.
fn is_integer(dtype: Dtype) -> bool {
    matches!(
        dtype,
        Dtype::BOOL
            | Dtype::U8
            | Dtype::I8
            | Dtype::U16
            | Dtype::I16
            | Dtype::U32
            | Dtype::I32
            | Dtype::U64
            | Dtype::I64
    )
}

/// The matrix of a tensor that the recipe can take, or why it cannot.
fn fit(tensor: &Tensor<'_>, setup: &Setup) -> Result<Shape, String> {
    if !Dtype::ALL.contains(&tensor.dtype) {
        return Err(format!(
            "its dtype is {} and only F32, BF16 and F16 are quantized (convert it first)",
            tensor.dtype
        ));
    }
    let problem = |e: lowp_format::FormatError| e.to_string();
    let shape = fields::matrix(tensor.shape).map_err(problem)?;
    setup.recipe.check(shape).map_err(problem)?;
    if shape.elements() == 0 {
        let specs = setup.recipe.buffers(setup.usage);
        let lines = fields::worked([shape; 2], &specs);
        if lines.rows.max(lines.cols) > MAX_EMPTY_LINES {
            return Err(format!(
                "{shape} has no elements, and {} keeps a number of each line; at most {MAX_EMPTY_LINES} are written of such a tensor",
                setup.recipe.name()
            ));
        }
    }
    Ok(shape)
}
