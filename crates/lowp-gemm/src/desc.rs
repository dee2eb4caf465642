//! [`GemmDesc`]: a product, described without a device.

use lowp_format::{Axis, BufferSpec, Code, Orientation};

use crate::{GemmError, GemmKind};

/// What a matrix holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// float32.
    F32,
    /// FP8 of 4 exponent bits.
    E4M3,
    /// FP8 of 5 exponent bits.
    E5M2,
    /// FP4, two to a byte.
    E2M1,
}

impl OperandDesc {
    /// One of `dtype` without scales, not in a batch.
    pub const fn plain(dtype: Dtype, k_inner: bool) -> Self {
        Self {
            dtype,
            scale: ScaleMode::None,
            k_inner,
            stride: 0,
        }
    }

    /// One of codes that `kind` multiplies in `orientation`, from what their buffer and that of their scales hold.
    ///
    /// # Errors
    /// Entries that are no codes.
    pub fn of_codes(
        kind: GemmKind,
        orientation: Orientation,
        [codes, scales]: [&BufferSpec; 2],
    ) -> Result<Self, GemmError> {
        let inner = match orientation {
            Orientation::Rowwise => Axis::Cols,
            Orientation::Columnwise => Axis::Rows,
        };
        let scale = match kind {
            GemmKind::Fp8Rows => ScaleMode::Rows,
            GemmKind::Fp8Groups128 if scales.tile == [128, 128] => ScaleMode::Square128,
            GemmKind::Fp8Groups128 => ScaleMode::Vec128,
            GemmKind::Fp8Groups32 => ScaleMode::Vec32,
            GemmKind::Fp4Groups16 => ScaleMode::Vec16,
            GemmKind::Fp8Tensor | GemmKind::Bf16 => ScaleMode::Tensor,
        };
        Ok(Self {
            scale,
            ..Self::plain(Dtype::of_codes(codes.code)?, codes.axes[1] == inner)
        })
    }
}

impl Dtype {
    /// That of operands whose codes are `code`.
    ///
    /// # Errors
    /// Entries that are no codes of a product: values, and the scales of blocks.
    pub const fn of_codes(code: Code) -> Result<Self, GemmError> {
        match code {
            Code::E4M3 => Ok(Dtype::E4M3),
            Code::E5M2 => Ok(Dtype::E5M2),
            Code::E2M1 => Ok(Dtype::E2M1),
            Code::Bf16 | Code::F32 | Code::E8M0 => Err(GemmError::Codes { code }),
        }
    }

    const fn bits(self) -> usize {
        match self {
            Dtype::F32 => 32,
            Dtype::Bf16 => 16,
            Dtype::E4M3 | Dtype::E5M2 => 8,
            Dtype::E2M1 => 4,
        }
    }
}

/// What the scales of an operand belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleMode {
    /// No scales: values are what they are.
    None,
    /// One f32 for the whole operand.
    Tensor,
    /// An f32 for each row.
    Rows,
    /// An f32 per 128 entries of a row along the contracted axis.
    Vec128,
    /// An f32 per 128x128.
    Square128,
    /// An E8M0 per 32 entries, swizzled.
    Vec32,
    /// An E4M3 per 16 entries, swizzled.
    Vec16,
}

/// An operand of a product, described: a row-major matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperandDesc {
    /// The dtype of its entries.
    pub dtype: Dtype,
    /// What its scales belong to.
    pub scale: ScaleMode,
    /// Whether the contracted axis is the inner one of memory.
    pub k_inner: bool,
    /// Entries from one matrix of a batch to the next.
    pub stride: usize,
}

