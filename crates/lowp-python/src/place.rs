//! [`Device`] and [`Memory`]: where PyTorch's tensors lie, and their memory as buffers.

#![expect(unsafe_code, reason = "takes memory and streams of PyTorch")]

#[cfg(feature = "cuda")]
use std::collections::HashMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, Range};
use std::sync::OnceLock;
#[cfg(feature = "cuda")]
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "cuda")]
use std::sync::{LazyLock, Mutex, PoisonError};

use half::bf16;
use lowp_kernels::{Backend, Cpu, CpuBuffer, Element, KernelError, Source};
#[cfg(feature = "cuda")]
use lowp_kernels::{Cuda, CudaBuffer, CurrentContext};
use pyo3::prelude::*;

use crate::error::Error;

/// A device and the stream that work goes to, as Python gives them: kind, number, `CUstream`.
pub(crate) type DeviceArg = (String, usize, u64);

/// Memory as Python gives it: address, bytes, number of the GPU (-1: of the host), and what keeps it alive for longer than the call,
/// if something must.
pub(crate) type MemoryArg = (u64, usize, i64, Option<Py<PyAny>>);

/// The handle that a call of Python works with. While it lives, the call may make another device current than PyTorch's.
pub(crate) struct Device {
    pub(crate) handle: Handle,
    _current: Current,
}

/// A backend handle.
#[derive(Debug)]
pub(crate) enum Handle {
    Cpu(Cpu),
    #[cfg(feature = "cuda")]
    Cuda(Cuda),
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.handle.fmt(f)
    }
}

/// Keeps the device that is current on this thread, as PyTorch has it: handles of GPUs make theirs current. Nothing on CPUs.
#[must_use]
pub(crate) struct Current {
    #[cfg(feature = "cuda")]
    _context: Option<CurrentContext>,
}

/// Whether this process had tensors on GPUs.
#[cfg(feature = "cuda")]
static HAS_GPUS: AtomicBool = AtomicBool::new(false);

impl Current {
    /// Until it is dropped.
    pub(crate) fn keep() -> Self {
        Self {
            #[cfg(feature = "cuda")]
            _context: HAS_GPUS.load(Ordering::Relaxed).then(CurrentContext::keep),
        }
    }

    /// The same for a call on a GPU, which may be the first one.
    #[cfg(feature = "cuda")]
    pub(crate) fn keep_on_gpu() -> Self {
        HAS_GPUS.store(true, Ordering::Relaxed);
        Self::keep()
    }
}

/// What an object of Python owns. Python drops it between calls, and the current device stays what it is.
pub(crate) struct Owned<T>(ManuallyDrop<T>);

