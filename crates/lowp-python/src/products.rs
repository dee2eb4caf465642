//! [`Products`]: products of FP8 codes with their scales.

#![expect(unsafe_code, reason = "passes on addresses of PyTorch")]

use lowp_gemm::{CublasLt, Dtype, Epilogue, GemmDesc, OperandDesc, OperandPtr, Scalars, Workspace};
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{Current, Device, DeviceArg, Handle, MemoryArg, Owned, Place as _};
use crate::scales::Scales;

/// An operand as Python gives it: its codes, its scales, the name of its dtype, and what its scales belong to.
type OperandArg<'a> = (MemoryArg, MemoryArg, &'a str, &'a str);

/// The products of a stream of a GPU. Each is planned once.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct Products {
    of: Owned<CublasLt>,
    /// Number of the GPU.
    device: i64,
}

#[pymethods]
impl Products {
    /// Those of `device`'s stream.
    #[new]
    fn new(device: DeviceArg) -> Result<Self, Error> {
        let device = Device::new(&device)?;
        let Handle::Cuda(cuda) = &device.handle else {
            return Err(Error::new(format!(
                "products of codes cannot run on {device:?}, only on GPUs"
            )));
        };
        let of = Owned::new(CublasLt::new(cuda)?);
        let device = cuda.number();
        Ok(Self { of, device })
    }

    /// `out = left @ right.T`, `(rows, depth) @ (cols, depth).T` for `sides` (rows, cols, depth), all row-major, summed in f32 and rounded
    /// to `dtype`, `bfloat16` or `float32`. A `bias` of bf16 is added to each row. `fast` lets sums stay in the tensor core's accumulator.
    /// It works in `workspace`, which the stream may give to others afterwards.
    #[expect(clippy::too_many_arguments, reason = "one for each argument of Python")]
    fn multiply(
        &self,
        sides: (usize, usize, usize),
        left: OperandArg<'_>,
        right: OperandArg<'_>,
        out: MemoryArg,
        dtype: &str,
        bias: Option<MemoryArg>,
        fast: bool,
        workspace: MemoryArg,
    ) -> Result<(), Error> {
        let (rows, cols, depth) = sides;
        let scales = [Scales::of(left.3)?, Scales::of(right.3)?];
        let operands = [operand(left.2, scales[0])?, operand(right.2, scales[1])?];
        let desc = GemmDesc {
            epilogue: match bias {
                Some(_) => Epilogue::Bias,
                None => Epilogue::None,
            },
            fast_accum: fast,
            ..GemmDesc::new([rows, cols, depth], operands, dtype_of(dtype)?)
        };
        let [of_left, of_right, of_out] = desc.bytes();
        let ptr = |operand: &OperandArg<'_>, bytes, entries, what: &str| {
            let data = self.address(&operand.0, bytes, what)?;
            let scale = self.address(&operand.1, 4 * entries, "the scale of an operand")?;
            Ok::<_, Error>(OperandPtr { data, scale })
        };
        let ptrs = [
            ptr(
                &left,
                of_left,
                scales[0].count(rows, depth),
                "the left operand",
            )?,
            ptr(
                &right,
                of_right,
                scales[1].count(cols, depth),
                "the right operand",
            )?,
        ];
        let out = self.address(&out, of_out, "the result")?;
        let bias = match &bias {
            Some(bias) => self.address(bias, 2 * cols, "the bias")?,
            None => 0,
        };
        let workspace = Workspace::foreign(
            self.address(&workspace, workspace.1, "the workspace")?,
            workspace.1,
        );
        let _current = Current::keep();
        // SAFETY: addresses are those of contiguous tensors with so many bytes on this device, which the package holds for the call;
        // PyTorch reuses memory of a stream after the work of that stream.
        Ok(unsafe {
            self.of
                .run(&desc, ptrs, out, bias, Scalars::ONE, &workspace)
        }?)
    }
}

impl Products {
    /// The address of memory that has `needed` bytes on this device.
    fn address(
        &self,
        (pointer, bytes, device, _): &MemoryArg,
        needed: usize,
        what: &str,
    ) -> Result<u64, Error> {
        if *device != self.device {
            return Err(Error::new(format!(
                "{what} of a product is on device {device}, and the product on device {}; move all tensors to one device",
                self.device
            )));
        }
        if *bytes != needed {
            return Err(Error::new(format!(
                "{what} of a product has {bytes} bytes, but its shape needs {needed}; give an input as wide as the weight, and a bias as \
                 long as the output is wide"
            )));
        }
        if *pointer == 0 {
            return Err(Error::new(format!(
                "the memory of {what} of a product is gone; FSDP2 frees gathered parameters after the forward and the backward of their module"
            )));
        }
        Ok(*pointer)
    }
}

/// An operand whose contracted axis is the inner one.
fn operand(dtype: &str, scales: Scales) -> Result<OperandDesc, Error> {
    Ok(OperandDesc {
        scale: scales.0,
        ..OperandDesc::plain(dtype_of(dtype)?, true)
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
