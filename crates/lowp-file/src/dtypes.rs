//! Dtypes of tensors in files, and the words that file metadata use for usages, forms and dtypes; recipes say those of their options.

use crate::error::{Result, input_error};
use crate::text::shown;
use lowp_format::{Form, Usage};

pub use safetensors::Dtype;

/// Floats that decoded values are written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputDtype {
    /// As decoded.
    F32,
    /// Rounded to nearest even.
    Bf16,
    /// Rounded to nearest even; above 65504 infinite.
    F16,
}

impl OutputDtype {
    /// Its name in the header of a file.
    pub fn name(self) -> &'static str {
        Named::label(Dtype::from(self))
    }

    /// Bytes of a value.
    pub fn size(self) -> usize {
        Dtype::from(self).bitsize() / 8
    }
}

impl From<OutputDtype> for Dtype {
    fn from(name: OutputDtype) -> Self {
        match name {
            OutputDtype::F32 => Dtype::F32,
            OutputDtype::Bf16 => Dtype::BF16,
            OutputDtype::F16 => Dtype::F16,
        }
    }
}

/// What codes and 8-bit scales are called in a file. The bytes are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dtypes {
    /// F8_E4M3, F8_E5M2, F8_E8M0 and F4, with shapes in codes; U8 if a row ends within a byte.
    #[default]
    Native,
    /// U8, with shapes in bytes, for readers that do not support the other dtypes.
    U8,
}

/// The dtype of a name in the header of a file, `BF16` for example.
///
/// # Errors
/// The format has no such dtype.
pub fn dtype_of(name: &str) -> Result<Dtype> {
    let found = serde_json::from_value(serde_json::Value::from(name));
    found.map_err(|_| input_error(format!("safetensors files have no dtype {}", shown(name))))
}

/// A value with a name in file metadata.
pub(crate) trait Named: Copy + 'static {
    const ALL: &'static [Self];

    fn label(self) -> &'static str;

    fn named(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|value| value.label() == name)
    }
}

impl Named for Usage {
    const ALL: &'static [Self] = &[Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH];

    fn label(self) -> &'static str {
        Usage::label(self)
    }
}

impl Named for Form {
    const ALL: &'static [Self] = &Form::ALL;

    fn label(self) -> &'static str {
        self.name()
    }
}

/// The dtypes that are quantized.
impl Named for Dtype {
    const ALL: &'static [Self] = &[Dtype::F32, Dtype::BF16, Dtype::F16];

    fn label(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::BF16 => "BF16",
            Dtype::F16 => "F16",
            _ => "another dtype",
        }
    }
}
