//! [`CudaBuffer`]: a shared handle on memory that a device uses: its own, page-locked memory of the host, or borrowed from another library.

#![expect(
    unsafe_code,
    reason = "copies device memory, and wraps memory of other libraries"
)]

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::result;

use super::deferred;
use super::device::Device;
use super::driver::{copy, copy_on_host, failed};
use super::handle::Cuda;
use super::host_pool::Lender;
use super::memory::DeviceMemory;
use super::{capture, host};
use crate::host::zeroed;
use crate::{DeviceBuffer, Element, KernelError, Pending};

/// A shared handle on memory of fixed length that a device uses, or on a part of it. Cloning clones the handle, not the
/// content.
pub struct CudaBuffer<T> {
    /// The first entry of the memory that the handle names.
    start: usize,
    len: usize,
    /// `None` for no entries.
    memory: Option<Arc<DeviceMemory>>,
    entry: PhantomData<fn() -> T>,
}

impl<T: Element> CudaBuffer<T> {
    /// Wraps device memory that someone else owns: `len` entries at `pointer`, on the device of
    /// `cuda`.
    ///
    /// `owner` is dropped when no handle, plan or graph uses the memory any more and every stream of the
    /// device ([`Cuda`]) has passed the work that it had been given until then. If nothing is in flight that is
    /// at once. Else the drop of the last handle does not wait, and a later call drops the owner, on its thread:
    /// [`crate::Backend::synchronize`], an allocation, a plan, a read or write, the drop of another buffer or of the last
    /// handle of a stream.
    ///
    /// # Errors
    /// [`KernelError::Misaligned`] if `pointer` is not aligned to an entry, or null with `len > 0`.
    ///
    /// # Safety
    /// Until `owner` is dropped, `pointer` must be valid on the device for reads and writes of `len`
    /// entries, and nobody may touch them while work that uses this buffer is in flight, unless the
    /// caller orders both ([`crate::Backend::wait_for`], [`crate::Backend::synchronize`], events on a shared stream). Work of
    /// other libraries counts for the drop of `owner` where it was given to a stream of a handle.
    pub unsafe fn from_raw(
        cuda: &Cuda,
        pointer: u64,
        len: usize,
        owner: impl Any + Send + Sync,
    ) -> Result<Self, KernelError> {
        Self::of(cuda, pointer, len, Some(Box::new(owner)))
    }

    /// Wraps device memory that its owner keeps valid for as long as work uses it. The drop of the last handle releases nothing and makes no
    /// call to the device.
    ///
    /// # Errors
    /// As [`CudaBuffer::from_raw`].
    ///
    /// # Safety
    /// As [`CudaBuffer::from_raw`], until every stream of the device has passed the work that it had been given when the last handle, plan
    /// or graph of the memory was dropped.
    pub unsafe fn from_raw_unowned(
        cuda: &Cuda,
        pointer: u64,
        len: usize,
    ) -> Result<Self, KernelError> {
        Self::of(cuda, pointer, len, None)
    }

    fn of(
        cuda: &Cuda,
        pointer: u64,
        len: usize,
        owner: Option<deferred::Owner>,
    ) -> Result<Self, KernelError> {
        if len > 0 && (pointer == 0 || !pointer.is_multiple_of(align_of::<T>() as u64)) {
            let size = size_of::<T>();
            return Err(KernelError::Misaligned { pointer, size });
        }
        cuda.device().reap();
        let memory = DeviceMemory::of(cuda.device(), pointer, owner);
        Ok(Self {
            start: 0,
            len,
            memory: (len > 0).then(|| Arc::new(memory)),
            entry: PhantomData,
        })
    }

    /// `len` zeros.
    pub(super) fn zeros(cuda: &Cuda, len: usize) -> Result<Self, KernelError> {
        let bytes = len.checked_mul(size_of::<T>());
        let bytes = bytes.ok_or_else(|| KernelError::no_memory::<T>(len))?;
        let memory = match len {
            0 => None,
            _ => {
                let zeros = match cuda.host_buffers {
                    true => DeviceMemory::host_zeros,
                    false => DeviceMemory::zeros,
                };
                Some(Arc::new(zeros(cuda.device(), &cuda.queue.stream, bytes)?))
            }
        };
        Ok(Self {
            start: 0,
            len,
            memory,
            entry: PhantomData,
        })
    }

    /// Entries `range` of this buffer, which exist.
    pub(super) fn view(&self, range: Range<usize>) -> Self {
        Self {
            start: self.start + range.start,
            len: range.len(),
            memory: self.memory.clone().filter(|_| !range.is_empty()),
            entry: PhantomData,
        }
    }

    pub(super) fn upload(
        &self,
        cuda: &Cuda,
        start: usize,
        values: &[T],
    ) -> Result<(), KernelError> {
        if values.is_empty() {
            return Ok(());
        }
        cuda.bind()?;
        // SAFETY: the backend checked the range; the memory is freed after the work of every stream.
        unsafe {
            host::write(
                cuda.device(),
                &cuda.queue.stream,
                self.address(start),
                values,
            )
        }
    }

    /// Starts to copy entries `range` to the host, as they are or as bytes: a device has values as a little-endian host does.
    pub(super) fn start_read<U: Element>(
        &self,
        cuda: &Cuda,
        range: Range<usize>,
        lender: Lender,
    ) -> Result<Pending<U>, KernelError> {
        if range.is_empty() {
            return Ok(Pending::new(Vec::new()));
        }
        cuda.bind()?;
        let (stream, from) = (&cuda.queue.stream, self.address(range.start));
        let len = range.len() * size_of::<T>() / size_of::<U>();
        // SAFETY: the backend checked the range, of as many bytes; the memory is freed after the work of every stream.
        let on_its_way =
            unsafe { host::start_read::<U>(cuda.device(), stream, from, len, lender)? };
        Ok(Pending::new(on_its_way))
    }

