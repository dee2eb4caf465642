//! [`CurrentContext`]: the context that was current on a thread before lowp worked there.

#![expect(unsafe_code, reason = "sets the context of the thread")]

use std::sync::LazyLock;

use cudarc::driver::{result, sys};

/// The context that was current on this thread when it was kept. It is current again when this is dropped, which is for the same thread.
///
/// Every call makes the device of its handle current and leaves it so. Programs that go by the current device themselves, as PyTorch does, keep theirs
/// with this.
#[derive(Debug)]
pub struct CurrentContext {
    /// Its address, 0 where none was current; `None` where the driver does not say.
    address: Option<usize>,
}

impl CurrentContext {
    /// Keeps the context of this thread. Nothing without NVIDIA's driver.
    pub fn keep() -> Self {
        // SAFETY: loads the driver's library; without this question cudarc would panic where there is none.
        static HAS_DRIVER: LazyLock<bool> = LazyLock::new(|| unsafe { sys::is_culib_present() });
        let address = HAS_DRIVER.then(address).flatten();
        Self { address }
    }
}

/// The address of the context of this thread. The driver has none to name before it is initialized.
fn address() -> Option<usize> {
    let current = result::ctx::get_current().ok()?;
    Some(current.map_or(0, |context| context as usize))
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        let Some(before) = self.address.filter(|_| address() != self.address) else {
            return;
        };
        // SAFETY: the context was current on this thread; none where it is null. The driver refuses one that was destroyed since.
        let _refused = unsafe { sys::cuCtxSetCurrent(before as sys::CUcontext) };
    }
}
