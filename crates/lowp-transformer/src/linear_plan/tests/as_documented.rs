//! A product of narrow codes as NVIDIA's documentation describes it to who calls cuBLASLt (cuBLAS 13: "Narrow Precision Data Types Usage",
//! "1D Block Scaling Factors Layout"): from the call and from bytes. It uses nothing of what lowp writes them with.

use lowp_gemm::{Call, CallOperand, Dtype, ScaleMode};

/// An operand in memory, read: A is indexed by row and B by column, then by the contracted axis.
pub(super) struct Narrow<'a> {
    dtype: Dtype,
    codes: &'a [u8],
    /// Entries from one to the next along the outer and the contracted axis.
    steps: [usize; 2],
    depth: usize,
    /// Entries that share a scale, and the scales by outer index and block.
    block: usize,
    scales: Vec<Vec<f64>>,
}

/// A scale tile.
const OUTER: usize = 128;
const INNER: usize = 4;

impl<'a> Narrow<'a> {
    /// A of a call, where `first`, else B.
    pub(super) fn new(operand: &CallOperand, first: bool, codes: &'a [u8], scales: &[u8]) -> Self {
        let matrix = operand.matrix;
        // op(A) is m x k and op(B) is k x n.
        let inner_first = operand.transposed == first;
        let [depth, outer] = match inner_first {
            true => [matrix.rows, matrix.cols],
            false => [matrix.cols, matrix.rows],
        };
        let steps = match inner_first {
            true => [matrix.ld, 1],
            false => [1, matrix.ld],
        };
        let (block, decode): (_, fn(u8) -> f64) = match operand.scale {
            ScaleMode::Vec32 => (32, ue8m0),
            ScaleMode::Vec16 => (16, |code| e4m3(code & 0x7F)),
            other => panic!("{other:?} is no 1D block scaling"),
        };
        Self {
            dtype: matrix.dtype,
            codes,
            steps,
            depth,
            block,
            scales: untiled(scales, [outer, depth.div_ceil(block)], decode),
        }
    }

    pub(super) fn value(&self, outer: usize, k: usize) -> f64 {
        let at = outer * self.steps[0] + k * self.steps[1];
        let code = match self.dtype {
            Dtype::E4M3 => e4m3(self.codes[at]),
            Dtype::E5M2 => e5m2(self.codes[at]),
            // The first of two is in the low half of a byte.
            Dtype::E2M1 => e2m1(self.codes[at / 2] >> (4 * (at % 2)) & 15),
            other => panic!("{other:?} is not narrow"),
        };
        code * self.scales[outer][k / self.block]
    }
}

/// Entry (row, column) of D: `alpha * A * B`.
pub(super) fn entry([a, b]: [&Narrow<'_>; 2], [row, col]: [usize; 2], alpha: f32) -> f64 {
    assert_eq!(a.depth, b.depth);
    let products = (0..a.depth).map(|k| a.value(row, k) * b.value(col, k));
    f64::from(alpha) * products.sum::<f64>()
}

/// What an address and a leading dimension must be multiples of, in bytes.
pub(super) const ALIGNMENT: usize = 16;

/// Whether columns of all matrices begin at multiples of [`ALIGNMENT`].
pub(super) fn is_aligned(call: &Call) -> bool {
    let operands = call.operands.iter().map(|operand| operand.matrix);
    let mut matrices = operands.chain([call.result]);
    matrices.all(|matrix| (matrix.ld * bits(matrix.dtype)).is_multiple_of(8 * ALIGNMENT))
}

fn bits(dtype: Dtype) -> usize {
    match dtype {
        Dtype::E2M1 => 4,
        Dtype::E4M3 | Dtype::E5M2 => 8,
        Dtype::Bf16 => 16,
        Dtype::F32 => 32,
    }
}

/// Scales by outer index and block, from the offset of each in memory. What lies outside is allocated and zero.
fn untiled(bytes: &[u8], [outer, inner]: [usize; 2], decode: fn(u8) -> f64) -> Vec<Vec<f64>> {
    let tiles_across = inner.div_ceil(INNER);
    let tiles = outer.div_ceil(OUTER) * tiles_across;
    assert_eq!(bytes.len(), tiles * OUTER * INNER, "bytes of scales");
    let mut scales = vec![vec![f64::NAN; inner]; outer];
    for (offset, &byte) in bytes.iter().enumerate() {
        let (tile, offset) = (offset / (OUTER * INNER), offset % (OUTER * INNER));
        let i = tile / tiles_across * OUTER + (offset % 16) / 4 * 32 + offset / 16;
        let j = tile % tiles_across * INNER + offset % 4;
        match i < outer && j < inner {
            true => scales[i][j] = decode(byte),
            false => assert_eq!(byte, 0, "scale ({i}, {j}) of {outer} x {inner}"),
        }
    }
    scales
}

fn ue8m0(code: u8) -> f64 {
    match code {
        0xFF => f64::NAN,
        _ => 2f64.powi(i32::from(code) - 127),
    }
}

/// Sign, `exponent` bits of bias `bias`, and `fraction` bits, without what is special.
fn small(code: u8, fraction: u32, bias: i32) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let one = 1 << fraction;
    let (exponent, low) = (
        i32::from(code & 0x7F) / one,
        f64::from(i32::from(code) % one),
    );
    let scaled = match exponent {
        0 => low * 2f64.powi(1 - bias),
        _ => (f64::from(one) + low) * 2f64.powi(exponent - bias),
    };
    sign * scaled / f64::from(one)
}

fn e4m3(code: u8) -> f64 {
    match code & 0x7F {
        0x7F => f64::NAN,
        _ => small(code, 3, 7),
    }
}

fn e5m2(code: u8) -> f64 {
    match code & 0x7F {
        0x7C.. => f64::NAN,
        _ => small(code, 2, 15),
    }
}

fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}
