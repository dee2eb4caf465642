//! The table of targets: the tensors that a quantized weight becomes for each of them, and which weights each can hold.
//!
//! A row says which rowwise operand it holds by its ingredients, so that a recipe has a form or not by what it is made of.

use crate::dtypes::OutputDtype;
use lowp_format::{
    AnyRecipe, BufferSpec, Code, Extent, FourOverSix, Orientation, Part, Recipe, RecipeOptions,
    Shape, two_level_encode_scale,
};
use safetensors::Dtype;

/// What [`crate::Export`] writes for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportTarget {
    /// Decoded to F32.
    Fp32,
    /// Decoded and rounded once to BF16, to nearest, ties to even.
    Bf16,
    /// Read by vLLM, SGLang and transformers.
    CompressedTensors,
    /// NVIDIA's ModelOpt: TensorRT-LLM, vLLM and SGLang read it.
    Modelopt,
    /// The files of DeepSeek-V3: scales of 128x128 blocks.
    Deepseek,
    /// Buffers with the names of TransformerEngine, and padded scales; lowp reads it directly.
    Te,
}

impl ExportTarget {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Fp32,
        Self::Bf16,
        Self::CompressedTensors,
        Self::Modelopt,
        Self::Deepseek,
        Self::Te,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::CompressedTensors => "compressed-tensors",
            Self::Modelopt => "modelopt",
            Self::Deepseek => "deepseek",
            Self::Te => "te",
        }
    }

    /// What values are decoded to, where they are.
    pub fn float(self) -> Option<OutputDtype> {
        match self {
            Self::Fp32 => Some(OutputDtype::F32),
            Self::Bf16 => Some(OutputDtype::Bf16),
            _ => None,
        }
    }

    /// Whether every recipe goes to it.
    pub fn takes_all(self) -> bool {
        matches!(self, Self::Fp32 | Self::Bf16 | Self::Te)
    }
}

/// The rowwise operand of a weight, by its ingredients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Operand {
    element: Code,
    /// Code of a block scale, and rows x columns of a block.
    block: Option<(Code, [usize; 2])>,
    /// What stands above block scales, or alone.
    outer: Option<(Extent, Part)>,
}

impl Operand {
    /// That of `recipe`, unless its values are transformed first.
    fn of(recipe: &impl Recipe) -> Option<Self> {
        let kernel = recipe.kernel(Orientation::Rowwise);
        let block = kernel.scale.entry();
        (!kernel.hadamard).then(|| Self {
            element: kernel.element,
            block: block.zip(kernel.block),
            outer: kernel.scale.outer(),
        })
    }

    /// Whether `self` can be stored as `form`: the same, or with scales of larger blocks, which are repeated.
    fn fits(&self, form: &Self) -> bool {
        if self.element != form.element {
            return false;
        }
        match (self.block, form.block) {
            (Some((code, [rows, cols])), Some((stored, [r, c]))) => {
                (code, cols) == (stored, c) && (rows == r || r == 1) && self.outer == form.outer
            }
            (None, Some((Code::F32, _))) => self.outer == Some((Extent::Tensor, Part::DecodeScale)),
            (None, None) => {
                let repeated = self.outer == Some((Extent::Tensor, Part::DecodeScale));
                self.outer == form.outer
                    || (repeated && form.outer == Some((Extent::Line, Part::DecodeScale)))
            }
            _ => false,
        }
    }

    pub(crate) fn scales(&self, shape: Shape) -> [usize; 2] {
        match (self.block, self.outer) {
            (Some((_, [rows, cols])), _) => [shape.rows.div_ceil(rows), shape.cols.div_ceil(cols)],
            (None, Some((Extent::Line, _))) => [shape.rows, 1],
            (None, _) => [1, 1],
        }
    }

    pub(crate) fn tile(&self) -> [usize; 2] {
        match (self.block, self.outer) {
            (Some((_, tile)), _) => tile,
            (None, Some((Extent::Line, _))) => [1, BufferSpec::WHOLE],
            (None, _) => [BufferSpec::WHOLE; 2],
        }
    }

