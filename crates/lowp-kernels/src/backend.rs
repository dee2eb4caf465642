//! The [`Backend`] trait: buffers, planned work, and the scalars of a step.

use std::fmt::Debug;
use std::ops::Range;

use crate::host::zeroed;
use crate::sealed;
use crate::{DeviceBuffer, Element, KernelError, Work};

/// A stream of work on a device that holds buffers and runs jobs.
///
/// Buffers are shared handles: cloning one clones the handle, not the content. A plan keeps the
/// handles of its jobs, so their addresses are fixed for its life.
///
/// # Time
///
/// Calls give work to the stream and return; the stream does it in order. Only
/// [`Backend::read`], [`Backend::plan`], [`Backend::synchronize`], [`Pending::wait`] and the write of
/// more than the staging memory holds wait for the device. Streams of one device are ordered by the
/// caller: [`Backend::record`] marks a point of one, [`Backend::wait`] makes another one follow it.
/// On the CPU work is done when a call returns, and an event is nothing.
///
/// # Graphs
///
/// [`Backend::capture`] takes the calls of a closure as a graph instead of doing them, and
/// [`Backend::launch`] does them all, any number of times. Captured are [`Backend::run`],
/// [`Backend::run_with`], [`Backend::copy`], [`Backend::clear`], and what other handles get between a
/// wait for this one and this one's wait for them. What moves host memory or makes something
/// ([`Backend::alloc`], [`Backend::plan`], [`Backend::read`], [`Backend::write`],
/// [`Backend::synchronize`]) is an error in a capture.
pub trait Backend: sealed::Backend + Clone + Debug + Send + Sync + 'static {
    /// A buffer of `T`.
    type Buffer<T: Element>: DeviceBuffer<T>;
    /// Work that was checked and laid out once. Cloning clones the handle.
    type Plan: Clone + Debug + Send + Sync + 'static;
    /// A point in the work of a stream.
    type Event: Clone + Debug + Send + Sync + 'static;
    /// Captured work.
    type Graph: Clone + Debug + Send + Sync + 'static;

    /// A buffer of `len` zeros.
    ///
    /// # Errors
    /// The device has no room.
    fn alloc<T: Element>(&self, len: usize) -> Result<Self::Buffer<T>, KernelError>;

    /// Number of entries of `buffer`.
    fn len<T: Element>(&self, buffer: &Self::Buffer<T>) -> usize;

    /// The addresses of `buffer`'s memory, on the device that holds it. Handles whose spans overlap
    /// share memory; an empty buffer has an empty span.
    fn span<T: Element>(&self, buffer: &Self::Buffer<T>) -> Range<usize>;

    /// Entries `range` of `buffer` as a buffer of its own, which shares the memory.
    ///
    /// # Errors
    /// The range lies outside the buffer.
    fn view<T: Element>(
        &self,
        buffer: &Self::Buffer<T>,
        range: Range<usize>,
    ) -> Result<Self::Buffer<T>, KernelError>;

    /// Checks that `buffer` lies on the device of this handle.
    ///
    /// # Errors
    /// It lies on another one.
    fn owns<T: Element>(&self, buffer: &Self::Buffer<T>) -> Result<(), KernelError>;

    /// Copies host values into `buffer` from entry `start` on. They are taken before the call returns;
    /// they arrive behind the work that the stream has.
    ///
    /// # Errors
    /// The range lies outside the buffer.
    fn write<T: Element>(
        &self,
        buffer: &Self::Buffer<T>,
        start: usize,
        values: &[T],
    ) -> Result<(), KernelError>;

    /// Copies entries of `buffer` from `start` on to the host.
    ///
    /// # Errors
    /// The range lies outside the buffer.
    fn read<T: Element>(
        &self,
        buffer: &Self::Buffer<T>,
        start: usize,
        values: &mut [T],
    ) -> Result<(), KernelError>;

    /// Starts to copy entries `range` of `buffer` to the host, behind the work that the stream has, and
    /// does not wait for them.
    ///
    /// # Errors
    /// The range lies outside the buffer, or the host has no room.
    fn start_read<T: Element>(
        &self,
        buffer: &Self::Buffer<T>,
        range: Range<usize>,
    ) -> Result<Pending<T>, KernelError>;

    /// Copies `range` of `from` into `to` at entry `start`.
    ///
    /// # Errors
    /// A range lies outside its buffer, or both share memory.
    fn copy<T: Element>(
        &self,
        from: &Self::Buffer<T>,
        range: Range<usize>,
        to: &Self::Buffer<T>,
        start: usize,
    ) -> Result<(), KernelError>;

    /// Sets every entry of `buffer` to zero.
    ///
    /// # Errors
    /// The device failed.
    fn clear<T: Element>(&self, buffer: &Self::Buffer<T>) -> Result<(), KernelError>;

    /// Checks `work` and lays it out. Everything that can be wrong is found here.
    ///
    /// # Errors
    /// Buffers of the wrong length, outputs that alias, or ingredients without a kernel.
    fn plan(&self, work: Work<Self>) -> Result<Self::Plan, KernelError>;

    /// Runs planned work.
    ///
    /// # Errors
    /// Scalars that do not fit the plan, or a device failure.
    fn run(&self, plan: &Self::Plan, scalars: &StepScalars) -> Result<(), KernelError>;

    /// A new stream of the same device, whose work follows what this one was given so far.
    ///
    /// # Errors
    /// The device has no room.
    fn fork(&self) -> Result<Self, KernelError>;

    /// The point behind everything that the stream was given so far.
    ///
    /// # Errors
    /// The device failed.
    fn record(&self) -> Result<Self::Event, KernelError>;

    /// Makes later work of this stream follow `event`, a point of a stream of the same device.
    ///
    /// # Errors
    /// The event is of another device, or the device failed.
    fn wait(&self, event: &Self::Event) -> Result<(), KernelError>;

    /// Makes later work of this stream follow what `other`, a handle of the same device, was given so
    /// far.
    ///
    /// # Errors
    /// As [`Backend::record`] and [`Backend::wait`].
    fn wait_for(&self, other: &Self) -> Result<(), KernelError> {
        self.wait(&other.record()?)
    }

    /// Waits until the work of this stream is done.
    ///
    /// # Errors
    /// The device failed.
    fn synchronize(&self) -> Result<(), KernelError>;

    /// Takes what `work` gives to this stream, and to streams that wait for it and that it waits for
    /// again, as a graph. Nothing of it runs. It must be given by the calling thread.
    ///
    /// # Errors
    /// The error of `work`, work that cannot be captured, no work at all, or a device failure.
    fn capture<E: From<KernelError>>(
        &self,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self::Graph, E>;

    /// Runs what a graph of this handle captured. It holds plans and buffers by itself; scalars are those
    /// of the capture ([`Backend::run`]), or what lies in a buffer by then ([`Backend::run_with`]).
    ///
    /// # Errors
    /// A graph of another device, a device failure, or an error of the captured work.
    fn launch(&self, graph: &Self::Graph) -> Result<(), KernelError>;

    /// A buffer with the content of `values`.
    ///
    /// # Errors
    /// The device has no room.
    fn upload<T: Element>(&self, values: &[T]) -> Result<Self::Buffer<T>, KernelError> {
        let buffer = self.alloc(values.len())?;
        self.write(&buffer, 0, values)?;
        Ok(buffer)
    }

    /// The content of `buffer`.
    ///
    /// # Errors
    /// The device failed, or the host has no room.
    fn download<T: Element>(&self, buffer: &Self::Buffer<T>) -> Result<Vec<T>, KernelError> {
        let mut values = zeroed(self.len(buffer))?;
        self.read(buffer, 0, &mut values)?;
        Ok(values)
    }

    /// Plans and runs `work` once.
    ///
    /// # Errors
    /// As [`Backend::plan`] and [`Backend::run`].
    fn once(&self, work: Work<Self>) -> Result<(), KernelError> {
        let plan = self.plan(work)?;
        self.run(&plan, &StepScalars::default())
    }
}

