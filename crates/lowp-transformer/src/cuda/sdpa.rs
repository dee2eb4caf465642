//! [`Sdpa`]: causal attention by cuDNN, forward and backward, where this program was built with it and the library is found.

#![expect(unsafe_code, reason = "calls the C interface of cudnn/sdpa.cpp")]

use std::ffi::{CStr, c_char, c_void};

use lowp_kernels::{Cuda, CudaBuffer, KernelError};

use super::TransformerError;
use super::place::Arena;
use crate::places::sdpa_workspace;

/// Distances in values from one sequence, head and position to the next.
pub(super) type Strides = [i64; 3];

/// What attention is planned for, as the C interface has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SdpaSizes {
    pub(super) sequences: i64,
    pub(super) heads: i64,
    pub(super) kv_heads: i64,
    pub(super) seq: i64,
    pub(super) dim: i64,
    /// Positions that each sees, its own included; 0 for all before it.
    pub(super) window: i64,
    /// Whether something is added to scores, 1 or 0.
    pub(super) masked: i64,
    /// Which backward pass is planned: 0 for none, 1 for sums of one order, 2 for sums of any.
    pub(super) backward: i64,
    pub(super) q: Strides,
    pub(super) k: Strides,
    pub(super) v: Strides,
    pub(super) o: Strides,
    pub(super) scale: f32,
}

#[cfg(lowp_cudnn)]
mod raw {
    use super::{SdpaSizes, c_char, c_void};

    unsafe extern "C" {
        pub(super) fn lowp_sdpa_version() -> usize;
        pub(super) fn lowp_sdpa_new(
            sizes: *const SdpaSizes,
            text: *mut c_char,
            room: usize,
        ) -> *mut c_void;
        pub(super) fn lowp_sdpa_workspace(sdpa: *const c_void) -> i64;
        pub(super) fn lowp_sdpa_has_backward(sdpa: *const c_void) -> i32;
        pub(super) fn lowp_sdpa_free(sdpa: *mut c_void);
        pub(super) fn lowp_sdpa_forward(
            sdpa: *mut c_void,
            stream: *mut c_void,
            places: *const *mut c_void,
            workspace: *mut c_void,
            text: *mut c_char,
            room: usize,
        ) -> i32;
        pub(super) fn lowp_sdpa_backward(
            sdpa: *mut c_void,
            stream: *mut c_void,
            places: *const *mut c_void,
            workspace: *mut c_void,
            text: *mut c_char,
            room: usize,
        ) -> i32;
    }
}

/// The same functions of a program that was built without cuDNN's headers.
#[cfg(not(lowp_cudnn))]
#[allow(clippy::missing_safety_doc, reason = "stand-ins that do nothing")]
mod raw {
    use super::{SdpaSizes, c_char, c_void};

    pub(super) unsafe fn lowp_sdpa_version() -> usize {
        0
    }
    pub(super) unsafe fn lowp_sdpa_new(
        _: *const SdpaSizes,
        _: *mut c_char,
        _: usize,
    ) -> *mut c_void {
        std::ptr::null_mut()
    }
    pub(super) unsafe fn lowp_sdpa_workspace(_: *const c_void) -> i64 {
        0
    }
    pub(super) unsafe fn lowp_sdpa_has_backward(_: *const c_void) -> i32 {
        0
    }
    pub(super) unsafe fn lowp_sdpa_free(_: *mut c_void) {}
    pub(super) unsafe fn lowp_sdpa_forward(
        _: *mut c_void,
        _: *mut c_void,
        _: *const *mut c_void,
        _: *mut c_void,
        _: *mut c_char,
        _: usize,
    ) -> i32 {
        1
    }
    pub(super) unsafe fn lowp_sdpa_backward(
        _: *mut c_void,
        _: *mut c_void,
        _: *const *mut c_void,
        _: *mut c_void,
        _: *mut c_char,
        _: usize,
    ) -> i32 {
        1
    }
}

/// Room for what cuDNN says of a failure.
const TEXT: usize = 1024;

fn said(text: &[u8; TEXT]) -> String {
    CStr::from_bytes_until_nul(text).map_or_else(
        |_| String::new(),
        |text| text.to_string_lossy().into_owned(),
    )
}

/// Whether this program was built with cuDNN and the library is found.
pub fn has_cudnn() -> bool {
    // SAFETY: looks for the library.
    cfg!(lowp_cudnn) && unsafe { raw::lowp_sdpa_version() } != 0
}

/// Planned attention of one shape.
#[derive(Debug)]
pub(super) struct Sdpa {
    plans: Plans,
    workspace: CudaBuffer<u8>,
    /// Why there is no backward pass, where there is none.
    forward_only: Option<String>,
}