    pub(crate) fn per_byte(&self) -> usize {
        self.element.entries_per_byte()
    }
}

/// E2M1 under an E4M3 scale of 16 elements and the amax of the tensor.
const FP4_TWO_LEVEL: Operand = Operand {
    element: Code::E2M1,
    block: Some((Code::E4M3, [1, 16])),
    outer: Some((Extent::Tensor, Part::Amax)),
};
const FP4_MX: Operand = Operand {
    element: Code::E2M1,
    block: Some((Code::E8M0, [1, 32])),
    outer: None,
};
const FP8_MX: Operand = Operand {
    element: Code::E4M3,
    ..FP4_MX
};
const FP8_TENSOR: Operand = Operand {
    element: Code::E4M3,
    block: None,
    outer: Some((Extent::Tensor, Part::DecodeScale)),
};
const FP8_ROWS: Operand = Operand {
    outer: Some((Extent::Line, Part::DecodeScale)),
    ..FP8_TENSOR
};
/// E4M3 under an f32 scale of 128x128 elements.
const FP8_TILES: Operand = Operand {
    element: Code::E4M3,
    block: Some((Code::F32, [128, 128])),
    outer: None,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Codes,
    /// Decode scales of blocks, rows or the tensor.
    Scales,
    /// The encode scale of the amax: `fl(largest / amax)`, docs/numerics.md 7.1.
    EncodeScale,
    /// The amax over what it is mapped to: `fl(amax / largest)`.
    AmaxShare,
}

/// How the axes of a stored tensor are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axes {
    /// Rows and columns.
    Matrix,
    /// Rows alone.
    Vector,
    /// Rows, 1, columns, 1.
    Blocks,
    /// One axis of length 1.
    One,
    /// None.
    Scalar,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored {
    /// What stands in the place of `weight` in the name.
    pub(crate) suffix: &'static str,
    pub(crate) dtype: Dtype,
    pub(crate) content: Content,
    pub(crate) axes: Axes,
}

impl Stored {
    pub(crate) fn dims(&self, operand: &Operand, shape: Shape) -> Vec<usize> {
        let [rows, cols] = match self.content {
            Content::Codes => [shape.rows, shape.cols.div_ceil(operand.per_byte())],
            Content::Scales => operand.scales(shape),
            Content::EncodeScale | Content::AmaxShare => [1, 1],
        };
        match self.axes {
            Axes::Matrix => vec![rows, cols],
            Axes::Vector => vec![rows],
            Axes::Blocks => vec![rows, 1, cols, 1],
            Axes::One => vec![1],
            Axes::Scalar => Vec::new(),
        }
    }

    /// What stands above the block scales, of `amax`.
    pub(crate) fn outer(&self, amax: f32, choice: FourOverSix) -> f32 {
        match self.content {
            Content::AmaxShare => amax / choice.largest(),
            _ => two_level_encode_scale(amax, choice),
        }
    }

    /// Whether a tensor of `dtype` with `found` dimensions is read in its place, of a matrix of `shape`.
    pub(crate) fn takes(
        &self,
        operand: &Operand,
        shape: Shape,
        dtype: Dtype,
        found: &[usize],
    ) -> bool {
        match (self.content, self.dtype, dtype) {
            // The same bytes, whose dimensions count codes.
            (Content::Codes, Dtype::U8, Dtype::F4) => {
                operand.per_byte() == 2 && found == [shape.rows, shape.cols]
            }
            _ => self.reads(dtype) && self.has_dims(&self.dims(operand, shape), found),
        }
    }

    /// Whether a tensor of `dtype` is read in its place: other programs write scales as narrower floats, too.
    fn reads(&self, dtype: Dtype) -> bool {
        match (self.content, self.dtype) {
            (Content::Scales, Dtype::F32) => {
                matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
            }
            (Content::Scales, Dtype::U8) => matches!(dtype, Dtype::U8 | Dtype::F8_E8M0),
            (Content::Scales, Dtype::F8_E4M3) => matches!(dtype, Dtype::F8_E4M3 | Dtype::U8),
            (_, written) => dtype == written,
        }
    }