impl<T> Owned<T> {
    pub(crate) fn new(of: T) -> Self {
        Self(ManuallyDrop::new(of))
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        let _current = Current::keep();
        // SAFETY: dropped here alone.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

/// Runs `$body` with the handle of `$device` as `$backend`.
macro_rules! on_device {
    ($device:expr, |$backend:ident| $body:expr) => {
        match &$device.handle {
            $crate::place::Handle::Cpu($backend) => $body,
            #[cfg(feature = "cuda")]
            $crate::place::Handle::Cuda($backend) => $body,
        }
    };
}
pub(crate) use on_device;

impl Device {
    /// The handle of a device and stream. Those of GPUs are kept: PyTorch's streams live as long as the process.
    pub(crate) fn new((kind, ordinal, stream): &DeviceArg) -> Result<Self, Error> {
        check_process()?;
        match kind.as_str() {
            "cpu" => Ok(Self {
                handle: Handle::Cpu(Cpu),
                _current: Current::keep(),
            }),
            #[cfg(feature = "cuda")]
            "cuda" => {
                let current = Current::keep_on_gpu();
                Ok(Self {
                    handle: cuda(*ordinal, *stream).map(Handle::Cuda)?,
                    _current: current,
                })
            }
            #[cfg(not(feature = "cuda"))]
            "cuda" => Err(Error::new(format!(
                "a tensor is on cuda:{ordinal} (stream {stream:#x}), but this wheel was built for the CPU only; build one with \
                 `cargo xtask wheel` where nvcc is there, or move the tensor to the CPU"
            ))),
            other => Err(Error::new(format!(
                "a tensor is on {other}, but lowp works on cpu and cuda; move it there"
            ))),
        }
    }
}

/// Fails in a process that was forked after its parent worked with lowp: it would wait for threads that only the parent has.
pub(crate) fn check_process() -> Result<(), Error> {
    static FIRST: OnceLock<u32> = OnceLock::new();
    let now = std::process::id();
    let first = *FIRST.get_or_init(|| now);
    if now == first {
        return Ok(());
    }
    Err(Error::new(format!(
        "process {now} was forked after process {first} used lowp, and a fork does not copy lowp's threads; start workers with the spawn \
         method (torch.multiprocessing.get_context(\"spawn\"), multiprocessing_context=\"spawn\" of a DataLoader), or fork before"
    )))
}

/// The handle of a stream of a GPU.
#[cfg(feature = "cuda")]
pub(crate) fn cuda(ordinal: usize, stream: u64) -> Result<Cuda, Error> {
    static HANDLES: LazyLock<Mutex<HashMap<(usize, u64), Cuda>>> = LazyLock::new(Mutex::default);
    let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = handles.get(&(ordinal, stream)) {
        return Ok(handle.clone());
    }
    // SAFETY: PyTorch's current stream is one of the primary context, and PyTorch never destroys the streams that it
    // made. Those that a program wraps itself must live as long, which docs/pytorch.md says.
    let handle = unsafe { Cuda::with_stream(ordinal, stream) }?;
    handles.insert((ordinal, stream), handle.clone());
    Ok(handle)
}

/// Memory that PyTorch allocated.
#[derive(Debug)]
pub(crate) struct Memory {
    pointer: u64,
    bytes: usize,
    device: i64,
    owner: Option<Py<PyAny>>,
}

impl From<MemoryArg> for Memory {
    fn from((pointer, bytes, device, owner): MemoryArg) -> Self {
        Self {
            pointer,
            bytes,
            device,
            owner,
        }
    }
}

impl Memory {
    /// Where it lies.
    pub(crate) fn span(&self) -> Range<usize> {
        let start = usize::try_from(self.pointer).unwrap_or(usize::MAX);
        start..start.saturating_add(self.bytes)
    }

    /// The number of entries of `T`, where it lies on `device` and has whole ones.
    fn entries<T>(&self, device: i64) -> Result<usize, Error> {
        let (bytes, size) = (self.bytes, size_of::<T>());
        let name = |number: i64| match number {
            -1 => "the CPU".to_owned(),
            number => format!("cuda:{number}"),
        };
        if self.device != device {
            let (found, expected) = (name(self.device), name(device));
            return Err(Error::new(format!(
                "a tensor of {bytes} bytes is on {found}, but the work is on {expected}; move all tensors to one device"
            )));
        }
        if !bytes.is_multiple_of(size) {
            return Err(Error::new(format!(
                "memory of {bytes} bytes as entries of {size} bytes; give whole entries"
            )));
        }
        Ok(bytes / size)
    }
}

/// A backend that takes memory of PyTorch.
pub(crate) trait Place: Backend {
    /// The memory as a buffer, without a copy. Memory of another device is an error.
    fn wrap<T: Element>(&self, memory: Memory) -> Result<Self::Buffer<T>, Error>;

    /// Where its memory lies, as [`MemoryArg`] has it.
    fn number(&self) -> i64;

    /// The stream that work goes to, a `CUstream`; 0 on the CPU.
    fn raw_stream(&self) -> Result<u64, KernelError>;

    /// The handle, if `device` is of this kind.
    fn of(device: &Device) -> Option<&Self>;

    /// The same as [`Place::of`]; handles of other devices are an error.
    fn of_or(device: &Device, what: &str) -> Result<Self, Error> {
        Self::of(device).cloned().ok_or_else(|| {
            Error::new(format!(
                "{what} was made on another kind of device than {device:?}; make it again on that device"
            ))
        })
    }

    /// Values of dtype `float32` or `bfloat16`.
    fn source(&self, memory: Memory, dtype: &str) -> Result<Source<Self>, Error> {
        match dtype {
            "float32" => Ok(Source::F32(self.wrap::<f32>(memory)?)),
            "bfloat16" => Ok(Source::Bf16(self.wrap::<bf16>(memory)?)),
            other => Err(Error::new(format!(
                "values of dtype {other}; lowp reads float32 and bfloat16: convert them"
            ))),
        }
    }
}

impl Place for Cpu {
    fn wrap<T: Element>(&self, memory: Memory) -> Result<CpuBuffer<T>, Error> {
        let len = memory.entries::<T>(self.number())?;
        let pointer = memory.pointer as *mut T;
        // SAFETY: the package gives the address and the length of tensors that it holds for the call, or with `owner` for
        // as long as the buffer lives; every bit pattern is an element. That nobody writes them meanwhile is PyTorch's own rule
        // for tensors.
        Ok(unsafe { CpuBuffer::from_raw(pointer, len, memory.owner) }?)
    }

    fn number(&self) -> i64 {
        -1
    }

    fn raw_stream(&self) -> Result<u64, KernelError> {
        Ok(0)
    }

    fn of(device: &Device) -> Option<&Self> {
        match &device.handle {
            Handle::Cpu(cpu) => Some(cpu),
            #[cfg(feature = "cuda")]
            Handle::Cuda(_) => None,
        }
    }
}

#[cfg(feature = "cuda")]
impl Place for Cuda {
    fn wrap<T: Element>(&self, memory: Memory) -> Result<CudaBuffer<T>, Error> {
        let len = memory.entries::<T>(self.number())?;
        let Memory { pointer, owner, .. } = memory;
        // SAFETY: as on the CPU. PyTorch reuses memory of a stream after the work of that stream, and work of this handle is
        // on the stream that was current.
        Ok(unsafe {
            match owner {
                Some(owner) => CudaBuffer::from_raw(self, pointer, len, owner),
                None => CudaBuffer::from_raw_unowned(self, pointer, len),
            }
        }?)
    }

    fn number(&self) -> i64 {
        i64::try_from(self.ordinal()).unwrap_or(i64::MAX)
    }

    fn raw_stream(&self) -> Result<u64, KernelError> {
        self.stream()
    }

    fn of(device: &Device) -> Option<&Self> {
        match &device.handle {
            Handle::Cuda(cuda) => Some(cuda),
            Handle::Cpu(_) => None,
        }
    }
}