/// Values on their way from a device to the host ([`Backend::start_read`]).
pub struct Pending<T> {
    arrival: Box<dyn Arrival<T>>,
}

/// What a backend knows of values on their way.
pub(crate) trait Arrival<T>: Send + Sync {
    /// Whether they are there.
    fn is_ready(&self) -> Result<bool, KernelError>;
    /// The values, as soon as they are there.
    fn wait(self: Box<Self>) -> Result<Vec<T>, KernelError>;
}

impl<T> Arrival<T> for Vec<T>
where
    T: Send + Sync,
{
    fn is_ready(&self) -> Result<bool, KernelError> {
        Ok(true)
    }

    fn wait(self: Box<Self>) -> Result<Vec<T>, KernelError> {
        Ok(*self)
    }
}

impl<T> Pending<T> {
    pub(crate) fn new(arrival: impl Arrival<T> + 'static) -> Self {
        let arrival = Box::new(arrival);
        Self { arrival }
    }

    /// Whether the values are there. Does not wait.
    ///
    /// # Errors
    /// The device failed.
    pub fn is_ready(&self) -> Result<bool, KernelError> {
        self.arrival.is_ready()
    }

    /// The values. Waits until they are there.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait(self) -> Result<Vec<T>, KernelError> {
        self.arrival.wait()
    }
}

impl<T> Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pending")
    }
}

/// The scalars of AdamW for one parameter group (docs/numerics.md 12).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamScalars {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// `f32(1 - beta1^step)`, the power in binary64; 1 without bias correction.
    pub correction1: f32,
    /// `f32(1 - beta2^step)`, the power in binary64; 1 without bias correction.
    pub correction2: f32,
}

/// What language models are mostly trained with: lr 1e-3, betas 0.9 and 0.95, eps 1e-8, weight decay
/// 0.1; no bias correction.
impl Default for AdamScalars {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            correction1: 1.0,
            correction2: 1.0,
        }
    }
}

impl AdamScalars {
    /// Sets both bias corrections for `step`, which starts at 1.
    #[must_use]
    pub fn at_step(self, step: u64) -> Self {
        let correction = |beta: f32| (1.0 - f64::from(beta).powf(step as f64)) as f32;
        Self {
            correction1: correction(self.beta1),
            correction2: correction(self.beta2),
            ..self
        }
    }
}

/// What changes from run to run of one plan.
#[derive(Clone, Debug, PartialEq)]
pub struct StepScalars {
    /// One set per parameter group.
    pub adam: Vec<AdamScalars>,
    /// Gradients are multiplied by this before use (clipping, loss scale); 1 leaves their bits.
    pub grad_scale: f32,
    /// Separates the random numbers of this run from those of others with the same key.
    pub random_step: u64,
    /// The run changes nothing: the step of a gradient that is not finite.
    pub skip: bool,
}

impl Default for StepScalars {
    fn default() -> Self {
        Self {
            adam: Vec::new(),
            grad_scale: 1.0,
            random_step: 0,
            skip: false,
        }
    }
}