    /// Whether it may have `found` dimensions in the place of `dims`: one number has no axis, or one.
    fn has_dims(&self, dims: &[usize], found: &[usize]) -> bool {
        match self.axes {
            Axes::One | Axes::Scalar => matches!(found, [] | [1]),
            _ => dims == found,
        }
    }
}

/// How a target stores a weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) target: ExportTarget,
    /// What the target calls it: a format of compressed-tensors, a `quant_algo` of ModelOpt.
    pub(crate) name: &'static str,
    pub(crate) operand: Operand,
    pub(crate) tensors: &'static [Stored],
    /// What the target's configuration says of such weights, as JSON.
    pub(crate) weights: &'static str,
    /// The same of the inputs of their layers; nothing where they stay as they are.
    pub(crate) inputs: &'static str,
}

/// What the name of a weight has before `weight`.
pub(crate) fn base(name: &str) -> Option<&str> {
    let base = name.strip_suffix("weight")?;
    (base.is_empty() || base.ends_with('.')).then_some(base)
}

impl Form {
    /// The name of `stored`, one of its tensors, of the weight called `weight`.
    pub(crate) fn name_of(&self, weight: &str, stored: &Stored) -> String {
        match self.tensors.len() {
            1 => weight.to_owned(),
            _ => format!("{}{}", base(weight).unwrap_or_default(), stored.suffix),
        }
    }
}

const fn stored(suffix: &'static str, dtype: Dtype, content: Content, axes: Axes) -> Stored {
    Stored {
        suffix,
        dtype,
        content,
        axes,
    }
}

const FP8_CODES: Stored = stored("weight", Dtype::F8_E4M3, Content::Codes, Axes::Matrix);
const PACKED_CODES: Stored = stored("weight_packed", Dtype::U8, Content::Codes, Axes::Matrix);
const MX_SCALES: Stored = stored("weight_scale", Dtype::U8, Content::Scales, Axes::Matrix);
const FP8_SCALES: Stored = stored(
    "weight_scale",
    Dtype::F8_E4M3,
    Content::Scales,
    Axes::Matrix,
);
const F32_SCALES: Stored = stored("weight_scale", Dtype::F32, Content::Scales, Axes::Matrix);

/// What inputs of 8 bits have: scales that are made while the model runs.
const FP8_INPUTS: &str =
    r#"{"num_bits":8,"type":"float","symmetric":true,"strategy":"token","dynamic":true}"#;