/// What cuDNN has of it.
#[derive(Debug)]
struct Plans {
    cuda: Cuda,
    raw: *mut c_void,
}

// SAFETY: cuDNN's handle may move between threads; calls take the stream they are given.
unsafe impl Send for Plans {}
// SAFETY: a model's layers call it one after another.
unsafe impl Sync for Plans {}

impl Sdpa {
    /// Plans attention of these sizes, without backward where cuDNN has none; or the reason why cuDNN does not run it.
    pub(super) fn new(
        cuda: &Cuda,
        arena: &Arena,
        sizes: &SdpaSizes,
    ) -> Result<Result<Self, String>, KernelError> {
        if !cfg!(lowp_cudnn) {
            return Ok(Err(
                "this program was built without cuDNN's headers (`cargo xtask cuda --cudnn`)"
                    .to_owned(),
            ));
        }
        if !has_cudnn() {
            return Ok(Err(
                "cuDNN (libcudnn.so.9) was not found: add its folder to LD_LIBRARY_PATH".to_owned(),
            ));
        }
        let mut text = [0u8; TEXT];
        let made = cuda.foreign_work::<_, _, KernelError>(
            || (),
            // SAFETY: sizes and text live through the call; the device is current.
            |_| Ok(unsafe { raw::lowp_sdpa_new(sizes, text.as_mut_ptr().cast(), TEXT) } as u64),
        )?;
        if made == 0 {
            return Ok(Err(format!("cuDNN: {}", said(&text))));
        }
        let plans = Plans {
            cuda: cuda.clone(),
            raw: made as *mut c_void,
        };
        // SAFETY: it was just made.
        let bytes = unsafe { raw::lowp_sdpa_workspace(plans.raw) };
        let workspace = arena.codes(&sdpa_workspace(usize::try_from(bytes).unwrap_or(0)))?;
        // SAFETY: as above.
        let has_backward = unsafe { raw::lowp_sdpa_has_backward(plans.raw) } != 0;
        Ok(Ok(Self {
            plans,
            workspace,
            forward_only: (!has_backward).then(|| format!("cuDNN: {}", said(&text))),
        }))
    }

    /// Why there is no backward pass, where there is none.
    pub(super) fn forward_only(&self) -> Option<&str> {
        self.forward_only.as_deref()
    }

    /// Gives the stream the forward pass: `q`, `k`, `v` in, `o` and one f32 per head and position out; last what is added to scores, or 0.
    ///
    /// # Safety
    /// The addresses are those of tensors of the sizes that it was planned for, in memory of the device that is not freed before work
    /// that the stream has by now.
    pub(super) unsafe fn forward(&self, places: [u64; 6]) -> Result<(), TransformerError> {
        // SAFETY: the caller's promise.
        self.run(&places, |sdpa, stream, places, workspace, text| unsafe {
            raw::lowp_sdpa_forward(sdpa, stream, places, workspace, text, TEXT)
        })
    }

    /// Gives the stream the backward pass: what forward had, the gradient of `o`, and the places of those of `q`, `k` and `v`.
    ///
    /// # Safety
    /// As [`Sdpa::forward`].
    pub(super) unsafe fn backward(&self, places: [u64; 10]) -> Result<(), TransformerError> {
        // SAFETY: the caller's promise.
        self.run(&places, |sdpa, stream, places, workspace, text| unsafe {
            raw::lowp_sdpa_backward(sdpa, stream, places, workspace, text, TEXT)
        })
    }

    fn run(
        &self,
        places: &[u64],
        call: impl FnOnce(*mut c_void, *mut c_void, *const *mut c_void, *mut c_void, *mut c_char) -> i32,
    ) -> Result<(), TransformerError> {
        let places: Vec<*mut c_void> = places.iter().map(|&place| place as *mut c_void).collect();
        let mut text = [0u8; TEXT];
        let workspace = self.workspace.pointer() as *mut c_void;
        let Plans { cuda, raw } = &self.plans;
        let failed = cuda.foreign_work::<_, _, KernelError>(
            || (),
            |stream| {
                let stream = stream as *mut c_void;
                Ok(call(
                    *raw,
                    stream,
                    places.as_ptr(),
                    workspace,
                    text.as_mut_ptr().cast(),
                ))
            },
        )?;
        if failed == 0 {
            return Ok(());
        }
        let why = said(&text);
        Err(KernelError::Device {
            call: "cudnnBackendExecute",
            why,
        }
        .into())
    }
}

impl Drop for Plans {
    fn drop(&mut self) {
        // What still runs uses them.
        let raw = self.raw;
        // SAFETY: made once, freed once.
        self.cuda
            .free_foreign(|| unsafe { raw::lowp_sdpa_free(raw) });
    }
}