/// A product `out[rows, cols] = left[rows, k] right[k, cols]` of row-major matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmDesc {
    /// Rows of the left operand and of the result.
    pub rows: usize,
    /// Columns of the right operand and of the result.
    pub cols: usize,
    /// Length of the contracted axis.
    pub k: usize,
    /// The left operand.
    pub left: OperandDesc,
    /// The right operand.
    pub right: OperandDesc,
    /// Entries of the result.
    pub out: Dtype,
    /// Entries from one result of a batch to the next.
    pub out_stride: usize,
    /// Number of equal products, whose operands and results are a stride apart.
    pub batch: usize,
    /// What follows the sums.
    pub epilogue: Epilogue,
    /// Whether FP8 sums may stay in the tensor core's accumulator, which has fewer bits than f32.
    pub fast_accum: bool,
}

/// What follows the sums of a product, before they are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// A bf16 vector of `cols` entries is added to each row.
    Bias,
}

/// `alpha` and `beta` of `out = alpha * left * right + beta * out`.
#[derive(Clone, Copy, Debug)]
pub enum Scalars {
    /// Their values.
    Host {
        /// Of the product.
        alpha: f32,
        /// Of what was there.
        beta: f32,
    },
    /// Addresses of an f32 each.
    Device {
        /// Of the product.
        alpha: u64,
        /// Of what was there.
        beta: u64,
    },
}

impl Scalars {
    /// The product as it is.
    pub const ONE: Self = Self::Host {
        alpha: 1.0,
        beta: 0.0,
    };
}

impl GemmDesc {
    /// The product of `left` and `right`, `[rows, k]` by `[k, cols]`, once, with nothing after it.
    pub const fn new(
        [rows, cols, k]: [usize; 3],
        [left, right]: [OperandDesc; 2],
        out: Dtype,
    ) -> Self {
        Self {
            rows,
            cols,
            k,
            left,
            right,
            out,
            out_stride: 0,
            batch: 1,
            epilogue: Epilogue::None,
            fast_accum: false,
        }
    }

    /// Bytes of one left operand, one right operand and one result; more than any memory has where the number does not fit.
    pub const fn bytes(&self) -> [usize; 3] {
        let Self { rows, cols, k, .. } = *self;
        [
            bytes(rows, k, self.left.dtype),
            bytes(cols, k, self.right.dtype),
            bytes(rows, cols, self.out),
        ]
    }

    /// Operands, result and sizes.
    pub fn describe(&self) -> String {
        let Self {
            rows,
            cols,
            k,
            left,
            right,
            out,
            batch,
            ..
        } = self;
        let times = if *batch > 1 {
            format!(", {batch} times")
        } else {
            String::new()
        };
        format!(
            "{:?} x {:?} to {out:?}, {rows}x{cols}x{k}{times}",
            left.dtype, right.dtype
        )
    }
}

const fn bytes(rows: usize, cols: usize, dtype: Dtype) -> usize {
    let entries = rows.saturating_mul(cols);
    match entries.checked_mul(dtype.bits()) {
        Some(bits) => bits.div_ceil(8),
        None => usize::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::{Dtype, Epilogue, GemmDesc, OperandDesc, ScaleMode};
    use lowp_format::Code;

    /// Scales and values are no codes.
    #[test]
    fn codes_are_those_that_products_read() {
        for code in Code::ALL {
            let dtype = Dtype::of_codes(code);
            let Some(bits) = [Code::E4M3, Code::E5M2, Code::E2M1]
                .contains(&code)
                .then_some(code.bits())
            else {
                let error = dtype.expect_err("no codes").to_string();
                assert!(error.contains(&code.to_string()), "{error}");
                continue;
            };
            assert_eq!(dtype.expect("codes").bits(), bits);
        }
    }

    #[test]
    fn bytes_are_those_of_the_sides() {
        let side = |dtype| OperandDesc {
            dtype,
            scale: ScaleMode::Tensor,
            k_inner: true,
            stride: 0,
        };
        let product = GemmDesc {
            rows: 3,
            cols: 5,
            k: 7,
            left: side(Dtype::E4M3),
            right: side(Dtype::E2M1),
            out: Dtype::Bf16,
            out_stride: 0,
            batch: 1,
            epilogue: Epilogue::None,
            fast_accum: false,
        };
        assert_eq!(product.bytes(), [21, 18, 30]);
    }
}
