//! Which tensors of a model are quantized, and which pass through.

pub use crate::error::SetupError;
pub use crate::fields::keeps_amax;

use crate::cast::{has_delayed_scale, is_scale};
use crate::dtypes::{Dtypes, Named};
use crate::error::{Result, file_error, input_error, mend_file};
use crate::fields::{self, Field};
use crate::interchange::record::PREFIX;
use crate::meta;
use crate::model::{Model, Tensor};
use crate::remedy::Remedy;
use crate::text::shown;
use lowp_format::{AnyRecipe, Form, FormatError, Recipe, Shape, Usage, has_tensor_scale};
use safetensors::Dtype;

/// How tensors are quantized.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The recipe that weights are quantized by.
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

    pub(crate) fn fields(&self, shape: Shape) -> Result<Vec<Field>, FormatError> {
        let specs = self.recipe.buffers(self.usage);
        fields::fields(&self.recipe, &specs, shape, self.usage, self.form)
    }

    /// Checks that the recipe takes the delayed scale.
    ///
    /// # Errors
    /// It has none, or values cannot be encoded with this one.
    pub fn check(&self) -> Result<(), SetupError> {
        let Some(scale) = self.delayed_scale else {
            return Ok(());
        };
        if !has_delayed_scale(&self.recipe) {
            let recipe = self.recipe.name();
            return Err(SetupError::NoDelayedScale { recipe });
        }
        match is_scale(scale) {
            true => Ok(()),
            false => Err(SetupError::NotAScale { scale }),
        }
    }
}

/// What files have of a recipe unless an option says otherwise: a file holds no gradients.
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
    pub(crate) model: &'a Model,
    pub(crate) setup: Setup,
    pub(crate) all: Vec<Choice<'a>>,
    unsupported: Vec<(&'a str, String)>,
}

/// A matrix and how it is quantized.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Rows and columns; leading dimensions of the tensor are rows.
    pub shape: Shape,
    /// How it is quantized.
    pub setup: Setup,
}

pub(crate) fn reject_quantized(model: &Model) -> Result<()> {
    if model.metadata().keys().any(|key| key.starts_with(PREFIX)) {
        return Err(mend_file(
            model.path(),
            "it was exported, and is quantized already",
            Remedy::Import,
        ));
    }
    match meta::quantized(model)?.keys().next() {
        None => Ok(()),
        Some(name) => Err(mend_file(
            model.path(),
            format!("'{}' is quantized already", shown(name)),
            Remedy::Dequantize,
        )),
    }
}

impl<'a> Choices<'a> {
    /// Decides for every tensor of `model`, in the order of names: the matrices that `selects` names are quantized where the recipe can take
    /// them.
    ///
    /// # Errors
    /// A model that is quantized already, or a setup that no cast has.
    pub fn new(model: &'a Model, setup: &Setup, selects: impl Fn(&str) -> bool) -> Result<Self> {
        setup.check()?;
        reject_quantized(model)?;
        let mut chosen = Self {
            model,
            setup: *setup,
            all: Vec::new(),
            unsupported: Vec::new(),
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
                    Err(why) => chosen.unsupported.push((tensor.name, why)),
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

    /// All tensors, in the order of names.
    pub fn all(&self) -> &[Choice<'a>] {
        &self.all
    }

    /// Those that were selected and that the recipe cannot take, and why.
    pub fn unsupported(&self) -> &[(&'a str, String)] {
        &self.unsupported
    }

    pub(crate) fn are_of(&self, model: &Model) -> Result<()> {
        match std::ptr::eq(self.model, model) {
            true => Ok(()),
            false => Err(file_error!(
                model.path(),
                "the choices are those of another model, {}; choose tensors of the model that is quantized",
                self.model.path().display()
            )),
        }
    }

    /// The names of those that are quantized.
    pub fn quantized(&self) -> Vec<&'a str> {
        let quantized = self.all.iter().filter(|choice| choice.matrix.is_some());
        quantized.map(|choice| choice.tensor.name).collect()
    }

    /// Gives the tensors of each group one amax, that of them all; members are numbers of [`Choices::quantized`].
    ///
    /// # Errors
    /// A recipe in which no scale follows from the amax of a tensor, a group of fewer than two, a number that there is not, or one in two
    /// groups.
    pub fn group(&mut self, groups: &[Vec<usize>]) -> Result<()> {
        if !groups.is_empty() && !has_tensor_scale(&self.setup.recipe) {
            return Err(input_error(format!(
                "no scale of {} depends on the amax of a whole tensor, so tensors cannot share one",
                self.setup.recipe.name()
            )));
        }
        check_groups(groups, self.quantized().len())?;
        let quantized = self.all.iter_mut().filter(|choice| choice.matrix.is_some());
        let mut quantized: Vec<&mut Choice<'_>> = quantized.collect();
        for (number, group) in groups.iter().enumerate() {
            for &member in group {
                quantized[member].group = Some(number);
            }
        }
        Ok(())
    }
}

/// Checks groups of the numbers of `len` tensors.
pub(crate) fn check_groups(groups: &[Vec<usize>], len: usize) -> Result<()> {
    let mut grouped = vec![false; len];
    for group in groups {
        if group.len() < 2 {
            return Err(input_error(format!(
                "a group of {} tensors; those that have one amax are two or more",
                group.len()
            )));
        }
        for &member in group {
            match grouped.get_mut(member) {
                Some(known @ false) => *known = true,
                Some(true) => {
                    return Err(input_error(format!(
                        "tensor {member} is in two groups, or twice in one; a tensor has one amax"
                    )));
                }
                None => {
                    return Err(input_error(format!(
                        "a group has tensor {member}, and there are {len}, counted from 0"
                    )));
                }
            }
        }
    }
    Ok(())
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
    let problem = |e: FormatError| e.to_string();
    let shape = fields::matrix(tensor.shape).map_err(problem)?;
    setup.recipe.check(shape).map_err(problem)?;
    if shape.elements() == 0 {
        let specs = setup.recipe.buffers(setup.usage);
        let lines = fields::worked(shape, shape, &specs);
        if lines.rows.max(lines.cols) > MAX_EMPTY_LINES {
            return Err(format!(
                "{shape} has no elements, and {} keeps a number of each line; at most {MAX_EMPTY_LINES} are written of such a tensor",
                setup.recipe.name()
            ));
        }
    }
    Ok(shape)
}
