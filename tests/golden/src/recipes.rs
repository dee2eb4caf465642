//! The recipe and the options that each name in the files stands for.

/// Names of options and their texts.
pub type Options = &'static [(&'static str, &'static str)];

/// A name in the files, its recipe, and the options that are set.
pub type Named = (&'static str, &'static str, Options);

const E4M3: Options = &[("format", "e4m3")];
const E5M2: Options = &[("format", "e5m2")];
const F32_SCALES: Options = &[("pow2", "false")];

/// Casts of weights.
pub const WEIGHTS: [Named; 32] = [
    ("delayed_e4m3", "fp8-delayed", E4M3),
    ("delayed_e5m2", "fp8-delayed", E5M2),
    ("current_e4m3", "fp8-current", E4M3),
    ("current_e5m2", "fp8-current", E5M2),
    (
        "current_e4m3_pow2",
        "fp8-current",
        &[("format", "e4m3"), ("pow2", "true")],
    ),
    ("fp8_rowwise_e4m3", "fp8-rowwise", &[]),
    ("fp8_rowwise_e5m2", "fp8-rowwise", E5M2),
    ("fp8_rowwise_e4m3_pow2", "fp8-rowwise", &[("pow2", "true")]),
    ("block1d_e4m3", "fp8-block-1d", &[]),
    ("block1d_e5m2", "fp8-block-1d", E5M2),
    ("block1d_e4m3_f32scale", "fp8-block-1d", F32_SCALES),
    ("block2d_e4m3", "fp8-block", &[]),
    ("block2d_e5m2", "fp8-block", E5M2),
    ("block2d_e4m3_f32scale", "fp8-block", F32_SCALES),
    ("mxfp8_e4m3", "mxfp8", &[]),
    ("mxfp8_e5m2", "mxfp8", E5M2),
    ("mxfp8_e4m3_floor", "mxfp8", &[("scale_mode", "ocp-floor")]),
    ("mxfp8_2d_e4m3", "mxfp8-2d", &[]),
    ("mxfp4", "mxfp4", &[]),
    ("mxfp4_floor", "mxfp4", &[("scale_mode", "ocp-floor")]),
    ("mxfp4_even", "mxfp4", &[("scale_mode", "even")]),
    ("nvfp4_1d", "nvfp4-1d", &[]),
    ("nvfp4_1d_fo6_mae", "nvfp4-1d", &[("four_over_six", "mae")]),
    ("nvfp4_1d_fo6_mse", "nvfp4-1d", &[("four_over_six", "mse")]),
    (
        "nvfp4_1d_fo6_mae_448",
        "nvfp4-1d",
        &[("four_over_six", "mae-448")],
    ),
    (
        "nvfp4_1d_fo6_mse_448",
        "nvfp4-1d",
        &[("four_over_six", "mse-448")],
    ),
    ("nvfp4_1d_rowscaled", "nvfp4-1d", &[("row_scaled", "true")]),
    ("nvfp4_2d", "nvfp4-2d", &[]),
    ("nvfp4_2d_fo6_mae", "nvfp4-2d", &[("four_over_six", "mae")]),
    ("nvfp4_2d_fo6_mse", "nvfp4-2d", &[("four_over_six", "mse")]),
    (
        "nvfp4_2d_fo6_mae_448",
        "nvfp4-2d",
        &[("four_over_six", "mae-448")],
    ),
    (
        "nvfp4_2d_fo6_mse_448",
        "nvfp4-2d",
        &[("four_over_six", "mse-448")],
    ),
];

/// Casts of activations, whose columns pass a Hadamard transform.
pub const ACTIVATIONS: [Named; 1] = [("nvfp4_1d_rht", "nvfp4-1d", &[("hadamard", "true")])];

/// Names that no file has: of four over six up to 448 the files have one error each.
pub const ABSENT: [&str; 2] = ["nvfp4_1d_fo6_mse_448", "nvfp4_2d_fo6_mae_448"];

/// A recipe by direction, and what its rowwise and its columnwise operand are alone.
pub const BY_DIRECTION: (&str, [Named; 2]) = (
    "nvfp4-mxfp8",
    [("nvfp4_1d", "nvfp4-1d", &[]), ("mxfp8_e4m3", "mxfp8", &[])],
);