/// Every form. Where a recipe has several of a target, the first is written. Files are read by the first form that their
/// tensors are.
pub(crate) static FORMS: &[Form] = &[
    Form {
        target: ExportTarget::CompressedTensors,
        name: "nvfp4-pack-quantized",
        operand: FP4_TWO_LEVEL,
        tensors: &[
            PACKED_CODES,
            FP8_SCALES,
            stored(
                "weight_global_scale",
                Dtype::F32,
                Content::EncodeScale,
                Axes::One,
            ),
        ],
        weights: r#"{"num_bits":4,"type":"float","symmetric":true,"strategy":"tensor_group","group_size":16,"dynamic":false,"scale_dtype":"torch.float8_e4m3fn"}"#,
        // Those of 4 bits need a scale that a calibration finds.
        inputs: "null",
    },
    Form {
        target: ExportTarget::CompressedTensors,
        name: "mxfp4-pack-quantized",
        operand: FP4_MX,
        tensors: &[PACKED_CODES, MX_SCALES],
        weights: r#"{"num_bits":4,"type":"float","symmetric":true,"strategy":"group","group_size":32,"dynamic":false,"scale_dtype":"torch.uint8"}"#,
        inputs: r#"{"num_bits":4,"type":"float","symmetric":true,"strategy":"group","group_size":32,"dynamic":true,"scale_dtype":"torch.uint8"}"#,
    },
    Form {
        target: ExportTarget::CompressedTensors,
        name: "mxfp8-quantized",
        operand: FP8_MX,
        tensors: &[FP8_CODES, MX_SCALES],
        weights: r#"{"num_bits":8,"type":"float","symmetric":true,"strategy":"group","group_size":32,"dynamic":false,"scale_dtype":"torch.uint8"}"#,
        inputs: r#"{"num_bits":8,"type":"float","symmetric":true,"strategy":"group","group_size":32,"dynamic":true,"scale_dtype":"torch.uint8"}"#,
    },
    Form {
        target: ExportTarget::CompressedTensors,
        name: "float-quantized",
        operand: FP8_TENSOR,
        tensors: &[
            FP8_CODES,
            stored("weight_scale", Dtype::F32, Content::Scales, Axes::One),
        ],
        weights: r#"{"num_bits":8,"type":"float","symmetric":true,"strategy":"tensor","dynamic":false}"#,
        inputs: FP8_INPUTS,
    },
    Form {
        target: ExportTarget::CompressedTensors,
        name: "float-quantized",
        operand: FP8_ROWS,
        tensors: &[FP8_CODES, F32_SCALES],
        weights: r#"{"num_bits":8,"type":"float","symmetric":true,"strategy":"channel","dynamic":false}"#,
        inputs: FP8_INPUTS,
    },
    Form {
        target: ExportTarget::CompressedTensors,
        name: "float-quantized",
        operand: FP8_TILES,
        tensors: &[FP8_CODES, F32_SCALES],
        weights: r#"{"num_bits":8,"type":"float","symmetric":true,"strategy":"block","block_structure":[128,128],"dynamic":false}"#,
        inputs: r#"{"num_bits":8,"type":"float","symmetric":true,"strategy":"group","group_size":128,"dynamic":true}"#,
    },
    Form {
        target: ExportTarget::Modelopt,
        // NVFP4 alone would ask for `input_scale`, which a calibration finds.
        name: "W4A16_NVFP4",
        operand: FP4_TWO_LEVEL,
        tensors: &[
            stored("weight", Dtype::U8, Content::Codes, Axes::Matrix),
            FP8_SCALES,
            stored(
                "weight_scale_2",
                Dtype::F32,
                Content::AmaxShare,
                Axes::Scalar,
            ),
        ],
        weights: r#"{"num_bits":4,"type":"float","group_size":16,"dynamic":false}"#,
        inputs: "null",
    },
    Form {
        target: ExportTarget::Modelopt,
        name: "MXFP8",
        operand: FP8_MX,
        tensors: &[FP8_CODES, MX_SCALES],
        weights: r#"{"num_bits":8,"type":"float","group_size":32,"dynamic":false}"#,
        inputs: r#"{"num_bits":8,"type":"float","group_size":32,"dynamic":true}"#,
    },
    Form {
        target: ExportTarget::Modelopt,
        // One scale of a tensor is repeated for its rows: FP8 alone would ask for `input_scale`.
        name: "FP8_PER_CHANNEL_PER_TOKEN",
        operand: FP8_ROWS,
        tensors: &[
            FP8_CODES,
            stored("weight_scale", Dtype::F32, Content::Scales, Axes::Vector),
        ],
        weights: r#"{"num_bits":8,"type":"float","strategy":"channel","dynamic":false}"#,
        inputs: r#"{"num_bits":8,"type":"float","strategy":"token","dynamic":true}"#,
    },
    Form {
        target: ExportTarget::Modelopt,
        name: "FP8_PB_WO",
        operand: FP8_TILES,
        tensors: &[
            FP8_CODES,
            stored("weight_scale", Dtype::F32, Content::Scales, Axes::Blocks),
        ],
        weights: r#"{"num_bits":8,"type":"float","strategy":"block","block_structure":[128,128],"dynamic":false}"#,
        inputs: "null",
    },
    Form {
        target: ExportTarget::Deepseek,
        name: "e4m3",
        operand: FP8_TILES,
        tensors: &[
            FP8_CODES,
            stored(
                "weight_scale_inv",
                Dtype::F32,
                Content::Scales,
                Axes::Matrix,
            ),
        ],
        weights: "null",
        inputs: "null",
    },
];

