//! [`Operand`]: an operand as a product reads it.

use lowp_format::{KernelKey, Orientation, Part, ScaleRule};
use lowp_kernels::{CudaBuffer, KernelError};

use crate::GemmError;
use crate::desc::{Dtype, OperandDesc};
use crate::table::GemmKind;

/// Where an operand is: its entries, and its scales where it has such.
#[derive(Clone, Copy, Debug)]
pub struct OperandPtr {
    /// Address of its entries.
    pub data: u64,
    /// Address of its scales; 0 without.
    pub scale: u64,
}

impl OperandPtr {
    /// Of an operand without scales.
    pub fn values(data: u64) -> Self {
        Self { data, scale: 0 }
    }
}

/// An operand of a product, ready.
#[derive(Debug)]
pub struct Operand {
    /// Its dtype, scales and order in memory.
    pub desc: OperandDesc,
    /// The device addresses of its entries and scales.
    pub ptr: OperandPtr,
    /// Address of the amax of two-level scales; 0 without.
    pub amax: u64,
    /// The largest value under that amax.
    pub largest: f32,
}

impl Operand {
    /// bf16 values at device address `data`, without scales; `k_inner` as in [`OperandDesc`].
    pub fn values(data: u64, k_inner: bool) -> Self {
        Self {
            desc: OperandDesc::plain(Dtype::Bf16, k_inner),
            ptr: OperandPtr::values(data),
            amax: 0,
            largest: 0.0,
        }
    }

    /// Codes of `orientation`, made by `kernel`. Block scales lie as they are stored: where the product reads another form of them, they
    /// are repacked, and the caller puts their place here.
    ///
    /// # Errors
    /// Entries that are no codes, or a buffer that `find` does not know.
    pub fn codes<'a>(
        kind: GemmKind,
        orientation: Orientation,
        kernel: &KernelKey,
        find: impl Fn(Part) -> Option<(&'a lowp_format::BufferSpec, &'a CudaBuffer<u8>)>,
    ) -> Result<Self, GemmError> {
        let missing = |what: &str| KernelError::Missing {
            what: what.to_owned(),
        };
        let (spec, data) = find(Part::Data).ok_or_else(|| missing("the codes of an operand"))?;
        let part = match kind.scale_form() {
            Some(_) => Part::BlockScale,
            None => Part::DecodeScale,
        };
        let (scale_spec, scale) = find(part).ok_or_else(|| missing("the scales of an operand"))?;
        let (amax, largest) = match kernel.scale {
            ScaleRule::TwoLevel { four_over_six, .. } => {
                let (_, amax) =
                    find(Part::Amax).ok_or_else(|| missing("the amax of an operand"))?;
                (amax.pointer(), four_over_six.largest())
            }
            _ => (0, 0.0),
        };
        Ok(Self {
            desc: OperandDesc::of_codes(kind, orientation, [spec, scale_spec])?,
            ptr: OperandPtr {
                data: data.pointer(),
                scale: scale.pointer(),
            },
            amax,
            largest,
        })
    }
}
