//! [`Products`]: products of FP8 codes with one scale for each tensor.

#![expect(unsafe_code, reason = "passes on addresses of PyTorch")]

use lowp_matmul::{Dtype, Factors, Matmuls, Place, Product, Scale, Side};
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{Device, DeviceArg, MemoryArg, Place as _};

/// An operand as Python gives it: addresses of its codes and of its scale, and the name of its dtype.
type OperandArg<'a> = (u64, u64, &'a str);

/// The products of a stream of a GPU. Each is planned once.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct Products {
    of: Matmuls,
}

#[pymethods]
impl Products {
    /// Those of `device`'s stream, which work in `workspace`.
    #[new]
    fn new(device: DeviceArg, workspace: MemoryArg) -> Result<Self, Error> {
        let device = Device::new(&device)?;
        let Device::Cuda(cuda) = &device else {
            return Err(Error::new(format!(
                "products of codes on {device:?}; they are for GPUs"
            )));
        };
        let of = Matmuls::new(cuda, cuda.wrap(workspace.into())?)?;
        Ok(Self { of })
    }

    /// `out = left @ right.T`, `(rows, depth) @ (cols, depth).T` for `sides` (rows, cols, depth), all row-major, summed in f32 and rounded to `dtype`, `bfloat16` or
    /// `float32`. A `bias` of bf16, if its address is not 0, is added to each row. `fast` lets sums stay in the tensor core's accumulator.
    #[expect(clippy::too_many_arguments, reason = "one for each argument of Python")]
    fn multiply(
        &self,
        sides: (usize, usize, usize),
        left: OperandArg<'_>,
        right: OperandArg<'_>,
        out: u64,
        dtype: &str,
        bias: u64,
        fast: bool,
    ) -> Result<(), Error> {
        let (rows, cols, depth) = sides;
        let product = Product {
            rows,
            cols,
            k: depth,
            left: side(left.2, true)?,
            right: side(right.2, true)?,
            out: dtype_of(dtype)?,
            out_stride: 0,
            batch: 1,
            bias: bias != 0,
            fast,
            device_factors: false,
        };
        let places = [left, right].map(|(data, scale, _)| Place { data, scale });
        if places
            .iter()
            .any(|place| place.data == 0 || place.scale == 0)
            || out == 0
        {
            return Err(Error::new(
                "a product of codes whose memory is gone; FSDP2 frees a gathered weight behind its module's forward and backward".to_owned(),
            ));
        }
        // SAFETY: the package gives addresses of tensors of these shapes and dtypes, which it holds for the call; PyTorch reuses memory of a
        // stream behind the work of that stream.
        Ok(unsafe {
            self.of
                .run(&product, places, out, bias, Factors::Host(1.0, false))
        }?)
    }
}

fn side(dtype: &str, k_inner: bool) -> Result<Side, Error> {
    Ok(Side {
        dtype: dtype_of(dtype)?,
        scale: Scale::Tensor,
        k_inner,
        stride: 0,
    })
}

fn dtype_of(name: &str) -> Result<Dtype, Error> {
    match name {
        "E4M3" => Ok(Dtype::E4M3),
        "E5M2" => Ok(Dtype::E5M2),
        "bfloat16" => Ok(Dtype::Bf16),
        "float32" => Ok(Dtype::F32),
        other => Err(Error::new(format!(
            "an operand of {other}; products of codes take E4M3 and E5M2, and give bfloat16 or float32"
        ))),
    }
}
