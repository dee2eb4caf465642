//! Which tensors of a model are quantized, and which pass through.

use super::args::Setup;
use super::fields;
use super::meta;
use super::model::{Model, Tensor};
use super::names::Named;
use super::refuse::{refuse, refuse_file};
use anyhow::Result;
use globset::GlobMatcher;
use lowp_format::{Recipe, Shape};
use safetensors::Dtype;

/// The rule.
#[derive(Debug)]
pub(super) struct Select {
    /// Patterns with their text; none means all tensors.
    globs: Vec<(String, GlobMatcher)>,
    keep_unfit: bool,
}

/// A tensor and what becomes of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice<'a> {
    pub(super) tensor: Tensor<'a>,
    /// The matrix to quantize; `None` passes the tensor through.
    pub(super) matrix: Option<Matrix>,
}

/// A matrix and how it is quantized.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) shape: Shape,
    pub(super) setup: Setup,
}

/// Refuses a model that holds quantized tensors.
///
/// # Errors
/// Names the first.
pub(super) fn refuse_quantized(model: &Model) -> Result<()> {
    match meta::quantized(model)?.keys().next() {
        None => Ok(()),
        Some(name) => Err(refuse_file(
            model.path(),
            format!(
                "'{name}' is quantized already; give the model before it was, or decode it first (lowp dequantize)"
            ),
        )),
    }
}

impl Select {
    /// A rule that quantizes what matches one of `globs`.
    pub(super) fn new(globs: Vec<(String, GlobMatcher)>, keep_unfit: bool) -> Self {
        Self { globs, keep_unfit }
    }

    /// Decides for every tensor of `model`, in the order of names.
    ///
    /// # Errors
    /// A tensor that the recipe cannot take, unless such are kept; a pattern that no matrix matches; a model that is
    /// quantized already.
    pub(super) fn choose<'a>(&self, model: &'a Model, setup: &Setup) -> Result<Vec<Choice<'a>>> {
        refuse_quantized(model)?;
        for (text, glob) in &self.globs {
            let matching = || model.tensors().filter(|tensor| glob.is_match(tensor.name));
            let kind = match (matching().next(), matching().find(is_matrix)) {
                (_, Some(_)) => continue,
                (Some(_), None) => "tensor of two or more dimensions",
                (None, None) => "tensor",
            };
            return Err(refuse(format!(
                "--tensors '{text}' matches no {kind} of {}; `lowp inspect` lists their names",
                model.path().display()
            )));
        }
        model
            .tensors()
            .map(|tensor| {
                let matrix = match self.wanted(&tensor).then(|| fit(&tensor, setup)) {
                    None => None,
                    Some(Ok(shape)) => Some(Matrix {
                        shape,
                        setup: *setup,
                    }),
                    Some(Err(_)) if self.keep_unfit => None,
                    Some(Err(why)) => {
                        let Tensor { name, .. } = tensor;
                        let why = format!(
                            "'{name}' cannot be quantized: {why}; --keep-unfit passes such tensors through, --tensors \
                             leaves them out"
                        );
                        return Err(refuse_file(model.path(), why));
                    }
                };
                Ok(Choice { tensor, matrix })
            })
            .collect()
    }

    fn wanted(&self, tensor: &Tensor<'_>) -> bool {
        let matches = |(_, glob): &(String, GlobMatcher)| glob.is_match(tensor.name);
        is_matrix(tensor) && (self.globs.is_empty() || self.globs.iter().any(matches))
    }
}

/// Whether a tensor is one of those that are quantized; others pass through.
fn is_matrix(tensor: &Tensor<'_>) -> bool {
    tensor.shape.len() >= 2
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
    Ok(shape)
}
