//! The words that options use for usages, forms and dtypes.

use clap::ValueEnum;
use lowp_file::dtypes::Dtypes;
use lowp_file::dtypes::FloatName;
use lowp_format::{Form, Orientation, Usage};

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
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum DtypeName {
    /// As decoded
    F32,
    /// Rounded to nearest even
    Bf16,
    /// Rounded to nearest even; above 65504 infinite
    F16,
}

impl From<DtypeName> for FloatName {
    fn from(name: DtypeName) -> Self {
        match name {
            DtypeName::F32 => FloatName::F32,
            DtypeName::Bf16 => FloatName::Bf16,
            DtypeName::F16 => FloatName::F16,
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
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum DtypesName {
    /// F8_E4M3, F8_E5M2, F8_E8M0 and F4, whose shapes count codes; U8 where a row ends within a byte
    Native,
    /// U8, whose shapes count bytes, for readers that do not know the others
    U8,
}

/// The option of commands that write codes.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct DtypesArgs {
    /// Dtypes of codes and 8-bit scales in the header
    #[arg(long, value_name = "DTYPES", default_value = "native")]
    dtypes: DtypesName,
}

impl From<DtypesArgs> for Dtypes {
    fn from(args: DtypesArgs) -> Self {
        match args.dtypes {
            DtypesName::Native => Dtypes::Native,
            DtypesName::U8 => Dtypes::U8,
        }
    }
}
