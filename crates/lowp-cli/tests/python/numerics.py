"""docs/numerics.md on numpy and ml_dtypes alone: codes, scales and layouts, without a line of lowp.

Rounding to a code is the cast of ml_dtypes; everything else is binary32 arithmetic of numpy, one rounding per operator.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(F32).max
# E4M3 has no infinity and E5M2 codes are never one: the largest finite value saturates.
FP8 = {
    "e4m3": (ml_dtypes.float8_e4m3fn, F32(448), 8),
    "e5m2": (ml_dtypes.float8_e5m2, F32(57344), 15),
}
ROWWISE, COLUMNWISE = "rowwise", "columnwise"


def encode_fp8(x, code):
    """Section 1.2."""
    dtype, largest, _ = FP8[code]
    codes = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def decode_fp8(codes, code):
    return codes.view(FP8[code][0]).astype(F32)


def encode_e2m1(x):
    """Section 1.3, one code per byte."""
    codes = np.clip(x, F32(-6), F32(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(7), codes)


def decode_e2m1(codes):
    return codes.view(ml_dtypes.float4_e2m1fn).astype(F32)


def pack_nibbles(codes):
    """Two codes per byte along the rows, the first one low; an odd row ends with a 0."""
    rows, columns = codes.shape
    even = np.zeros((rows, columns + columns % 2), np.uint8)
    even[:, :columns] = codes
    return even[:, 0::2] | even[:, 1::2] << 4


def e8m0(exponent):
    """The codes of powers of two, by the cast of ml_dtypes."""
    powers = np.ldexp(np.float64(1), exponent)
    return powers.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)


def encode_ceil(v):
    """Section 1.4: the exponent of the smallest power of two that is not below v."""
    fraction, exponent = np.frexp(v)
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    exponent = np.where(v == 0, -127, exponent)
    return e8m0(np.clip(np.where(np.isinf(v), 127, exponent), -127, 127))


def encode_floor(v, emax):
    """Section 1.4: the exponent of v, lowered by emax."""
    _, exponent = np.frexp(v)
    exponent = np.where(v == 0, -127, exponent - 1 - emax)
    codes = e8m0(np.clip(np.where(np.isinf(v), 0, exponent), -127, 127))
    return np.where(np.isinf(v), np.uint8(0xFF), codes)


def amax(x, axis=None):
    """Section 2.2: NaN is ignored, infinities count, nothing gives 0."""
    return np.fmax.reduce(np.abs(x), axis=axis, initial=F32(0))


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def pad(a, multiples):
    """Zeros after the last row and column, up to the next multiples."""
    return np.pad(a, [(0, round_up(n, m) - n) for n, m in zip(a.shape, multiples)])


def block_amax(x, block):
    """The amax of every block; those at the edge cover what exists."""
    rows, columns = block
    padded = pad(x, block)
    tiled = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return amax(tiled, axis=(1, 3))


def spread(scales, block, shape):
    """Each scale at every element of its block."""
    spread = np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)
    return spread[: shape[0], : shape[1]]


def swizzle(a):
    """Section 3.3: tiles of 128x4, in the order that cuBLASLt reads."""
    rows, columns = a.shape
    tiles = a.reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def lay_out(scales, block, shape, usage, form, transposed):
    """Block scales as a file holds them; `transposed` arrays have the columns of the matrix first."""
    if form == "compact":
        return np.ascontiguousarray(scales.T if transposed else scales)
    # Rows of the operand outside, blocks inside; 2-D scales are repeated for every row.
    if usage == ROWWISE:
        outer_first = np.repeat(scales, block[0], axis=0)[: shape[0]]
    else:
        outer_first = np.repeat(scales, block[1], axis=1)[:, : shape[1]].T
    outer_first = pad(outer_first, (128, 4))
    if form == "swizzled":
        return swizzle(outer_first)
    as_stored = outer_first.T if usage == COLUMNWISE and not transposed else outer_first
    return np.ascontiguousarray(as_stored)


def fp8_scale(largest, amax, pow2):
    """Sections 4.2 and 5.2, from an encode scale of 1."""
    if amax == 0 or not np.isfinite(amax):
        return F32(1)
    with np.errstate(over="ignore"):
        scale = F32(min(largest / amax, FLT_MAX))
    if pow2:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(F32)
    return scale


@dataclass
class Cast:
    """One orientation of a matrix: what the file holds, and the values that it decodes to."""

    fields: dict
    values: np.ndarray


def fp8(x, usage, form, code="e4m3", pow2=False, scale=None):
    """fp8-current, and fp8-delayed whose scale is given or comes from the tensor itself."""
    largest = FP8[code][1]
    observed = amax(x)
    if scale is None:
        scale = fp8_scale(largest, observed, pow2)
    codes = encode_fp8(x * scale, code)
    scale_inv = F32(1) / scale
    data = codes if usage == ROWWISE else np.ascontiguousarray(codes.T)
    fields = {"data": data, "scale_inv": np.array([scale_inv]), "amax": np.array([observed])}
    return Cast(fields, decode_fp8(codes, code) * scale_inv)


def mxfp8(x, usage, form, block, code="e4m3", mode="te"):
    """Section 6."""
    _, largest, emax = FP8[code]
    block_amaxes = block_amax(x, block)
    if mode == "te":
        scales = encode_ceil(block_amaxes * (F32(1) / largest))
    else:
        scales = encode_floor(block_amaxes, emax)
    exponents = spread(scales, block, x.shape).astype(np.int32) - 127
    # E = FF is NaN, and so is its inverse.
    multipliers = np.where(exponents == 128, F32(np.nan), np.ldexp(F32(1), -exponents))
    codes = encode_fp8(x * multipliers, code)
    decode_scales = spread(scales.view(ml_dtypes.float8_e8m0fnu).astype(F32), block, x.shape)
    stored = lay_out(scales, block, x.shape, usage, form, transposed=False)
    return Cast({"data": codes, "scale_inv": stored}, decode_fp8(codes, code) * decode_scales)


def nvfp4(x, usage, form, block):
    """Section 7."""
    tensor_amax = amax(x)
    if tensor_amax == 0 or np.isinf(tensor_amax):
        encode_scale = F32(1)
    else:
        encode_scale = min(F32(2688) / tensor_amax, FLT_MAX)
    decode_scale = F32(1) / encode_scale
    targets = np.minimum(block_amax(x, block) * F32(encode_scale * F32(1 / 6)), FLT_MAX)
    scales = encode_fp8(targets, "e4m3")
    decoded = decode_fp8(scales, "e4m3")
    multipliers = np.minimum(F32(1) / (decoded * decode_scale), FLT_MAX)
    codes = encode_e2m1(x * spread(multipliers, block, x.shape))
    factors = (decoded * tensor_amax) * (F32(1) / F32(2688))
    transposed = usage == COLUMNWISE
    stored = lay_out(scales, block, x.shape, usage, form, transposed)
    data = pack_nibbles(codes.T if transposed else codes)
    fields = {"data": data, "scale_inv": stored, "amax": np.array([tensor_amax])}
    return Cast(fields, decode_e2m1(codes) * spread(factors, block, x.shape))


# A recipe: its cast, the block of each orientation where it has blocks, and whether one compact copy serves both.
RECIPES = {
    "fp8-current": (fp8, None, False),
    "fp8-delayed": (fp8, None, False),
    "mxfp8": (mxfp8, {ROWWISE: (1, 32), COLUMNWISE: (32, 1)}, False),
    "mxfp8-2d": (mxfp8, {ROWWISE: (32, 32), COLUMNWISE: (32, 32)}, True),
    "nvfp4-1d": (nvfp4, {ROWWISE: (1, 16), COLUMNWISE: (16, 1)}, False),
    "nvfp4-2d": (nvfp4, {ROWWISE: (16, 16), COLUMNWISE: (16, 16)}, False),
}


def cast(x, recipe, usage, form, **options):
    """One orientation of the matrix x, with the field names of a file."""
    function, blocks, _ = RECIPES[recipe]
    block = {} if blocks is None else {"block": blocks[usage]}
    with np.errstate(all="ignore"):
        made = function(x.astype(F32), usage, form, **block, **options)
    # The amax is of the tensor, not of an orientation.
    names = {part: part if part == "amax" else f"{usage}_{part}" for part in made.fields}
    return Cast({names[part]: array for part, array in made.fields.items()}, made.values)


def quantize(x, recipe, form, usages=(ROWWISE, COLUMNWISE), **options):
    """Every field of the matrix x."""
    fields = {}
    for usage in usages:
        fields.update(cast(x, recipe, usage, form, **options).fields)
    if form == "compact" and RECIPES[recipe][2]:
        fields = {name: array for name, array in fields.items() if not name.startswith(COLUMNWISE)}
    return fields
