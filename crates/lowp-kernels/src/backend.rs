//! The [`Backend`] trait: buffers and planned work; [`Source`], a buffer of high-precision values, and [`Master`] and [`State`], those of an
//! optimizer.

use std::fmt::Debug;
use std::ops::Range;

use half::bf16;
use lowp_format::state_bytes;

use crate::host::zeroed;
use crate::sealed;
use crate::state::{decoded, elements, encoded};
use crate::{
    DeviceBuffer, Element, FloatDtype, KernelError, Pending, Rule, StateDtype, StateName,
    StepScalars, Work,
};

/// A stream of work on a device that holds buffers and runs jobs.
///
/// Buffers are shared handles: cloning one clones the handle, not the content. A plan keeps the
/// handles of its jobs, so their addresses are fixed for its life.
///
/// # Time
///
/// Calls give work to the stream and return; the stream does it in order. Only
/// [`Backend::read`], [`Backend::plan`], [`Backend::synchronize`], [`Pending::wait`], the drop of the last
/// handle of a stream, and a host that is far ahead with writes or changes of scalars wait for the device. Streams of one device are ordered by the
/// caller: [`Backend::record`] marks a point of one, [`Backend::wait`] makes another one follow it.
/// On the CPU work is done when a call returns, and every event has passed.
///
/// # Graphs
///
/// [`Backend::capture`] takes the calls of a closure as a graph instead of doing them, and
/// [`Backend::launch`] does them all, any number of times. Captured are [`Backend::run`],
/// [`Backend::run_with`], [`Backend::copy`], [`Backend::clear`], and what other handles get between a
/// wait for this one and this one's wait for them. What moves host memory or makes something
/// ([`Backend::alloc`], [`Backend::plan`], [`Backend::read`], [`Backend::start_read_bytes`], [`Backend::write`],
/// [`Backend::synchronize`]) is an error in a capture.
pub trait Backend: sealed::Backend + Clone + Debug + Send + Sync + 'static {
    /// Whether [`Backend::with_host_buffers`] gives memory of another place.
    const HAS_HOST_BUFFERS: bool = false;
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
    /// they arrive after the work that the stream has.
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

    /// Starts to copy entries `range` of `buffer` to the host, after the work that the stream has, and
    /// does not wait for them.
    ///
    /// # Errors
    /// The range lies outside the buffer, or the host has no room.
    fn start_read<T: Element>(
        &self,
        buffer: &Self::Buffer<T>,
        range: Range<usize>,
    ) -> Result<Pending<T>, KernelError>;

    /// As [`Backend::start_read`], little-endian bytes for entries. Host memory that a device fills is page-locked, which takes longer to get
    /// than to fill: as long as the device is in use it is kept for the next copy of as many bytes.
    ///
    /// # Errors
    /// As [`Backend::start_read`].
    fn start_read_bytes<T: Element>(
        &self,
        buffer: &Self::Buffer<T>,
        range: Range<usize>,
    ) -> Result<Pending<u8>, KernelError>;

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
    /// Any handle of the device may run a plan, but for sums of squares on a GPU: they add up in memory of the plan, so only the handle
    /// that planned them, or a clone of it, runs and captures them.
    ///
    /// # Errors
    /// Buffers of the wrong length, outputs that alias, or ingredients without a kernel.
    fn plan(&self, work: Work<Self>) -> Result<Self::Plan, KernelError>;

    /// Runs planned work.
    ///
    /// # Errors
    /// Scalars that do not fit the plan, sums of squares that another handle planned, or a device failure.
    fn run(&self, plan: &Self::Plan, scalars: &StepScalars) -> Result<(), KernelError>;

    /// Runs planned work with the scalars that a buffer holds when the work runs, as
    /// [`StepScalars::to_bytes`] lays them out: those that [`crate::StepScalarsJob`] made, for example. The
    /// plan must not write the buffer.
    ///
    /// # Errors
    /// A buffer of a length that no scalars have, of fewer groups than the plan uses, or that does not
    /// begin at a multiple of 8 bytes on a device; or a device failure.
    fn run_with(&self, plan: &Self::Plan, scalars: &Self::Buffer<u8>) -> Result<(), KernelError>;

    /// A handle of the same stream whose buffers ([`Backend::alloc`]) are page-locked memory of the host, which the device reads and writes
    /// over its bus while it works. They serve wherever buffers of the device do, with the same results. A graph that copies one to another makes
    /// [`Backend::launch`] wait. On the CPU all memory is the host's, and the handle is a clone.
    #[must_use]
    fn with_host_buffers(&self) -> Self {
        self.clone()
    }

    /// A new stream of the same device, whose work follows what this one was given so far. Its buffers are of the device.
    ///
    /// # Errors
    /// The device has no room.
    fn fork(&self) -> Result<Self, KernelError>;

    /// The point after everything that the stream was given so far.
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
    /// again, as a graph. Nothing of it runs. It must be given by the calling thread. The graph follows what the
    /// streams that take part were given before, and handles other than this one wait for this one to follow the
    /// graph.
    ///
    /// # Errors
    /// The error of `work`, work that cannot be captured, no work at all, or a device failure.
    fn capture<E: From<KernelError>>(
        &self,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self::Graph, E>;

    /// Runs what a graph of this handle captured. It holds plans and buffers by itself; scalars are those
    /// of the capture ([`Backend::run`]), or what a buffer holds when the graph runs ([`Backend::run_with`]).
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

    /// A buffer of `values`, which a backend of the host leaves where they are.
    ///
    /// # Errors
    /// The device has no room.
    fn adopt<T: Element>(&self, values: Vec<T>) -> Result<Self::Buffer<T>, KernelError> {
        self.upload(&values)
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

/// High-precision values: what casts read, and what decodes write.
#[derive(Clone, Debug)]
pub enum Source<B: Backend> {
    /// binary32 values.
    F32(B::Buffer<f32>),
    /// bfloat16 values: widened exactly where they are read, rounded to nearest even where they are written.
    Bf16(B::Buffer<bf16>),
}

impl<B: Backend> Source<B> {
    /// `len` zeros of `dtype`.
    ///
    /// # Errors
    /// The device has no room.
    pub fn alloc(backend: &B, dtype: FloatDtype, len: usize) -> Result<Self, KernelError> {
        Ok(match dtype {
            FloatDtype::F32 => Source::F32(backend.alloc(len)?),
            FloatDtype::Bf16 => Source::Bf16(backend.alloc(len)?),
        })
    }

    /// What the values are stored as.
    pub fn dtype(&self) -> FloatDtype {
        match self {
            Source::F32(_) => FloatDtype::F32,
            Source::Bf16(_) => FloatDtype::Bf16,
        }
    }

    /// Number of values.
    pub fn len(&self, backend: &B) -> usize {
        match self {
            Source::F32(buffer) => backend.len(buffer),
            Source::Bf16(buffer) => backend.len(buffer),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self, backend: &B) -> bool {
        self.len(backend) == 0
    }

    /// The addresses of the memory, as [`Backend::span`].
    pub fn span(&self, backend: &B) -> Range<usize> {
        match self {
            Source::F32(buffer) => backend.span(buffer),
            Source::Bf16(buffer) => backend.span(buffer),
        }
    }

    /// Values `range` as a source of their own, which shares the memory.
    ///
    /// # Errors
    /// The range lies outside.
    pub fn view(&self, backend: &B, range: Range<usize>) -> Result<Self, KernelError> {
        Ok(match self {
            Source::F32(buffer) => Source::F32(backend.view(buffer, range)?),
            Source::Bf16(buffer) => Source::Bf16(backend.view(buffer, range)?),
        })
    }

    /// Checks that the values lie on the device of `backend`.
    ///
    /// # Errors
    /// They lie on another one.
    pub fn owned_by(&self, backend: &B) -> Result<(), KernelError> {
        match self {
            Source::F32(buffer) => backend.owns(buffer),
            Source::Bf16(buffer) => backend.owns(buffer),
        }
    }

    /// Copies values from `start` on to the host, widened.
    ///
    /// # Errors
    /// The range lies outside.
    pub fn read(&self, backend: &B, start: usize, values: &mut [f32]) -> Result<(), KernelError> {
        match self {
            Source::F32(buffer) => backend.read(buffer, start, values),
            Source::Bf16(buffer) => {
                let mut narrow = vec![bf16::ZERO; values.len()];
                backend.read(buffer, start, &mut narrow)?;
                let widened = narrow.iter().map(|x| x.to_f32());
                values.iter_mut().zip(widened).for_each(|(to, x)| *to = x);
                Ok(())
            }
        }
    }

    /// All values, widened.
    ///
    /// # Errors
    /// The device failed, or the host has no room.
    pub fn download(&self, backend: &B) -> Result<Vec<f32>, KernelError> {
        match self {
            Source::F32(buffer) => backend.download(buffer),
            Source::Bf16(buffer) => {
                let values = backend.download(buffer)?;
                Ok(values.into_iter().map(bf16::to_f32).collect())
            }
        }
    }

    /// Copies host values into the buffer from `start` on, rounded to its dtype (to nearest even).
    ///
    /// # Errors
    /// The range lies outside.
    pub fn write(&self, backend: &B, start: usize, values: &[f32]) -> Result<(), KernelError> {
        match self {
            Source::F32(buffer) => backend.write(buffer, start, values),
            Source::Bf16(buffer) => {
                let narrow: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                backend.write(buffer, start, &narrow)
            }
        }
    }
}

/// The master values of a parameter.
#[derive(Clone, Debug)]
pub enum Master<B: Backend> {
    /// Beside the parameter.
    Values(Source<B>),
    /// In two halves, of which the parameter is one: each has two bytes for an element, little endian.
    Bf16Plus16 {
        /// The parameter, in bfloat16.
        parameter: B::Buffer<u8>,
        /// What it lacks of the master, as signed integers.
        remainder: B::Buffer<u8>,
    },
}

impl<B: Backend> From<Source<B>> for Master<B> {
    fn from(values: Source<B>) -> Self {
        Self::Values(values)
    }
}

/// The values of a state, one for each element of a job.
#[derive(Clone, Debug)]
pub enum State<B: Backend> {
    /// High-precision values.
    Values(Source<B>),
    /// Codes, then the scale of each block ([`state_bytes`]).
    Fp8(B::Buffer<u8>),
}

impl<B: Backend> From<Source<B>> for State<B> {
    fn from(values: Source<B>) -> Self {
        Self::Values(values)
    }
}

impl<B: Backend> State<B> {
    /// `len` zeros.
    ///
    /// # Errors
    /// The device has no room.
    pub fn alloc(backend: &B, dtype: StateDtype, len: usize) -> Result<Self, KernelError> {
        let values = |dtype| Source::alloc(backend, dtype, len).map(Self::Values);
        match dtype {
            StateDtype::F32 => values(FloatDtype::F32),
            StateDtype::Bf16 => values(FloatDtype::Bf16),
            StateDtype::Fp8 => Ok(Self::Fp8(backend.alloc(state_bytes(len))?)),
        }
    }

    /// What the values are stored as.
    pub fn dtype(&self) -> StateDtype {
        match self {
            Self::Values(values) => values.dtype().into(),
            Self::Fp8(_) => StateDtype::Fp8,
        }
    }

    /// Number of values.
    pub fn len(&self, backend: &B) -> usize {
        match self {
            Self::Values(values) => values.len(backend),
            Self::Fp8(bytes) => elements(backend.len(bytes)),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self, backend: &B) -> bool {
        self.len(backend) == 0
    }

    /// The addresses of the memory, as [`Backend::span`].
    pub fn span(&self, backend: &B) -> Range<usize> {
        match self {
            Self::Values(values) => values.span(backend),
            Self::Fp8(bytes) => backend.span(bytes),
        }
    }

    /// Checks that the values lie on the device of `backend`.
    ///
    /// # Errors
    /// They lie on another one.
    pub fn owned_by(&self, backend: &B) -> Result<(), KernelError> {
        match self {
            Self::Values(values) => values.owned_by(backend),
            Self::Fp8(bytes) => backend.owns(bytes),
        }
    }

    /// All values of a state of this name, as f32, which is exact.
    ///
    /// # Errors
    /// The device failed, or the host has no room.
    pub fn download(&self, backend: &B, name: StateName) -> Result<Vec<f32>, KernelError> {
        match self {
            Self::Values(values) => values.download(backend),
            Self::Fp8(bytes) => Ok(decoded(&backend.download(bytes)?, name.code())),
        }
    }

    /// Replaces all values of a state of this name, and says whether one was rounded, which is to nearest: what was stored in the same dtype
    /// stays.
    ///
    /// # Errors
    /// Another number of values.
    pub fn upload(
        &self,
        backend: &B,
        name: StateName,
        values: &[f32],
    ) -> Result<bool, KernelError> {
        let stored = match self {
            Self::Values(buffer) => {
                buffer.write(backend, 0, values)?;
                let round = |x: f32| match buffer.dtype() {
                    FloatDtype::F32 => x,
                    FloatDtype::Bf16 => bf16::from_f32(x).to_f32(),
                };
                return Ok(values.iter().any(|&x| round(x) != x));
            }
            Self::Fp8(buffer) => {
                let bytes = encoded(values, name.code());
                backend.write(buffer, 0, &bytes)?;
                decoded(&bytes, name.code())
            }
        };
        Ok(stored != values)
    }
}

impl Rule {
    /// `len` zeros for each state, in the dtypes that `dtype` gives.
    ///
    /// # Errors
    /// The device has no room.
    pub fn alloc<B: Backend>(
        self,
        backend: &B,
        dtype: impl Fn(StateName) -> StateDtype,
        len: usize,
    ) -> Result<Vec<State<B>>, KernelError> {
        let states = self.states().iter();
        let states = states.map(|&state| State::alloc(backend, dtype(state), len));
        states.collect()
    }
}
