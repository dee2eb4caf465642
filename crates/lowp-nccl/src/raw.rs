//! [`Raw`]: NCCL's communicator, and the calls that a batch is made of.

#![expect(unsafe_code, reason = "calls NCCL on the stream and memory of buffers")]

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cudarc::nccl::result::{self as nccl, NcclError, NcclStatus};
use cudarc::nccl::sys;
use half::bf16;
use lowp_kernels::{Backend, Cuda, CudaBuffer, CudaEvent, Element, KernelError};

use crate::stop::{Stop, Stops};
use crate::watchdog::{Group, Point};

/// Bytes of the value by which ranks find each other.
pub(crate) const ID: usize = 128;

/// Elements that NCCL moves and adds.
pub(crate) trait Dtype: Element {
    const DTYPE: sys::ncclDataType_t;
}

impl Dtype for u8 {
    const DTYPE: sys::ncclDataType_t = sys::ncclDataType_t::ncclUint8;
}

impl Dtype for f32 {
    const DTYPE: sys::ncclDataType_t = sys::ncclDataType_t::ncclFloat32;
}

impl Dtype for bf16 {
    const DTYPE: sys::ncclDataType_t = sys::ncclDataType_t::ncclBfloat16;
}

/// How values are combined.
pub(crate) enum Op {
    Sum,
    Max,
}

impl Op {
    fn raw(&self) -> sys::ncclRedOp_t {
        match self {
            Op::Sum => sys::ncclRedOp_t::ncclSum,
            Op::Max => sys::ncclRedOp_t::ncclMax,
        }
    }
}

/// The options of a group, as NCCL 2.17 has them and later versions understand them.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cga_cluster_size: i32,
    min_ctas: i32,
    max_ctas: i32,
    net_name: *const std::ffi::c_char,
    split_share: i32,
}

impl Config {
    fn new(min_ctas: u32) -> Self {
        const UNDEFINED: i32 = i32::MIN;
        /// The most that NCCL uses by itself: the least number is rejected without one.
        const MOST: i32 = 64;
        let least = i32::try_from(min_ctas).ok().filter(|&n| n > 0);
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: least.unwrap_or(UNDEFINED),
            max_ctas: least.map_or(UNDEFINED, |least| least.max(MOST)),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// NCCL's handle of one rank of a group.
#[derive(Debug)]
struct Handle(sys::ncclComm_t);

// SAFETY: NCCL's handles may be used by any thread, one at a time, which the lock of `Raw` sees to; but for
// `ncclCommAbort`, which is there to end a call that another thread is stuck in.
unsafe impl Send for Handle {}

impl Handle {
    /// Ends the group and its operations.
    fn abort(self) {
        // SAFETY: the only end of the handle, as its owner took it out of `Raw::stuck`: `batch` and `trouble` do not use it any
        // more, or are stuck in a call that this makes return.
        let _ended = unsafe { nccl::comm_abort(self.0) };
    }
}

impl Point for CudaEvent {
    fn passed(&self) -> Result<bool, KernelError> {
        CudaEvent::passed(self)
    }
}

/// One rank of a group of NCCL.
#[derive(Debug)]
pub(crate) struct Raw {
    cuda: Cuda,
    /// For one call at a time.
    handle: Mutex<Handle>,
    /// The same handle for who ends it, also while a call is stuck; `None` once it was ended.
    stuck: Mutex<Option<Handle>>,
    /// Whether it is aborted, now or in a moment: no call may use it.
    ended: AtomicBool,
    /// The thread that ends it.
    aborting: Mutex<Option<JoinHandle<()>>>,
    /// Kernels beside its own that are stopped with it.
    stops: Arc<Stops>,
    /// Communicators that use it. Graphs and the watchdog hold it, too.
    users: AtomicUsize,
}

fn failed(call: &'static str) -> impl FnOnce(NcclError) -> KernelError {
    move |NcclError(error)| KernelError::Device {
        call,
        why: format!("{error:?}; NCCL_DEBUG=WARN makes NCCL say more"),
    }
}

/// NCCL's library, found.
pub(crate) fn found() -> Result<(), KernelError> {
    // SAFETY: looks for the library; there is no precondition.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(KernelError::Device {
        call: "dlopen",
        why: "NCCL (libnccl.so.2) was not found; put its folder on LD_LIBRARY_PATH (PyTorch brings it as nvidia/nccl/lib)".to_owned(),
    })
}

