//! [`Arena`]: memory that the layers of a model use in turn, and checks of lengths before a kernel gets addresses.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use half::bf16;
use lowp_format::BufferSpec;
use lowp_kernels::{Backend, Cuda, CudaBuffer, Element, KernelError};

use super::TransformerError;

/// Buffers by use: layers of one model run one after another, so that what one needs only while it runs the next one may have.
#[derive(Debug)]
pub(super) struct Arena {
    cuda: Cuda,
    values: Mutex<HashMap<(&'static str, usize), CudaBuffer<bf16>>>,
    sums: Mutex<HashMap<(&'static str, usize), CudaBuffer<f32>>>,
    codes: Mutex<HashMap<(String, usize), CudaBuffer<u8>>>,
}

impl Arena {
    pub(super) fn new(cuda: &Cuda) -> Self {
        Self {
            cuda: cuda.clone(),
            values: Mutex::default(),
            sums: Mutex::default(),
            codes: Mutex::default(),
        }
    }

    /// `len` bf16 values for `what`.
    pub(super) fn values(
        &self,
        what: &'static str,
        len: usize,
    ) -> Result<CudaBuffer<bf16>, KernelError> {
        lend(&self.cuda, &self.values, (what, len), len)
    }

    /// `len` f32 values for `what`.
    pub(super) fn sums(
        &self,
        what: &'static str,
        len: usize,
    ) -> Result<CudaBuffer<f32>, KernelError> {
        lend(&self.cuda, &self.sums, (what, len), len)
    }

    /// A buffer of `spec` for `what`, of `bytes`.
    pub(super) fn codes(
        &self,
        what: &str,
        spec: &BufferSpec,
        bytes: usize,
    ) -> Result<CudaBuffer<u8>, KernelError> {
        lend(
            &self.cuda,
            &self.codes,
            (format!("{what} {spec:?}"), bytes),
            bytes,
        )
    }
}

fn lend<K: std::hash::Hash + Eq, T: Element>(
    cuda: &Cuda,
    known: &Mutex<HashMap<K, CudaBuffer<T>>>,
    key: K,
    len: usize,
) -> Result<CudaBuffer<T>, KernelError> {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(buffer) = known.get(&key) {
        return Ok(buffer.clone());
    }
    let buffer = cuda.alloc(len)?;
    known.insert(key, buffer.clone());
    Ok(buffer)
}

/// The address of `buffer`, which has at least `len` values.
pub(super) fn at<T: Element>(buffer: &CudaBuffer<T>, len: usize) -> Result<u64, TransformerError> {
    if buffer.len() < len {
        return Err(TransformerError::Unsupported(format!(
            "a buffer of {} values where {len} are needed",
            buffer.len()
        )));
    }
    Ok(buffer.pointer())
}
