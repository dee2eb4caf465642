//! [`Arena`]: memory that the layers of a model use one after the other, and checks of lengths before a kernel gets addresses.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use half::bf16;
use lowp_kernels::{Backend, Cuda, CudaBuffer, Element, KernelError};

use super::TransformerError;
use crate::memory::{Ledger, ModelMemory};
use crate::places::Place;

/// The buffers of a model's places: layers run one after another, so that what one needs only while it runs the next one may have.
#[derive(Debug)]
pub(super) struct Arena {
    cuda: Cuda,
    values: Lent<bf16>,
    sums: Lent<f32>,
    codes: Lent<u8>,
    ledger: Mutex<Ledger>,
}

type Lent<T> = Mutex<HashMap<Place, CudaBuffer<T>>>;

impl Arena {
    pub(super) fn new(cuda: &Cuda, again: bool) -> Self {
        Self {
            cuda: cuda.clone(),
            values: Mutex::default(),
            sums: Mutex::default(),
            codes: Mutex::default(),
            ledger: Mutex::new(Ledger::new(again)),
        }
    }

    /// Whether blocks run forward again before they run backward.
    pub(super) fn runs_again(&self) -> bool {
        lock(&self.ledger).again
    }

    /// Bytes that the model has here, lent and owned.
    pub(super) fn memory(&self) -> ModelMemory {
        lock(&self.ledger).memory
    }

    /// The bf16 values of `place`.
    pub(super) fn values(&self, place: &Place) -> Result<CudaBuffer<bf16>, KernelError> {
        self.buffer(&self.values, place)
    }

    /// The f32 values of `place`.
    pub(super) fn sums(&self, place: &Place) -> Result<CudaBuffer<f32>, KernelError> {
        self.buffer(&self.sums, place)
    }

    /// The bytes of `place`: codes and scales, tokens, workspaces.
    pub(super) fn codes(&self, place: &Place) -> Result<CudaBuffer<u8>, KernelError> {
        self.buffer(&self.codes, place)
    }

    fn buffer<T: Element>(
        &self,
        lent: &Lent<T>,
        place: &Place,
    ) -> Result<CudaBuffer<T>, KernelError> {
        let mut lent = lock(lent);
        let mut ledger = lock(&self.ledger);
        let shared = ledger.is_shared(place);
        if let Some(buffer) = lent.get(place).filter(|_| shared) {
            return Ok(buffer.clone());
        }
        let buffer = self.cuda.alloc(place.bytes / size_of::<T>())?;
        ledger.add(*place);
        if shared {
            lent.insert(*place, buffer.clone());
        }
        Ok(buffer)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

/// The bytes of 4-byte entries.
pub(super) fn bytes(values: &[u32]) -> Vec<u8> {
    let values = values.iter();
    values.flat_map(|value| value.to_le_bytes()).collect()
}
