//! Products of layers, by cuBLASLt in PyTorch's memory.

#![expect(unsafe_code, reason = "passes on addresses of PyTorch")]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use lowp_gemm::{CublasLt, Dtype, Epilogue, GemmDesc, OperandDesc, OperandPtr, Scalars, Workspace};
use lowp_kernels::Cuda;

use super::torch::{Holds, Tensor, torch};
use crate::error::Error;
use crate::locks::lock;
use crate::place;
use crate::scales::Scales;

/// Bytes that a product works in: as many as PyTorch gives its own on a Hopper, taken from PyTorch for each product.
pub(super) const WORKSPACE: usize = 32 << 20;

/// `WORKSPACE` bytes in which products of a device work.
#[derive(Clone, Copy)]
pub(super) struct WorkMemory {
    pub(super) device: i32,
    pub(super) address: u64,
}

/// One operand of a product: codes whose inner axis is contracted.
pub(super) struct Side {
    /// Rows and columns of the codes.
    pub(super) sides: [usize; 2],
    pub(super) ptr: OperandPtr,
    pub(super) holds: Holds,
    pub(super) scales: Scales,
}

impl Scales {
    /// Whether `scale` has, from `begin` on, those of codes of `outer` rows that are contracted over `depth`.
    fn check(self, scale: &Tensor, begin: usize, [outer, depth]: [usize; 2]) -> Result<(), Error> {
        let (found, needed) = (scale.entries()?, begin + self.count(outer, depth));
        match found >= needed {
            true => Ok(()),
            false => Err(Error::new(format!(
                "{found} scales for codes of {outer}x{depth}; their product reads {needed}"
            ))),
        }
    }
}

impl Side {
    /// The codes have the sides of the transpose.
    pub(super) fn columnwise(
        [codes, scale]: [&Tensor; 2],
        scales: Scales,
        device: i32,
    ) -> Result<Self, Error> {
        let [cols, rows] = codes.sides()?;
        Self::of([codes, scale], scales, scales.begin(rows, cols), device)
    }

    /// Codes on a device, with the scales from `begin` on.
    pub(super) fn of(
        [codes, scale]: [&Tensor; 2],
        scales: Scales,
        begin: usize,
        device: i32,
    ) -> Result<Self, Error> {
        let (sides, holds) = (codes.sides()?, codes.holds()?);
        codes.check_place(device)?;
        scale.check_place(device)?;
        if !matches!(holds, Holds::E4M3 | Holds::E5M2) || scale.holds()? != Holds::F32 {
            return Err(Error::new(format!(
                "an operand of a layer holds {holds:?}, with scales in {:?}; it takes codes of FP8 with scales in float32",
                scale.holds()?
            )));
        }
        scales.check(scale, begin, sides)?;
        let ptr = OperandPtr {
            data: codes.address()?,
            scale: scale.address()? + (size_of::<f32>() * begin) as u64,
        };
        Ok(Self {
            sides,
            ptr,
            holds,
            scales,
        })
    }
}

fn dtype_of(holds: Holds) -> Result<Dtype, Error> {
    match holds {
        Holds::E4M3 => Ok(Dtype::E4M3),
        Holds::E5M2 => Ok(Dtype::E5M2),
        Holds::Bf16 => Ok(Dtype::Bf16),
        Holds::F32 => Ok(Dtype::F32),
        Holds::Bytes => Err(Error::new(
            "an operand of a product holds bytes; it takes codes of FP8",
        )),
    }
}

/// `left @ right.T`, as `Products` multiplies.
pub(super) fn multiply(
    [left, right]: [Side; 2],
    dtype: Holds,
    bias: Option<&Tensor>,
    fast: bool,
    memory: WorkMemory,
) -> Result<Tensor, Error> {
    let ([rows, depth], [cols, _]) = (left.sides, right.sides);
    let sides = [rows, cols, depth];
    let torch = torch()?;
    let plain = |side: &Side| {
        Ok::<_, Error>(OperandDesc {
            scale: side.scales.0,
            ..OperandDesc::plain(dtype_of(side.holds)?, true)
        })
    };
    let desc = GemmDesc {
        epilogue: if bias.is_some() {
            Epilogue::Bias
        } else {
            Epilogue::None
        },
        // Sums of scaled groups are in f32 alone.
        fast_accum: fast && left.scales.is_one() && right.scales.is_one(),
        ..GemmDesc::new(sides, [plain(&left)?, plain(&right)?], dtype_of(dtype)?)
    };
    let device = memory.device;
    let out = torch.empty(&sides[..2], dtype, device)?;
    let workspace = Workspace::foreign(memory.address, WORKSPACE);
    let bias = bias.map_or(Ok(0), |bias| bias.bias(sides[1], device))?;
    let products = products(device, torch.stream(device)?)?;
    // SAFETY: addresses are those of contiguous tensors of these shapes on this device; PyTorch reuses memory of a stream after the work of
    // that stream.
    unsafe {
        products.run(
            &desc,
            [left.ptr, right.ptr],
            out.address()?,
            bias,
            Scalars::ONE,
            &workspace,
        )
    }?;
    Ok(out)
}

pub(super) fn backend(device: i32, stream: u64) -> Result<Cuda, Error> {
    place::cuda(usize::try_from(device).unwrap_or(0), stream)
}

/// By device and stream.
type ByStream = HashMap<(i32, u64), Arc<CublasLt>>;

/// The products of a stream.
fn products(device: i32, stream: u64) -> Result<Arc<CublasLt>, Error> {
    static PRODUCTS: LazyLock<Mutex<ByStream>> = LazyLock::new(Mutex::default);
    if let Some(known) = lock(&PRODUCTS).get(&(device, stream)) {
        return Ok(Arc::clone(known));
    }
    let made = Arc::new(CublasLt::new(&backend(device, stream)?)?);
    Ok(Arc::clone(
        lock(&PRODUCTS).entry((device, stream)).or_insert(made),
    ))
}
