//! [`Recipe`]: a recipe with its options, and what PyTorch must know of its buffers.

use std::hash::{Hash, Hasher};

use lowp_format::{
    AnyRecipe, Axis, Extent, Orientation, Origin, Part, Recipe as _, RecipeOptions, Role,
    ScaleRule, Shape, Usage,
};
use lowp_gemm::GemmKind;
use lowp_gemm::table::Pass;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::error::Error;

/// A recipe with its options.
#[pyclass(frozen, eq, module = "lowp")]
#[derive(Debug, PartialEq)]
pub(crate) struct Recipe {
    pub(crate) recipe: AnyRecipe,
}

/// A recipe as a part of a key: its options have floats, which nothing hashes.
#[derive(Clone, PartialEq)]
pub(crate) struct ByName(pub(crate) AnyRecipe);

/// Options are numbers: none is unequal to itself.
impl Eq for ByName {}

impl Hash for ByName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.name().hash(state);
    }
}

/// A buffer of a tensor, as Python sees it.
#[pyclass(frozen, get_all, module = "lowp._lowp")]
pub(crate) struct Buffer {
    name: String,
    bytes: usize,
    /// Whether rows are the first physical axis.
    rows_first: bool,
    /// Rows that share an entry; 0 where all do.
    entry_rows: usize,
    /// Bytes of a physical row.
    row_bytes: usize,
    /// Bits of an entry.
    entry_bits: usize,
    /// Whether it is a transpose of another one.
    is_transpose: bool,
}

/// `both`, `rowwise` or `columnwise`.
pub(crate) fn usage(text: &str) -> Result<Usage, Error> {
    let all = [Usage::BOTH, Usage::ROWWISE, Usage::COLUMNWISE];
    let found = all.into_iter().find(|usage| usage.label() == text);
    found.ok_or_else(|| Error::new(format!("usage '{text}'; give both, rowwise or columnwise")))
}

/// `rowwise` or `columnwise`.
pub(crate) fn orientation_of(text: &str) -> Result<Orientation, Error> {
    match text {
        "rowwise" => Ok(Orientation::Rowwise),
        "columnwise" => Ok(Orientation::Columnwise),
        other => Err(Error::new(format!(
            "orientation '{other}'; give rowwise or columnwise"
        ))),
    }
}

/// `weight`, `activation` or `gradient`.
fn role(text: &str) -> Result<Role, Error> {
    match text {
        "weight" => Ok(Role::Weight),
        "activation" => Ok(Role::Activation),
        "gradient" => Ok(Role::Gradient),
        other => Err(Error::new(format!(
            "role '{other}'; give weight, activation or gradient"
        ))),
    }
}

#[pymethods]
impl Recipe {
    #[new]
    #[pyo3(signature = (name, **options))]
    fn new(name: &str, options: Option<&Bound<'_, PyDict>>) -> Result<Self, Error> {
        let mut texts = RecipeOptions::default();
        for (option, value) in options.into_iter().flatten() {
            let option: String = option.extract()?;
            let value = match value.cast::<PyString>() {
                Ok(text) => text.to_string(),
                // True, 1.5: as the command writes them.
                Err(_) => value.str()?.to_string().to_lowercase(),
            };
            texts.set(&option, &value);
        }
        let recipe = AnyRecipe::from_name(name, &texts)?;
        Ok(Self { recipe })
    }

