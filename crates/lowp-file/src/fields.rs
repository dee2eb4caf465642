//! Which tensors of a file make up one quantized tensor: names, dtypes and shapes, from the recipe's buffer specs.

use crate::dtypes::Dtypes;
use crate::error::Result;
use lowp_format::{
    BufferKey, BufferSpec, Code, Extent, Form, FormatError, Orientation, Part, Recipe, ScaleLayout,
    Shape, Usage,
};
use safetensors::Dtype;

/// Most elements of a tensor, so that no padded size overflows.
const MAX_ELEMENTS: usize = 1 << 48;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// A buffer, as `orientation` uses it.
    Buffer {
        key: BufferKey,
        orientation: Orientation,
    },
    /// The amax of the source that a scale was, or will be, made from.
    Amax,
}

/// One tensor of the file, named `T.suffix`.
#[derive(Clone, Debug)]
pub(crate) struct Field {
    pub(crate) suffix: String,
    pub(crate) content: Content,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Where its entries lie; `None` for one number.
    pub(crate) layout: Option<ScaleLayout>,
}

impl Field {
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{name}.{}", self.suffix)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.layout
            .map_or(size_of::<f32>(), |layout| layout.bytes())
    }

    /// The same bytes as `dtypes` calls them.
    pub(crate) fn called(&self, dtypes: Dtypes) -> Self {
        let mut field = self.clone();
        let Some(layout) = self.layout else {
            return field;
        };
        let code = layout.code();
        let native = match code {
            Code::E4M3 => Dtype::F8_E4M3,
            Code::E5M2 => Dtype::F8_E5M2,
            Code::E8M0 => Dtype::F8_E8M0,
            Code::E2M1 => Dtype::F4,
            Code::F32 | Code::Bf16 => return field,
        };
        let [_, codes] = layout.padded();
        let Some(last) = field.shape.last_mut().filter(|_| code == Code::E2M1) else {
            field.dtype = match dtypes {
                Dtypes::Native => native,
                Dtypes::U8 => Dtype::U8,
            };
            return field;
        };
        // A row of codes that ends within a byte has no other name.
        let fills = codes.is_multiple_of(2);
        (field.dtype, *last) = match dtypes {
            Dtypes::Native if fills => (native, codes),
            _ => (Dtype::U8, code.bytes(codes)),
        };
        field
    }

    /// Takes the dtype and the shape that the field has in a file, if it may be called so.
    pub(crate) fn found_as(&mut self, dtype: Dtype, shape: &[usize]) {
        let native = self.called(Dtypes::Native);
        if (native.dtype, &native.shape[..]) == (dtype, shape) {
            *self = native;
        }
    }

    fn number(suffix: String, content: Content) -> Self {
        Self {
            suffix,
            content,
            dtype: Dtype::F32,
            shape: vec![1],
            layout: None,
        }
    }

    fn array(suffix: String, content: Content, layout: ScaleLayout) -> Self {
        let (code, [outer, inner]) = (layout.code(), layout.padded());
        let (dtype, inner) = match code {
            Code::F32 => (Dtype::F32, inner),
            Code::Bf16 => (Dtype::BF16, inner),
            Code::E4M3 | Code::E5M2 | Code::E2M1 | Code::E8M0 => (Dtype::U8, code.bytes(inner)),
        };
        let shape = match layout.form() {
            Form::Swizzled => vec![outer * inner],
            Form::Compact | Form::Padded => vec![outer, inner],
        };
        Self {
            suffix,
            content,
            dtype,
            shape,
            layout: Some(layout),
        }
    }
}

pub(crate) fn matrix(dims: &[usize]) -> Result<Shape, FormatError> {
    let shape = Shape::from_dims(dims)?;
    let most = shape.rows.max(1).checked_mul(shape.cols.max(1));
    match most {
        Some(most) if most <= MAX_ELEMENTS => Ok(shape),
        _ => Err(FormatError::TooLarge {
            dims: dims.to_vec(),
        }),
    }
}

