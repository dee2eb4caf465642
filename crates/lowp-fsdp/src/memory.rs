//! [`LayerMemory`]: memory that the layers of a rank use one after the other.

use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use lowp_format::{BufferList, BufferSpec, Shape};
use lowp_kernels::{Backend, KernelError, Target};
use lowp_shard::GatherPool;

/// Buffers of one kind of operand, for as long as a planned cast uses them.
#[derive(Debug)]
pub(crate) struct CastBuffers<B: Backend> {
    pub(crate) source: B::Buffer<f32>,
    pub(crate) targets: Vec<Target<B>>,
    pub(crate) out: B::Buffer<f32>,
}

/// Who shares [`CastBuffers`]: operands of equal shape with equal buffers.
#[derive(Debug)]
struct CastKind<B: Backend> {
    shape: Shape,
    specs: BufferList,
    buffers: Weak<Mutex<CastBuffers<B>>>,
}

/// What a layer needs only while it runs, shared by all layers of a rank: gathered weights, decoded
/// weights, full gradients and quantized operands. Its size is a sum over the different shapes of layers,
/// not over the layers, unless gathered weights are kept for the backward pass.
#[derive(Debug)]
pub struct LayerMemory<B: Backend> {
    backend: B,
    pool: Arc<GatherPool<B>>,
    /// Decoded weights on the host, as long as the largest so far.
    host: Mutex<Vec<f32>>,
    casts: Mutex<Vec<CastKind<B>>>,
}

impl<B: Backend> LayerMemory<B> {
    /// Without memory: it is allocated by its first users.
    pub fn new(backend: &B) -> Arc<Self> {
        Self::of(backend, GatherPool::new(backend))
    }

    /// No memory yet, for other layers of the same rank: gathers have one order ([`GatherPool::beside`]).
    pub(crate) fn beside(&self) -> Arc<Self> {
        Self::of(&self.backend, self.pool.beside())
    }

    fn of(backend: &B, pool: Arc<GatherPool<B>>) -> Arc<Self> {
        Arc::new(Self {
            backend: backend.clone(),
            pool,
            host: Mutex::default(),
            casts: Mutex::default(),
        })
    }

    /// Where weights are gathered and decoded.
    pub fn pool(&self) -> &Arc<GatherPool<B>> {
        &self.pool
    }

    /// The most bytes that held weights or their full gradients so far: gathered buffers and
    /// decoded values, on the device and on the host.
    pub fn weight_bytes(&self) -> usize {
        self.pool.peak_bytes() + size_of_val(lock(&self.host).as_slice())
    }

    /// Calls `f` with `len` host values, whose content is what the last user left.
    pub(crate) fn with_host<T>(&self, len: usize, f: impl FnOnce(&mut [f32]) -> T) -> T {
        let mut values = take(&mut *lock(&self.host));
        if values.len() < len {
            drop(values);
            values = vec![0.0; len];
        }
        let result = f(&mut values[..len]);
        let mut kept = lock(&self.host);
        // A second user at the same time had memory of its own.
        if kept.len() < values.len() {
            *kept = values;
        }
        result
    }

    /// The buffers of operands of `shape` with `specs`. They are freed with the last cast that was
    /// planned over them.
    pub(crate) fn cast_buffers(
        &self,
        shape: Shape,
        specs: BufferList,
    ) -> Result<Arc<Mutex<CastBuffers<B>>>, KernelError> {
        let mut casts = lock(&self.casts);
        casts.retain(|kind| kind.buffers.strong_count() > 0);
        let same = |kind: &&CastKind<B>| kind.shape == shape && kind.specs == specs;
        if let Some(buffers) = casts.iter().find(same).and_then(|k| k.buffers.upgrade()) {
            return Ok(buffers);
        }
        let target = |spec: &BufferSpec| -> Result<Target<B>, KernelError> {
            let bytes = self.backend.alloc::<u8>(spec.bytes(shape))?;
            Ok(Target::new(*spec, bytes))
        };
        let buffers = Arc::new(Mutex::new(CastBuffers {
            source: self.backend.alloc(shape.elements())?,
            targets: specs.iter().map(target).collect::<Result<_, _>>()?,
            out: self.backend.alloc(shape.elements())?,
        }));
        casts.push(CastKind {
            shape,
            specs,
            buffers: Arc::downgrade(&buffers),
        });
        Ok(buffers)
    }

    /// Kinds of operands that a planned cast has buffers for.
    #[cfg(test)]
    pub(crate) fn cast_kinds(&self) -> usize {
        let live = |kind: &&CastKind<B>| kind.buffers.strong_count() > 0;
        lock(&self.casts).iter().filter(live).count()
    }
}

/// Nothing here is left half done by a thread that panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