/// A value by which the ranks of a new group find each other.
pub(crate) fn new_id() -> Result<[u8; ID], KernelError> {
    let id = nccl::get_uniqueid().map_err(failed("ncclGetUniqueId"))?;
    Ok(id.internal.map(|c| c.to_ne_bytes()[0]))
}

/// The rank of a group that this is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankOf {
    pub(crate) rank: usize,
    /// Ranks of the group.
    pub(crate) world: usize,
}

impl Raw {
    /// Joins the group of `id` as this rank of it. Waits for all other ranks: on a thread of its own.
    pub(crate) fn join(
        cuda: &Cuda,
        id: [u8; ID],
        RankOf { rank, world }: RankOf,
        min_ctas: u32,
    ) -> Result<Self, KernelError> {
        let number = |n: usize| {
            i32::try_from(n).map_err(|_| KernelError::Device {
                call: "ncclCommInitRankConfig",
                why: format!("{n} ranks; NCCL counts to {}", i32::MAX),
            })
        };
        let (ranks, rank) = (number(world)?, number(rank)?);
        let id = sys::ncclUniqueId {
            internal: id.map(|byte| std::ffi::c_char::from_ne_bytes([byte])),
        };
        let mut config = Config::new(min_ctas);
        let comm = cuda.foreign_work(
            || (),
            |_| {
                let mut comm = MaybeUninit::uninit();
                // SAFETY: NCCL fills the handle where it returns success; it reads as much of the options as they say they are.
                unsafe {
                    let config = (&raw mut config).cast();
                    nccl::comm_init_rank_config(comm.as_mut_ptr(), ranks, id, rank, config)
                        .map_err(failed("ncclCommInitRankConfig"))?;
                    Ok::<_, KernelError>(comm.assume_init())
                }
            },
        )?;
        Ok(Self::of(cuda, comm))
    }

    fn of(cuda: &Cuda, comm: sys::ncclComm_t) -> Self {
        Self {
            cuda: cuda.clone(),
            handle: Mutex::new(Handle(comm)),
            stuck: Mutex::new(Some(Handle(comm))),
            ended: AtomicBool::new(false),
            aborting: Mutex::default(),
            stops: Arc::default(),
            users: AtomicUsize::new(0),
        }
    }

    /// Has an abort stop these kernels, too; at once, if there was one.
    pub(crate) fn stops(&self, stop: &Arc<Stop>) {
        self.stops.add(stop);
    }

    /// Counts a communicator that uses it.
    pub(crate) fn enter(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
    }

    /// A communicator uses it no more. Whether that was the last one.
    pub(crate) fn leave(&self) -> bool {
        self.users.fetch_sub(1, Ordering::SeqCst) == 1
    }

    /// Whether the library splits groups.
    pub(crate) fn splits() -> bool {
        const SINCE: i32 = 21_800;
        nccl::get_nccl_version().is_ok_and(|version| version >= SINCE)
    }

    /// Splits the group: the ranks of one `color` form a group of their own, this one as `rank` of it; without a color it is in none. Waits
    /// for all other ranks, and for the work of this one: on a thread of its own.
    pub(crate) fn split(
        &self,
        color: Option<usize>,
        rank: usize,
        min_ctas: u32,
    ) -> Result<Option<Self>, KernelError> {
        const NO_COLOR: i32 = -1;
        // Operations that are under way when a group is split may wait for it, and it for them.
        self.cuda.synchronize()?;
        let handle = self.lock();
        if self.ended.load(Ordering::SeqCst) {
            return Err(KernelError::Device {
                call: "ncclCommSplit",
                why: "the group was ended".to_owned(),
            });
        }
        let mut config = Config::new(min_ctas);
        let comm = self.cuda.foreign_work(
            || (),
            |_| {
                let mut comm = std::ptr::null_mut();
                let color = color.map_or(NO_COLOR, number);
                let config = (&raw mut config).cast();
                // SAFETY: the handle lives as long as the lock is held; NCCL fills the new one where it returns success and there is a
                // color, and reads as much of the options as they say they are.
                let split =
                    unsafe { sys::ncclCommSplit(handle.0, color, number(rank), &mut comm, config) };
                split.result().map_err(failed("ncclCommSplit"))?;
                Ok::<_, KernelError>(comm)
            },
        )?;
        Ok((!comm.is_null()).then(|| Self::of(&self.cuda, comm)))
    }