    /// The name.
    #[getter]
    fn name(&self) -> &'static str {
        self.recipe.name()
    }

    /// The options that differ from the defaults, or all, by name.
    #[getter]
    fn options<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, text) in self.recipe.options().iter() {
            dict.set_item(name, text)?;
        }
        Ok(dict)
    }

    /// Whether weights of `other` have the same codes and scales: it may quantize gradients otherwise.
    fn has_weights_of(&self, other: &Self) -> bool {
        let weights = |recipe: &AnyRecipe| recipe.quantizers(Role::Weight);
        self.recipe.name() == other.recipe.name() && weights(&self.recipe) == weights(&other.recipe)
    }

    /// Raises where a tensor of `rows` x `cols` cannot have the recipe.
    fn check(&self, rows: usize, cols: usize) -> Result<(), Error> {
        let shape = Shape::new(rows, cols);
        shape.check()?;
        Ok(self.recipe.check(shape)?)
    }

    /// Raises where tensors of the recipe cannot be cast with an encode scale that is given.
    pub(crate) fn check_encode_scale(&self, encode_scale: f32) -> Result<(), Error> {
        let quantizers = self.recipe.quantizers(Role::Weight);
        let of = |orientation| quantizers.of(orientation).kernel.scale.is_delayed();
        if !of(Orientation::Rowwise) && !of(Orientation::Columnwise) {
            return Err(Error::new(format!(
                "encode_scale={encode_scale:?} was given for {}, whose scales follow from the values; leave it out, or choose a recipe with delayed scales",
                self.name()
            )));
        }
        // Codes are decoded by its inverse.
        if !(encode_scale > 0.0 && encode_scale.is_finite() && encode_scale.recip().is_finite()) {
            return Err(Error::new(format!(
                "encode_scale={encode_scale:?} as a float32; give a finite number above 0 whose inverse is finite, too"
            )));
        }
        Ok(())
    }

    /// The multiple at which rows are cut for shards that serve both phases.
    #[getter]
    fn row_quantum(&self) -> usize {
        self.recipe.row_quantum(Usage::BOTH)
    }

    /// Raises where rows cannot be cut within blocks: with four over six, which chooses by whole blocks.
    fn check_cut_blocks(&self) -> Result<(), Error> {
        Ok(lowp_shard::check_flat(&self.recipe, Usage::BOTH)?)
    }

    /// Whether codes are narrower than 16 bits.
    #[getter]
    fn is_low_precision(&self) -> bool {
        self.recipe.quantizers(Role::Weight).is_low_precision()
    }

    /// Whether a file says the amax of the values, which is in no buffer.
    #[getter]
    fn keeps_amax(&self) -> bool {
        lowp_file::select::keeps_amax(&self.recipe)
    }

    /// The buffers of a tensor of `rows` x `cols`; with `stored`, those that a shard stores; with `cut_of`, those that a shard
    /// stores whose rows, of as many, may begin and end within blocks: all rows share its scales.
    #[pyo3(signature = (rows, cols, usage = "both", stored = false, cut_of = None))]
    fn buffers(
        &self,
        rows: usize,
        cols: usize,
        usage: &str,
        stored: bool,
        cut_of: Option<usize>,
    ) -> Result<Vec<Buffer>, Error> {
        let usage = self::usage(usage)?;
        self.check(rows, cols)?;
        let specs = match (cut_of, stored) {
            (Some(_), _) => self.recipe.stored_cut_anywhere(usage),
            (None, true) => self.recipe.stored(usage),
            (None, false) => self.recipe.buffers(usage),
        };
        let row = |spec: &lowp_format::BufferSpec| {
            let rows_first = spec.axes[0] == Axis::Rows;
            let side = spec.tile[usize::from(!rows_first)];
            let shared = cut_of.filter(|_| spec.key.part != Part::Data);
            let side = if shared.is_some() || side == lowp_format::BufferSpec::WHOLE {
                0
            } else {
                side
            };
            let shape = Shape::new(shared.unwrap_or(rows), cols);
            Buffer {
                name: spec.key.to_string(),
                bytes: spec.bytes(shape),
                rows_first,
                entry_rows: side,
                row_bytes: spec.row_bytes(shape),
                entry_bits: spec.code.bits(),
                is_transpose: matches!(spec.origin, Origin::TransposeOf(_)),
            }
        };
        Ok(specs.iter().map(row).collect())
    }

    /// How the codes of `orientation` of a tensor in `role` (`weight`, `activation`, `gradient`) are multiplied: the element's name, and what its
    /// scales are of: `tensor`, `rows`, `1x128` or `128x128`, or nothing that products take here.
    #[pyo3(signature = (orientation, role = "weight"))]
    fn product(
        &self,
        orientation: &str,
        role: &str,
    ) -> Result<(String, Option<&'static str>), Error> {
        let orientation = orientation_of(orientation)?;
        let quantizers = self.recipe.quantizers(self::role(role)?);
        let kernel = quantizers.of(orientation).kernel;
        let scale = match (kernel.scale, kernel.block) {
            (ScaleRule::BlockF32 { .. }, Some([128, 128])) => Some("128x128"),
            (ScaleRule::BlockF32 { .. }, Some([1, 128] | [128, 1])) => Some("1x128"),
            (rule, None) => match rule.outer() {
                Some((Extent::Tensor, _)) => Some("tensor"),
                Some((Extent::Line, _)) => Some("rows"),
                None => None,
            },
            _ => None,
        };
        Ok((format!("{:?}", kernel.element), scale))
    }

    /// The products of a layer (forward, gradient of the input, gradient of the weight) on a GPU of this compute capability.
    fn products(&self, major: i32, minor: i32) -> Vec<String> {
        let of = |pass| GemmKind::of_recipe(&self.recipe, pass, (major, minor));
        Pass::ALL.map(|pass| format!("{:?}", of(pass))).to_vec()
    }

    fn __repr__(&self) -> String {
        let mut text = format!("lowp.Recipe({:?}", self.name());
        for (name, value) in self.recipe.options().iter() {
            text += &format!(", {name}={value:?}");
        }
        text + ")"
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        // Options are floats, too, which nothing hashes; a program uses few of one recipe.
        let mut hasher = DefaultHasher::new();
        self.recipe.name().hash(&mut hasher);
        hasher.finish()
    }
}

/// The names of all recipes.
#[pyfunction]
pub(crate) fn recipes() -> Vec<&'static str> {
    AnyRecipe::names()
}
