//! The words that options use for usages, forms and dtypes.

use crate::one_of::{Named, one_of};
use lowp_file::dtypes::{Dtypes, OutputDtype};
use lowp_format::{Form, Orientation, Usage};

pub(crate) const USAGES: &[Named<Usage>] = &[
    (
        "rowwise",
        "Blocks along K, for the forward GEMM",
        Usage::ROWWISE,
    ),
    (
        "columnwise",
        "Blocks along M, for the backward GEMMs",
        Usage::COLUMNWISE,
    ),
    ("both", "Both", Usage::BOTH),
];

pub(super) const ORIENTATIONS: &[Named<Orientation>] = &[
    ("rowwise", "Blocks along K", Orientation::Rowwise),
    ("columnwise", "Blocks along M", Orientation::Columnwise),
];

pub(super) const FLOATS: &[Named<OutputDtype>] = &[
    ("f32", "As decoded", OutputDtype::F32),
    ("bf16", "Rounded to nearest even", OutputDtype::Bf16),
    (
        "f16",
        "Rounded to nearest even; above 65504 infinite",
        OutputDtype::F16,
    ),
];

pub(super) const FORMS: &[Named<Form>] = &[
    (
        "padded",
        "TransformerEngine's layout: padded with zeros, 2-D scales repeated",
        Form::Padded,
    ),
    (
        "compact",
        "One scale per block, without padding",
        Form::Compact,
    ),
    (
        "swizzled",
        "128x4 tiles, as cuBLASLt reads them; only for 8-bit scales",
        Form::Swizzled,
    ),
];

/// What codes and 8-bit scales are called in a file. The bytes are the same.
const DTYPES: &[Named<Dtypes>] = &[
    (
        "native",
        "F8_E4M3, F8_E5M2, F8_E8M0 and F4, with shapes in codes; U8 if a row ends within a byte",
        Dtypes::Native,
    ),
    (
        "u8",
        "U8, with shapes in bytes, for readers that do not support the other dtypes",
        Dtypes::U8,
    ),
];

/// The option of commands that write codes.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct DtypesArgs {
    /// Dtypes of codes and 8-bit scales in the header
    #[arg(long, default_value = "native", value_parser = one_of(DTYPES))]
    pub(super) dtypes: Dtypes,
}