/// Weights of 16 or 32 bits, which every target stores as they are. Only files that say so have them: others hold all
/// that was not quantized in the same way.
static PLAIN: &[Form] = &[
    plain(Code::Bf16, &[BF16_VALUES]),
    plain(Code::F32, &[F32_VALUES]),
];

const BF16_VALUES: Stored = stored("weight", Dtype::BF16, Content::Codes, Axes::Matrix);
const F32_VALUES: Stored = stored("weight", Dtype::F32, Content::Codes, Axes::Matrix);

/// A row of [`PLAIN`]; what its target is does not matter.
const fn plain(element: Code, tensors: &'static [Stored]) -> Form {
    Form {
        target: ExportTarget::Te,
        name: "as it is",
        operand: Operand {
            element,
            block: None,
            outer: None,
        },
        tensors,
        weights: "null",
        inputs: "null",
    }
}

/// The form of weights of `recipe` in the files of `target`, if it has one.
pub(crate) fn form(target: ExportTarget, recipe: &impl Recipe) -> Option<&'static Form> {
    let operand = Operand::of(recipe)?;
    let forms = FORMS.iter().filter(|form| form.target == target);
    forms.chain(PLAIN).find(|form| operand.fits(&form.operand))
}

/// The forms that weights of `recipe` may have been written as, of any target.
pub(crate) fn forms_of<R: Recipe>(recipe: &R) -> impl Iterator<Item = &'static Form> + use<R> {
    let operand = Operand::of(recipe);
    let fits = move |form: &&Form| operand.is_some_and(|operand| operand.fits(&form.operand));
    FORMS.iter().chain(PLAIN).filter(fits)
}

/// The first recipe whose weights are the operand of `form`, with the options of files; for files that do not say theirs.
/// What else its options say is unknown, and decoding does not depend on it.
pub(crate) fn recipe(form: &Form) -> Option<AnyRecipe> {
    AnyRecipe::names().into_iter().find_map(|name| {
        let mut options = RecipeOptions::default();
        let known = AnyRecipe::options_of(name).ok()?;
        if known.iter().any(|option| option.name == "format") {
            options.set("format", "e4m3");
        }
        let recipe = AnyRecipe::from_name(name, &options).ok()?;
        (Operand::of(&recipe) == Some(form.operand)).then_some(recipe)
    })
}

/// What `target` calls weights of `recipe`; `None` where it has no form for them, or takes every recipe.
pub fn stored_name(target: ExportTarget, recipe: &impl Recipe) -> Option<&'static str> {
    form(target, recipe)
        .filter(|_| !target.takes_all())
        .map(|form| form.name)
}

/// The targets that weights of `recipe` go to, by name.
pub fn targets(recipe: &impl Recipe) -> Vec<&'static str> {
    let takes = |target: &&ExportTarget| target.takes_all() || form(**target, recipe).is_some();
    let targets = ExportTarget::ALL.iter();
    targets.filter(takes).map(|target| target.name()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn every_form_has_a_recipe_that_is_written_as_it() {
        for form in FORMS {
            let recipe = recipe(form).expect(form.name);
            let mut forms = forms_of(&recipe);
            assert!(
                forms.any(|other| std::ptr::eq(other, form)),
                "{}",
                form.name
            );
            let codes = form
                .tensors
                .iter()
                .filter(|stored| stored.content == Content::Codes);
            assert_eq!(codes.count(), 1, "{}", form.name);
            for settings in [form.weights, form.inputs] {
                serde_json::from_str::<Value>(settings).expect(settings);
            }
        }
    }
}