    fn lock(&self) -> MutexGuard<'_, Handle> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `give` give work that waits for the other ranks, unless the group was aborted: `None` then.
    pub(crate) fn unless_ended(
        &self,
        give: impl FnOnce() -> Result<(), KernelError>,
    ) -> Result<Option<()>, KernelError> {
        // An abort that comes meanwhile waits for the lock, and then stops what was given.
        let _handle = self.lock();
        match self.ended.load(Ordering::SeqCst) {
            true => Ok(None),
            false => give().map(Some),
        }
    }

    /// Gives `calls` to the stream of `cuda` as one operation. `memory` is what they use. `None`: the group was aborted.
    pub(crate) fn batch<M: Send + Sync + 'static>(
        &self,
        cuda: &Cuda,
        memory: impl FnOnce() -> M,
        calls: impl FnOnce(&Calls) -> Result<(), KernelError>,
    ) -> Result<Option<()>, KernelError> {
        let handle = self.lock();
        if self.ended.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let Handle(comm) = *handle;
        cuda.foreign_work(memory, |stream| {
            nccl::group_start().map_err(failed("ncclGroupStart"))?;
            let stream = stream as sys::cudaStream_t;
            let given = calls(&Calls { comm, stream });
            // Also ends a group in which a call failed.
            let ended = nccl::group_end().map_err(failed("ncclGroupEnd"));
            given?;
            ended.map(|_| Some(()))
        })
    }
}

impl Group for Raw {
    /// What NCCL met in the background.
    fn trouble(&self) -> Option<String> {
        let handle = match self.handle.try_lock() {
            Ok(handle) => handle,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // A call is on its way.
            Err(TryLockError::WouldBlock) => return None,
        };
        if self.ended.load(Ordering::SeqCst) {
            return None;
        }
        let comm = handle.0;
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the handle lives as long as the lock is held.
        let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut state) };
        match asked.result().and_then(|_| state.result()) {
            Ok(NcclStatus::Success | NcclStatus::InProgress | NcclStatus::NumResults) => None,
            Err(NcclError(error)) => Some(format!("NCCL: {error:?}")),
        }
    }

    /// Ends the group: later operations are not begun, and a moment later those on the device stop. NCCL waits for graphs of its
    /// operations before it returns, so a thread of its own waits for it.
    ///
    /// When one rank stops its operations, those of another rank can seem done. The moment gives the other rank time to hear of the failure, after
    /// which it begins no more.
    fn abort(&self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        const MOMENT: Duration = Duration::from_millis(200);
        let stuck = self
            .stuck
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(handle) = stuck else {
            return;
        };
        self.ended.store(true, Ordering::SeqCst);
        // A call that is on its way ends soon, unless it waits for a rank that is gone.
        let until = Instant::now() + PATIENCE;
        while let Err(TryLockError::WouldBlock) = self.handle.try_lock()
            && Instant::now() < until
        {
            thread::sleep(Duration::from_millis(5));
        }
        let (cuda, stops) = (self.cuda.clone(), Arc::clone(&self.stops));
        let end = move || {
            thread::sleep(MOMENT);
            stops.set();
            handle.abort();
            // The device was there until now.
            drop(cuda);
        };
        // Without a thread the operations go on until the process ends.
        let thread = thread::Builder::new().name("lowp-nccl-abort".to_owned());
        if let Ok(thread) = thread.spawn(end) {
            let mut aborting = self.aborting.lock().unwrap_or_else(PoisonError::into_inner);
            *aborting = Some(thread);
        }
    }
}

impl Raw {
    /// Waits for the end of an abort: libraries that are unloaded at the end of the process must not be at work. The last user
    /// is gone, so NCCL has nothing left to wait for; if it waits still, the thread is left behind.
    fn join_abort(&mut self) {
        const PATIENCE: Duration = Duration::from_secs(5);
        let aborting = self.aborting.get_mut();
        let Some(thread) = aborting.unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        let until = Instant::now() + PATIENCE;
        while !thread.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            // It has no result; a panic was told when it happened.
            let _ended = thread.join();
        }
    }
}

impl Drop for Raw {
    /// Ends the group in peace, when its last user is gone: a communicator, or a graph.
    fn drop(&mut self) {
        let stuck = self
            .stuck
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        self.join_abort();
        // Where the stream cannot be waited for, the group stays.
        if let (Some(Handle(comm)), Ok(())) = (stuck, self.cuda.synchronize()) {
            // SAFETY: the only end of the handle, as `stuck` was taken, and its operations are done.
            let _ended = unsafe { nccl::comm_destroy(comm) };
        }
    }
}

