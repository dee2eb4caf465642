//! The words that options and file metadata use for usages, forms and dtypes; recipes say those of their options.

use clap::ValueEnum;
use lowp_format::{Form, Orientation, Usage};
use safetensors::Dtype;

/// Orientations that are written.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum UsageName {
    /// Blocks along K, for the forward GEMM
    Rowwise,
    /// Blocks along M, for the backward GEMMs
    Columnwise,
    /// Both
    Both,
}

impl From<UsageName> for Usage {
    fn from(name: UsageName) -> Self {
        match name {
            UsageName::Rowwise => Usage::ROWWISE,
            UsageName::Columnwise => Usage::COLUMNWISE,
            UsageName::Both => Usage::BOTH,
        }
    }
}

/// One orientation.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum OrientationName {
    /// Blocks along K
    Rowwise,
    /// Blocks along M
    Columnwise,
}

impl From<OrientationName> for Orientation {
    fn from(name: OrientationName) -> Self {
        match name {
            OrientationName::Rowwise => Orientation::Rowwise,
            OrientationName::Columnwise => Orientation::Columnwise,
        }
    }
}

/// Floats that decoded values are written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum FloatName {
    /// As decoded
    F32,
    /// Rounded to nearest even
    Bf16,
    /// Rounded to nearest even; above 65504 infinite
    F16,
}

impl FloatName {
    /// Bytes of a value.
    pub(super) fn size(self) -> usize {
        Dtype::from(self).bitsize() / 8
    }
}

impl From<FloatName> for Dtype {
    fn from(name: FloatName) -> Self {
        match name {
            FloatName::F32 => Dtype::F32,
            FloatName::Bf16 => Dtype::BF16,
            FloatName::F16 => Dtype::F16,
        }
    }
}

/// Form of the block scales.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum ScalesName {
    /// As TransformerEngine keeps them: padded with zeros, 2-D scales repeated
    Padded,
    /// One per block, without padding; a 2-D scale once per tile
    Compact,
    /// 128x4 tiles, as cuBLASLt reads them; of 8-bit scales only
    Swizzled,
}

impl From<ScalesName> for Form {
    fn from(name: ScalesName) -> Self {
        match name {
            ScalesName::Padded => Form::Padded,
            ScalesName::Compact => Form::Compact,
            ScalesName::Swizzled => Form::Swizzled,
        }
    }
}

/// What codes and 8-bit scales are called in a file. The bytes are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Dtypes {
    /// F8_E4M3, F8_E5M2, F8_E8M0 and F4, whose shapes count codes; U8 where a row ends within a byte
    #[default]
    Native,
    /// U8, whose shapes count bytes, for readers that do not know the others
    U8,
}

/// The option of commands that write codes.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct DtypesArgs {
    /// Dtypes of codes and 8-bit scales in the header
    #[arg(long, value_name = "DTYPES", default_value = "native")]
    pub(super) dtypes: Dtypes,
}

/// A value with a name in file metadata.
pub(super) trait Named: Copy + 'static {
    /// Every value.
    const ALL: &'static [Self];

    /// Its name.
    fn label(self) -> &'static str;

    /// The value of that name.
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
