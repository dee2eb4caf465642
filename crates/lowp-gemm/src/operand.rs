//! [`Ready`]: an operand as a product reads it.

use lowp_format::{Axis, Code, KernelKey, Orientation, Part, ScaleRule};
use lowp_kernels::{CudaBuffer, KernelError};

use crate::cublaslt::{Dtype, Place, Scale, Side};
use crate::table::Product;

/// An operand of a product, ready.
#[derive(Debug)]
pub struct Ready {
    pub side: Side,
    pub place: Place,
    /// Address of the amax of two-level scales; 0 without.
    pub amax: u64,
    /// The largest value under that amax.
    pub largest: f32,
}

impl Ready {
    /// bf16 values.
    pub fn values(data: u64, k_inner: bool) -> Self {
        Self {
            side: Side {
                dtype: Dtype::Bf16,
                scale: Scale::None,
                k_inner,
                stride: 0,
            },
            place: Place::values(data),
            amax: 0,
            largest: 0.0,
        }
    }

    /// Codes of `orientation`, made by `kernel`. Block scales lie as they are stored: where the product reads another form of them, they
    /// are repacked, and the caller puts their place here.
    pub fn codes<'a>(
        product: Product,
        orientation: Orientation,
        kernel: &KernelKey,
        find: impl Fn(Part) -> Option<(&'a lowp_format::BufferSpec, &'a CudaBuffer<u8>)>,
    ) -> Result<Self, KernelError> {
        let missing = |what: &str| KernelError::Missing {
            what: what.to_owned(),
        };
        let (spec, data) = find(Part::Data).ok_or_else(|| missing("the codes of an operand"))?;
        let inner = match orientation {
            Orientation::Rowwise => Axis::Cols,
            Orientation::Columnwise => Axis::Rows,
        };
        let dtype = match spec.code {
            Code::E5M2 => Dtype::E5M2,
            Code::E2M1 => Dtype::E2M1,
            _ => Dtype::E4M3,
        };
        let part = match product.scale_form() {
            Some(_) => Part::BlockScale,
            None => Part::DecodeScale,
        };
        let (scale_spec, scale) = find(part).ok_or_else(|| missing("the scales of an operand"))?;
        let scale_kind = match product {
            Product::Fp8Rows => Scale::Rows,
            Product::Fp8Groups128 if scale_spec.tile == [128, 128] => Scale::Square128,
            Product::Fp8Groups128 => Scale::Vec128,
            Product::Fp8Groups32 => Scale::Vec32,
            Product::Fp4Groups16 => Scale::Vec16,
            Product::Fp8Tensor | Product::Bf16 => Scale::Tensor,
        };
        let (amax, largest) = match kernel.scale {
            ScaleRule::TwoLevel { four_over_six, .. } => {
                let (_, amax) =
                    find(Part::Amax).ok_or_else(|| missing("the amax of an operand"))?;
                (amax.pointer(), four_over_six.largest())
            }
            _ => (0, 0.0),
        };
        Ok(Self {
            side: Side {
                dtype,
                scale: scale_kind,
                k_inner: spec.axes[1] == inner,
                stride: 0,
            },
            place: Place {
                data: data.pointer(),
                scale: scale.pointer(),
            },
            amax,
            largest,
        })
    }
}