/// The calls of one batch. Buffers lie on the communicator's device; empty ones are passed by.
pub(crate) struct Calls {
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
}

/// A rank as NCCL counts it: the world was counted so when it was joined.
fn number(rank: usize) -> i32 {
    i32::try_from(rank).unwrap_or(i32::MAX)
}

fn at<T: Element>(buffer: &CudaBuffer<T>) -> *mut c_void {
    buffer.pointer() as *mut c_void
}

type Given = Result<(), KernelError>;

impl Calls {
    /// Gives one call over as many entries as `counted` has: length, dtype, group and stream.
    fn give<T: Dtype>(
        &self,
        name: &'static str,
        counted: &CudaBuffer<T>,
        call: impl FnOnce(
            usize,
            sys::ncclDataType_t,
            sys::ncclComm_t,
            sys::cudaStream_t,
        ) -> Result<NcclStatus, NcclError>,
    ) -> Given {
        if counted.is_empty() {
            return Ok(());
        }
        let given = call(counted.len(), T::DTYPE, self.comm, self.stream);
        given.map(drop).map_err(failed(name))
    }

    /// Gathers pieces of one length, in the order of ranks.
    pub(crate) fn all_gather<T: Dtype>(&self, piece: &CudaBuffer<T>, all: &CudaBuffer<T>) -> Given {
        self.give("ncclAllGather", piece, |len, dtype, comm, stream| {
            // SAFETY: the batch keeps both buffers, and its caller made `all` as long as the pieces of all ranks.
            unsafe { nccl::all_gather(at(piece), at(all), len, dtype, comm, stream) }
        })
    }

    /// Fills `dest` with the `source` of `root`, on every rank.
    pub(crate) fn broadcast<T: Dtype>(
        &self,
        source: &CudaBuffer<T>,
        dest: &CudaBuffer<T>,
        root: usize,
    ) -> Given {
        self.give("ncclBroadcast", dest, |len, dtype, comm, stream| {
            // SAFETY: the batch keeps both buffers; `source` is read on `root` alone, where it is as long as `dest`.
            unsafe { nccl::broadcast(at(source), at(dest), len, dtype, number(root), comm, stream) }
        })
    }

    /// Combines `values` over the ranks into `all`, which may be the same.
    pub(crate) fn all_reduce<T: Dtype>(
        &self,
        values: &CudaBuffer<T>,
        all: &CudaBuffer<T>,
        op: &Op,
    ) -> Given {
        self.give("ncclAllReduce", values, |len, dtype, comm, stream| {
            // SAFETY: the batch keeps both buffers, and its caller made `all` as long as `values`.
            unsafe { nccl::all_reduce(at(values), at(all), len, dtype, op.raw(), comm, stream) }
        })
    }

    /// Sums over the ranks: `own` gets the part of `all` that is this rank's, where all parts have one length.
    pub(crate) fn reduce_scatter<T: Dtype>(
        &self,
        all: &CudaBuffer<T>,
        own: &CudaBuffer<T>,
    ) -> Given {
        self.give("ncclReduceScatter", own, |len, dtype, comm, stream| {
            // SAFETY: the batch keeps both buffers, and its caller made `all` as long as the parts of all ranks.
            unsafe {
                nccl::reduce_scatter(at(all), at(own), len, dtype, Op::Sum.raw(), comm, stream)
            }
        })
    }

    /// Sends `values` to `peer`.
    pub(crate) fn send<T: Dtype>(&self, values: &CudaBuffer<T>, peer: usize) -> Given {
        self.give("ncclSend", values, |len, dtype, comm, stream| {
            // SAFETY: the batch keeps the buffer.
            unsafe { nccl::send(at(values), len, dtype, number(peer), comm, stream) }
        })
    }

    /// Receives `values` of `peer`.
    pub(crate) fn recv<T: Dtype>(&self, values: &CudaBuffer<T>, peer: usize) -> Given {
        self.give("ncclRecv", values, |len, dtype, comm, stream| {
            // SAFETY: the batch keeps the buffer.
            unsafe { nccl::recv(at(values), len, dtype, number(peer), comm, stream) }
        })
    }
}
