//! [`Peers`]: the GPUs of one process, which add up gradients where they lie in the memory of each other.

#![expect(
    unsafe_code,
    reason = "launches kernels that read and write memory of other GPUs"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use lowp_comm::{CommError, Control, MAX_PEER_GPUS};
use lowp_kernels::{Backend, Cuda, CudaBuffer, CudaFunction, CudaLibrary, KernelError};

use crate::peer_layout::{MAILBOX, THREADS};
use crate::raw::RankOf;
use crate::stop::Stop;

/// Most blocks that read, times GPUs: what is on its way from all others together is enough for NVLink, and more of it is slower.
const BLOCKS: usize = 128;

/// Bytes where the driver may read words.
#[repr(C, align(16))]
struct Aligned<B: ?Sized>(B);

/// Name and image of the `.cu` file. Empty in a program that was built with `LOWP_CUDA_KERNELS=none`.
const UNITS: &[(&str, &Aligned<[u8]>)] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// One GPU of a group, for one communicator. All ranks give it the same sums in the same order, graphs included.
#[derive(Debug)]
pub(crate) struct Peers {
    /// Of the highest priority, as a late sum keeps other GPUs waiting.
    cuda: Cuda,
    /// Dropped before what follows: it waits for its kernels.
    library: CudaLibrary,
    meet: CudaFunction,
    sum: CudaFunction,
    leave: CudaFunction,
    group: CudaBuffer<u8>,
    /// What all GPUs write.
    mailboxes: Vec<Arc<Shared>>,
    stop: Arc<Stop>,
    /// Most blocks that read.
    blocks: usize,
}

/// Sums that are made at once.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// `PeerItem` of each.
    pub(crate) items: CudaBuffer<u8>,
    /// Where this GPU's part of each begins.
    pub(crate) own: CudaBuffer<u8>,
    pub(crate) count: usize,
    pub(crate) tiles: usize,
    /// A digest of what all ranks have in common of the items.
    pub(crate) shape: u64,
}

impl Peers {
    /// The GPU of this rank among those of `control`; none where they are not all of one process, or one does not reach another. Collective.
    pub(crate) fn join(control: &dyn Control, cuda: &Cuda) -> Result<Option<Self>, CommError> {
        let of = RankOf {
            rank: control.rank(),
            world: control.world_size(),
        };
        if of.world > MAX_PEER_GPUS {
            return Ok(None);
        }
        let given = words([process(), cuda.ordinal() as u64]);
        let all = control.all_gather("the GPUs of a process", given.clone())?;
        let (first, places): (BTreeSet<_>, BTreeSet<_>) =
            all.iter().map(|given| given.split_at(8)).unzip();
        if first.len() > 1 || places.len() < of.world {
            return Ok(None);
        }
        let own = Registered::new(Shared::new(cuda, of.rank)?);
        let ids = control.all_gather("the mailboxes of GPUs", words([own.0]))?;
        let opened = Self::open(cuda, of, &ids);
        let code = u8::from(!matches!(opened, Ok(Some(_))));
        let failed = control.first_failed("whether GPUs reach each other", code)?;
        Ok(opened?.filter(|_| failed.is_none()))
    }

    /// Of the GPUs whose numbers are `ids`.
    fn open(
        cuda: &Cuda,
        RankOf { rank, world }: RankOf,
        ids: &[Vec<u8>],
    ) -> Result<Option<Self>, KernelError> {
        let shared = registry();
        let mailboxes = ids.iter().map(|id| shared.get(id.as_slice()).cloned());
        let mailboxes: Option<Vec<Arc<Shared>>> = mailboxes.collect();
        drop(shared);
        let Some(mailboxes) = mailboxes else {
            return Ok(None);
        };
        let Some(stop) = mailboxes[0].stop.clone() else {
            return Ok(None);
        };
        let others = mailboxes.iter().filter_map(|of| of.mailbox.ordinal());
        let others: Vec<usize> = others.filter(|&other| other != cuda.ordinal()).collect();
        if !cuda.share_memory_with(&others)? {
            return Ok(None);
        }
        let mut group = vec![rank as u64, world as u64, stop.pointer()];
        group.extend(mailboxes.iter().map(|of| of.mailbox.pointer()));
        group.resize(3 + MAX_PEER_GPUS, 0);
        let group = cuda.upload(&words(group))?;
        let cuda = cuda.fork_with_priority()?;
        let images = UNITS.iter().map(|(name, image)| (*name, &image.0));
        // SAFETY: each image is a whole fat binary, made by nvcc.
        let library = unsafe { CudaLibrary::load(&cuda, images) }?;
        let function = |name| library.function("sum_peers", name);
        Ok(Some(Self {
            meet: function("peers_meet")?,
            sum: function("sum_peers")?,
            leave: function("peers_leave")?,
            cuda,
            library,
            group,
            mailboxes,
            stop,
            blocks: BLOCKS / world,
        }))
    }

