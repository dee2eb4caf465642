//! [`Arena`]: memory that the layers of a model use in turn, and checks of lengths before a kernel gets addresses.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
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
    /// Whether blocks run forward again before they run backward.
    again: bool,
    bytes: AtomicU64,
}

impl Arena {
    pub(super) fn new(cuda: &Cuda, again: bool) -> Self {
        Self {
            cuda: cuda.clone(),
            values: Mutex::default(),
            sums: Mutex::default(),
            codes: Mutex::default(),
            again,
            bytes: AtomicU64::new(0),
        }
    }

    /// Whether blocks run forward again before they run backward.
    pub(super) fn runs_again(&self) -> bool {
        self.again
    }

    /// Bytes that the model has here, lent and owned.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// `len` values of its own for a part of the model, as long as the model lives.
    pub(super) fn own<T: Element>(&self, len: usize) -> Result<CudaBuffer<T>, KernelError> {
        let buffer = self.cuda.alloc(len)?;
        let bytes = (len * size_of::<T>()) as u64;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(buffer)
    }

    /// `len` bf16 values for `what` in a block, from its forward to its backward pass: all blocks have the same where they run forward
    /// again, else each has its own.
    pub(super) fn kept_values(
        &self,
        what: &'static str,
        len: usize,
    ) -> Result<CudaBuffer<bf16>, KernelError> {
        match self.again {
            true => self.values(what, len),
            false => self.own(len),
        }
    }

    /// As [`Arena::kept_values`], f32.
    pub(super) fn kept_sums(
        &self,
        what: &'static str,
        len: usize,
    ) -> Result<CudaBuffer<f32>, KernelError> {
        match self.again {
            true => self.sums(what, len),
            false => self.own(len),
        }
    }

    /// As [`Arena::kept_values`], a buffer of `spec`.
    pub(super) fn kept_codes(
        &self,
        what: &str,
        spec: &BufferSpec,
        bytes: usize,
    ) -> Result<CudaBuffer<u8>, KernelError> {
        match self.again {
            true => self.codes(what, spec, bytes),
            false => self.own(bytes),
        }
    }

    /// `len` bf16 values for `what`.
    pub(super) fn values(
        &self,
        what: &'static str,
        len: usize,
    ) -> Result<CudaBuffer<bf16>, KernelError> {
        self.lend(&self.values, (what, len), len)
    }

    /// `len` f32 values for `what`.
    pub(super) fn sums(
        &self,
        what: &'static str,
        len: usize,
    ) -> Result<CudaBuffer<f32>, KernelError> {
        self.lend(&self.sums, (what, len), len)
    }

    /// A buffer of `spec` for `what`, of `bytes`.
    pub(super) fn codes(
        &self,
        what: &str,
        spec: &BufferSpec,
        bytes: usize,
    ) -> Result<CudaBuffer<u8>, KernelError> {
        self.lend(&self.codes, (format!("{what} {spec:?}"), bytes), bytes)
    }

    fn lend<K: std::hash::Hash + Eq, T: Element>(
        &self,
        known: &Mutex<HashMap<K, CudaBuffer<T>>>,
        key: K,
        len: usize,
    ) -> Result<CudaBuffer<T>, KernelError> {
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = known.get(&key) {
            return Ok(buffer.clone());
        }
        let buffer = self.own(len)?;
        known.insert(key, buffer.clone());
        Ok(buffer)
    }
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
