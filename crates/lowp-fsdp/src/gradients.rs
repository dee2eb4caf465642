//! [`Gradients`]: where the layers of a rank put their gradients.

use std::sync::{Mutex, MutexGuard, PoisonError};

use lowp_comm::MeshComm;
use lowp_kernels::Backend;
use lowp_shard::{GradBucketOptions, GradBuckets, GradParam, ShardError};

/// The gradients of all parameters of a rank, which travel to the owners of their elements in buckets while backward goes on
/// ([`GradBuckets`]). Parameters are known by their place in the list that they were made from.
#[derive(Debug)]
pub struct Gradients<B: Backend> {
    backend: B,
    buckets: Mutex<GradBuckets<B>>,
}

impl<B: Backend> Gradients<B> {
    /// Buckets for `params`, in the order of backward. Collective.
    ///
    /// # Errors
    /// As [`GradBuckets::new`].
    pub fn new(
        backend: &B,
        mesh: &MeshComm<B>,
        params: Vec<GradParam<B>>,
        options: GradBucketOptions,
    ) -> Result<Self, ShardError> {
        let buckets = GradBuckets::new(backend, mesh, params, options)?;
        Ok(Self {
            backend: backend.clone(),
            buckets: Mutex::new(buckets),
        })
    }

    /// Adds the full gradient of a parameter to what arrived before in this step.
    pub(crate) fn add(&self, param: usize, values: &[f32]) -> Result<(), ShardError> {
        let mut buckets = self.lock();
        let grad = buckets.grad(param)?;
        grad.write(&self.backend, 0, values)?;
        buckets.push(param)
    }

    /// The buckets. A thread that panicked left a bucket that is whole or can be discarded.
    pub(crate) fn lock(&self) -> MutexGuard<'_, GradBuckets<B>> {
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
