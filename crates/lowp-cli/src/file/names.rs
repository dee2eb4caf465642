//! The words that options and file metadata use for the values of the format crate.

use clap::ValueEnum;
use lowp_format::{AmaxAlgorithm, Form, Fp8Format, MxScale, Orientation, SourceRounding, Usage};
use safetensors::Dtype;

/// FP8 codes.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum FormatName {
    /// 4 exponent and 3 mantissa bits
    E4m3,
    /// 5 exponent and 2 mantissa bits
    E5m2,
}

impl From<FormatName> for Fp8Format {
    fn from(name: FormatName) -> Self {
        match name {
            FormatName::E4m3 => Fp8Format::E4M3,
            FormatName::E5m2 => Fp8Format::E5M2,
        }
    }
}

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
    /// 128x4 tiles, as cuBLASLt reads them
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

/// Rounding of E8M0 scales.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum ScaleModeName {
    /// Up: no block maximum is clipped
    Te,
    /// Down to the exponent of the maximum, as OCP MX 1.0 says
    OcpFloor,
}

impl From<ScaleModeName> for MxScale {
    fn from(name: ScaleModeName) -> Self {
        match name {
            ScaleModeName::Te => MxScale::Te,
            ScaleModeName::OcpFloor => MxScale::OcpFloor,
        }
    }
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

impl Named for Fp8Format {
    const ALL: &'static [Self] = &[Fp8Format::E4M3, Fp8Format::E5M2, Fp8Format::Hybrid];

    fn label(self) -> &'static str {
        match self {
            Fp8Format::E4M3 => "e4m3",
            Fp8Format::E5M2 => "e5m2",
            Fp8Format::Hybrid => "hybrid",
        }
    }
}

impl Named for MxScale {
    const ALL: &'static [Self] = &[MxScale::Te, MxScale::OcpFloor];

    fn label(self) -> &'static str {
        match self {
            MxScale::Te => "te",
            MxScale::OcpFloor => "ocp-floor",
        }
    }
}

impl Named for AmaxAlgorithm {
    const ALL: &'static [Self] = &[AmaxAlgorithm::Max, AmaxAlgorithm::MostRecent];

    fn label(self) -> &'static str {
        match self {
            AmaxAlgorithm::Max => "max",
            AmaxAlgorithm::MostRecent => "most-recent",
        }
    }
}

impl Named for SourceRounding {
    const ALL: &'static [Self] = &[SourceRounding::F32, SourceRounding::ViaBf16];

    fn label(self) -> &'static str {
        match self {
            SourceRounding::F32 => "f32",
            SourceRounding::ViaBf16 => "via-bf16",
        }
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