    /// What stops its kernels.
    pub(crate) fn stop(&self) -> &Arc<Stop> {
        &self.stop
    }

    /// Gives the stream of `cuda` these sums. They follow what other GPUs were given before the same sums, and what those are given later follows this GPU's reads.
    pub(crate) fn launch(
        self: &Arc<Self>,
        cuda: &Cuda,
        launches: &[Launch],
    ) -> Result<(), KernelError> {
        self.cuda.wait_for(cuda)?;
        let group = self.group.pointer();
        let memory = || (Arc::clone(self), launches.to_vec());
        self.cuda.foreign_work(memory, |_| {
            let give = |function, blocks, threads, words: &mut [u64]| {
                // SAFETY: the parameters are those of the kernel. This GPU's memory is freed after the work of its streams, which ends after the
                // reads and writes of all GPUs, and mailboxes after those of the last one.
                unsafe {
                    self.library
                        .launch(function, [blocks, 1], [threads, 1], words)
                }
            };
            for launch in launches {
                let (items, own) = (launch.items.pointer(), launch.own.pointer());
                let count = launch.count as u64;
                give(
                    self.meet,
                    1,
                    THREADS,
                    &mut [group, own, count, launch.shape],
                )?;
                let blocks = launch.tiles.clamp(1, self.blocks);
                give(self.sum, blocks, THREADS, &mut [group, items, count])?;
                give(self.leave, 1, THREADS, &mut [group])?;
            }
            Ok::<_, KernelError>(())
        })?;
        cuda.wait_for(&self.cuda)
    }
}

impl Drop for Peers {
    /// In a capture nothing waits for kernels, which may still write mailboxes.
    fn drop(&mut self) {
        if self.cuda.is_capturing() {
            std::mem::take(&mut self.mailboxes)
                .into_iter()
                .for_each(std::mem::forget);
        }
    }
}

/// What the GPUs of a group have in common.
#[derive(Debug)]
struct Shared {
    mailbox: CudaBuffer<u8>,
    /// That of the first rank is the one that all look at.
    stop: Option<Arc<Stop>>,
}

impl Shared {
    fn new(cuda: &Cuda, rank: usize) -> Result<Self, KernelError> {
        let mailbox = cuda.alloc(MAILBOX)?;
        let stop = (rank == 0).then(|| Stop::new(cuda).map(Arc::new));
        let stop = stop.transpose()?;
        // Others write and read them as soon as they know of them.
        cuda.synchronize()?;
        Ok(Self { mailbox, stop })
    }
}

/// What ranks show each other, by the bytes of a number.
type Registry = BTreeMap<Vec<u8>, Arc<Shared>>;

fn registry() -> MutexGuard<'static, Registry> {
    static REGISTRY: Mutex<Registry> = Mutex::new(BTreeMap::new());
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of what a rank shows, until it is dropped.
#[derive(Debug)]
struct Registered(u64);

impl Registered {
    fn new(shared: Shared) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        registry().insert(words([number]), Arc::new(shared));
        Self(number)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let removed = registry().remove(&words([self.0]));
        // Memory is freed without the lock.
        drop(removed);
    }
}

/// The same for all threads of this process, and for no other process.
fn process() -> u64 {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// Words as a GPU has them.
pub(crate) fn words(words: impl IntoIterator<Item = u64>) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}