    pub(super) fn download(
        &self,
        cuda: &Cuda,
        start: usize,
        values: &mut [T],
    ) -> Result<(), KernelError> {
        if values.is_empty() {
            return Ok(());
        }
        cuda.bind()?;
        let (to, bytes) = (values.as_mut_ptr() as u64, size_of_val(values));
        let stream = cuda.queue.stream.cu_stream();
        // SAFETY: the backend checked the range; the copy is waited for before `values` is free.
        let copied = unsafe { copy(to, self.at(start), bytes, stream) };
        let done = cuda.finish();
        copied.and(done)
    }

    /// Copies `from`, of the same length and apart from this buffer.
    pub(super) fn copy_from(&self, cuda: &Cuda, from: &Self) -> Result<(), KernelError> {
        if self.len == 0 {
            return Ok(());
        }
        cuda.bind()?;
        let stream = cuda.queue.current()?;
        capture::keep(|| (self.clone(), from.clone()));
        let (to, from) = (self.address(0), from.address(0));
        let bytes = self.len * size_of::<T>();
        let copy = match to.on_host && from.on_host && !capture::is_on() {
            true => copy_on_host,
            false => copy,
        };
        // SAFETY: both have this many bytes, and the backend checked that they do not overlap.
        unsafe { copy(to.pointer, from.pointer, bytes, stream.cu_stream()) }
    }

    pub(super) fn fill_zero(&self, cuda: &Cuda) -> Result<(), KernelError> {
        if self.len == 0 {
            return Ok(());
        }
        cuda.bind()?;
        let stream = cuda.queue.current()?;
        capture::keep(|| self.clone());
        let bytes = self.len * size_of::<T>();
        // SAFETY: the buffer has this many bytes.
        let zeroed = unsafe { result::memset_d8_async(self.at(0), 0, bytes, stream.cu_stream()) };
        zeroed.map_err(failed("cuMemsetD8Async"))
    }

    pub(super) fn span(&self) -> Range<usize> {
        let start = usize::try_from(self.at(0)).unwrap_or(usize::MAX);
        start..start + self.len * size_of::<T>()
    }
}

impl<T> CudaBuffer<T> {
    /// Number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device address of the first entry, for kernels of others; 0 for an empty buffer. It is
    /// valid as long as a handle lives.
    pub fn pointer(&self) -> u64 {
        self.at(0)
    }

    /// The device address of entry `index`; 0 for an empty buffer.
    pub(super) fn at(&self, index: usize) -> u64 {
        let memory = self.memory.as_ref();
        memory.map_or(0, |memory| {
            memory.pointer + ((self.start + index) * size_of::<T>()) as u64
        })
    }

    /// Where entry `index` is.
    fn address(&self, index: usize) -> host::Address {
        let memory = self.memory.as_ref();
        host::Address {
            pointer: self.at(index),
            on_host: memory.is_some_and(|memory| memory.is_on_host()),
        }
    }

    /// Whether it has memory that [`Cuda::share_memory_with`] shares, or none: not memory of the host or of another library.
    pub fn is_shareable(&self) -> bool {
        let memory = self.memory.as_ref();
        memory.is_none_or(|memory| memory.is_of_pool())
    }

    /// The number of the device that holds it; none for an empty buffer.
    pub fn ordinal(&self) -> Option<usize> {
        self.device().map(|device| device.context.ordinal())
    }

    /// The device that holds it; none for an empty buffer.
    pub(super) fn device(&self) -> Option<&Arc<Device>> {
        self.memory.as_ref().map(|memory| &memory.device)
    }
}

impl<T: Element> DeviceBuffer<T> for CudaBuffer<T> {
    fn len(&self) -> usize {
        self.len()
    }

    fn to_vec(&self) -> Result<Vec<T>, KernelError> {
        capture::not_in("reading a buffer")?;
        let mut values = zeroed(self.len())?;
        if let Some(memory) = &self.memory {
            let device = &memory.device;
            let stream = device.context.new_stream();
            let stream = stream.map_err(failed("cuStreamCreate"))?;
            device.gather(&stream)?;
            let (to, bytes) = (values.as_mut_ptr() as u64, size_of_val(&values[..]));
            // SAFETY: the buffer has as many entries; the copy is waited for before `values` is free.
            let copied = unsafe { copy(to, self.at(0), bytes, stream.cu_stream()) };
            let done = device.events.finish(&stream);
            copied?;
            done.map_err(failed("cuStreamSynchronize"))?;
        }
        Ok(values)
    }
}

impl Cuda {
    /// Checks that a buffer is of this device.
    pub(super) fn own<T: Element>(&self, buffer: &CudaBuffer<T>) -> Result<(), KernelError> {
        let Some(memory) = &buffer.memory else {
            return Ok(());
        };
        let remedy = "copy it through the host";
        self.device().same(&memory.device, "the buffer", remedy)
    }
}

impl<T> Clone for CudaBuffer<T> {
    fn clone(&self) -> Self {
        Self {
            start: self.start,
            len: self.len,
            memory: self.memory.clone(),
            entry: PhantomData,
        }
    }
}

/// Prints address and length only: the content is on the device.
impl<T> fmt::Debug for CudaBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CudaBuffer({} entries at {:#x})",
            self.len,
            self.pointer()
        )
    }
}
