//! Which tensors of a model are quantized, and which pass through.

pub use crate::cast::{has_delayed_scale, is_scale};
pub use crate::fields::keeps_amax;

use crate::error::{Result, file_error};
use crate::fields;
use crate::interchange::record::PREFIX;
use crate::meta;
use crate::model::{Model, Tensor};
use crate::names::{Dtypes, Named};
use crate::text::shown;
use lowp_format::{AnyRecipe, Form, Recipe, Shape, Usage};
use safetensors::Dtype;

/// How tensors are quantized.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The recipe.
    pub recipe: AnyRecipe,
    /// The orientations that are written.
    pub usage: Usage,
    /// Of the block scales.
    pub form: Form,
    /// The encode scale of delayed scaling; `None` takes that of the amax.
    pub delayed_scale: Option<f32>,
    /// What codes are called.
    pub dtypes: Dtypes,
}

impl Setup {
    /// `recipe` for both orientations, with scales as TransformerEngine keeps them.
    pub fn new(recipe: AnyRecipe) -> Self {
        Self {
            recipe,
            usage: Usage::BOTH,
            form: Form::Padded,
            delayed_scale: None,
            dtypes: Dtypes::default(),
        }
    }
}

/// What files have of a recipe unless they are told otherwise: a file holds no gradients.
pub const DEFAULTS: [(&str, &str); 1] = [("format", "e4m3")];

/// A tensor and what becomes of it.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// The tensor.
    pub tensor: Tensor<'a>,
    /// The matrix to quantize; `None` passes the tensor through.
    pub matrix: Option<Matrix>,
    /// The number of those that it has one amax with.
    pub group: Option<usize>,
}

/// What becomes of the tensors of a model.
#[derive(Debug)]
pub struct Choices<'a> {
    /// All of them, in the order of names.
    pub all: Vec<Choice<'a>>,
    /// Those that were selected and that the recipe cannot take, and why.
    pub unfit: Vec<(&'a str, String)>,
}

/// A matrix and how it is quantized.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// The dimensions.
    pub shape: Shape,
    /// How it is quantized.
    pub setup: Setup,
}

/// Rejects a model that holds quantized tensors.
pub(crate) fn reject_quantized(model: &Model) -> Result<()> {
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

impl<'a> Choices<'a> {
    /// Decides for every tensor of `model`, in the order of names: the matrices that `selects` names are quantized where the recipe can take
    /// them.
    ///
    /// # Errors
    /// A model that is quantized already.
    pub fn new(model: &'a Model, setup: &Setup, selects: impl Fn(&str) -> bool) -> Result<Self> {
        reject_quantized(model)?;
        let mut chosen = Self {
            all: Vec::new(),
            unfit: Vec::new(),
        };
        for tensor in model.tensors() {
            let mut matrix = None;
            if is_matrix(&tensor) && selects(tensor.name) {
                match fit(&tensor, setup) {
                    Ok(shape) => {
                        matrix = Some(Matrix {
                            shape,
                            setup: *setup,
                        });
                    }
                    Err(why) => chosen.unfit.push((tensor.name, why)),
                }
            }
            chosen.all.push(Choice {
                tensor,
                matrix,
                group: None,
            });
        }
        Ok(chosen)
    }

    /// The names of those that are quantized.
    pub fn quantized(&self) -> Vec<&'a str> {
        let quantized = self.all.iter().filter(|choice| choice.matrix.is_some());
        quantized.map(|choice| choice.tensor.name).collect()
    }

    /// Gives the tensors of each group one amax, that of them all; members are numbers of [`Choices::quantized`].
    pub fn group(&mut self, groups: &[Vec<usize>]) {
        let quantized = self.all.iter_mut().filter(|choice| choice.matrix.is_some());
        let mut quantized: Vec<&mut Choice<'_>> = quantized.collect();
        for (number, group) in groups.iter().enumerate() {
            for &member in group {
                if let Some(choice) = quantized.get_mut(member) {
                    choice.group = Some(number);
                }
            }
        }
    }
}

/// Most rows or columns of a tensor without elements that have a scale or an amax each: a file states any number of them.
const MAX_EMPTY_LINES: usize = 1 << 20;

/// Whether a tensor is one of those that are quantized; others pass through.
pub fn is_matrix(tensor: &Tensor<'_>) -> bool {
    tensor.shape.len() >= 2 && !is_integer(tensor.dtype)
}

/// Whether a dtype counts: indices, masks and packed codes are no weights.
pub fn is_integer(dtype: Dtype) -> bool {
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