/// The shape that arithmetic sees of `shape`, which is `full` or the rows of a rank, in the buffers `specs`: where the
/// tensor has no elements there are no rows and no columns to walk either, however many the file states, but for those
/// that have a scale or an amax each.
pub(crate) fn worked(shape: Shape, full: Shape, specs: &[BufferSpec]) -> Shape {
    if full.elements() > 0 {
        return shape;
    }
    let outer = || specs.iter().filter(|spec| spec.key.part.is_outer());
    let [rows, cols] =
        [0, 1].map(|axis| outer().any(|spec| spec.block()[axis] != BufferSpec::WHOLE));
    let counted = |is: bool, len: usize| if is { len } else { 0 };
    Shape::new(counted(rows, shape.rows), counted(cols, shape.cols))
}

/// The fields of a tensor of `shape`, which may be the rows of a rank, that holds `specs` and serves `usage`, block scales in `form`.
///
/// A buffer that serves both orientations is written for each of them, as their consumers expect; in the Compact form
/// it is stored once, under the rowwise names. Scales and amaxes of lines are arrays, whatever the form.
pub(crate) fn fields(
    recipe: &impl Recipe,
    specs: &[BufferSpec],
    shape: Shape,
    usage: Usage,
    form: Form,
) -> Result<Vec<Field>, FormatError> {
    let mut fields = Vec::new();
    for spec in specs {
        let (layout, what) = match spec.key.part {
            Part::Data => (Form::Compact, "data"),
            Part::BlockScale => (form, "scale_inv"),
            Part::DecodeScale | Part::Amax => continue,
        };
        for orientation in written(spec, usage, form) {
            let content = Content::Buffer {
                key: spec.key,
                orientation,
            };
            let layout = ScaleLayout::new(spec, shape, orientation, layout)?;
            fields.push(Field::array(
                format!("{orientation}_{what}"),
                content,
                layout,
            ));
        }
    }
    for spec in specs.iter().filter(|spec| spec.key.part.is_outer()) {
        for orientation in spec.key.usage.orientations() {
            let name = match (spec.key.part, orientation) {
                (Part::Amax, Orientation::Rowwise) => AMAX.to_owned(),
                // One that serves both is written once.
                (Part::Amax, _) if spec.key.usage != Usage::COLUMNWISE => continue,
                (Part::Amax, _) => format!("{AMAX}_{orientation}"),
                _ => {
                    let data = format!("{orientation}_data");
                    if !fields.iter().any(|field| field.suffix == data) {
                        continue;
                    }
                    format!("{orientation}_scale_inv")
                }
            };
            let key = spec.key;
            let content = Content::Buffer { key, orientation };
            if spec.is_scalar() {
                fields.push(Field::number(name, content));
                continue;
            }
            let layout = ScaleLayout::new(spec, shape, orientation, Form::Compact)?;
            let mut field = Field::array(name, content, layout);
            if key.part == Part::Amax {
                // A vector.
                field.shape.truncate(1);
            }
            fields.push(field);
        }
    }
    if keeps_amax(recipe) && !fields.iter().any(|field| field.suffix == AMAX) {
        fields.push(Field::number(AMAX.to_owned(), Content::Amax));
    }
    Ok(fields)
}

pub(crate) fn called(fields: &[Field], dtypes: Dtypes) -> Vec<Field> {
    fields.iter().map(|field| field.called(dtypes)).collect()
}

const AMAX: &str = "amax";

/// Whether a scale of the whole tensor follows from its amax, which the file keeps next to it.
pub fn keeps_amax(recipe: &impl Recipe) -> bool {
    Orientation::ALL.into_iter().any(|orientation| {
        let of_tensor = Some((Extent::Tensor, Part::DecodeScale));
        recipe.kernel(orientation).scale.outer() == of_tensor
    })
}

/// The orientations under whose names a buffer is written.
fn written(spec: &BufferSpec, usage: Usage, form: Form) -> Vec<Orientation> {
    match form {
        Form::Compact => spec.key.usage.orientations().take(1).collect(),
        Form::Padded | Form::Swizzled => (spec.key.usage & usage).orientations().collect(),
    }
}

pub(crate) fn holding(
    fields: &[Field],
    key: BufferKey,
    orientation: Orientation,
) -> Option<&Field> {
    let holds = |field: &&Field, o| {
        field.content
            == Content::Buffer {
                key,
                orientation: o,
            }
    };
    let by = |o| fields.iter().find(|field| holds(field, o));
    by(orientation).or_else(|| Orientation::ALL.into_iter().find_map(by))
}
