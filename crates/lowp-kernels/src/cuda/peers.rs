//! Memory of a device that other devices of the process read and write.

#![expect(unsafe_code, reason = "asks the driver which devices reach each other")]

use cudarc::driver::{result, sys};

use super::driver::failed;
use super::handle::Cuda;
use crate::KernelError;

impl Cuda {
    /// Lets the devices of these numbers read and write what [`crate::Backend::alloc`] gives of this one, now and later, at the same
    /// addresses. Whether they can: not where one of them has no way to this one's memory.
    ///
    /// # Errors
    /// No such device, or the driver failed.
    pub fn share_memory_with(&self, others: &[usize]) -> Result<bool, KernelError> {
        self.bind()?;
        let own = self.device().context.cu_device();
        let mut shared = Vec::new();
        for &other in others {
            let number = i32::try_from(other).unwrap_or(i32::MAX);
            let device = result::device::get(number).map_err(failed("cuDeviceGet"))?;
            let mut can = 0;
            // SAFETY: both are devices of the driver, which writes one number.
            let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, device, own) };
            asked.result().map_err(failed("cuDeviceCanAccessPeer"))?;
            if can == 0 {
                return Ok(false);
            }
            let location = sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: number,
            };
            shared.push(sys::CUmemAccessDesc {
                location,
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            });
        }
        let pool = self.pool()?;
        // SAFETY: the pool is the device's, and the driver reads as many descriptions as there are.
        let set = unsafe { sys::cuMemPoolSetAccess(pool, shared.as_ptr(), shared.len()) };
        set.result().map_err(failed("cuMemPoolSetAccess"))?;
        Ok(true)
    }
}
