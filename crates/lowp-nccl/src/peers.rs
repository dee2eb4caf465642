//! [`Peers`]: the GPUs of one process, which add up gradients where they lie in the memory of each other.

#![expect(
    unsafe_code,
    reason = "launches a kernel that reads and writes memory of other GPUs"
)]

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::result;
use lowp_comm::{CommError, Control};
use lowp_kernels::{Backend, Cuda, CudaBuffer, CudaFunction, CudaLibrary, KernelError};

use crate::raw::RankOf;

/// Most GPUs of a group; as `cuda/include/peers.cuh`.
const MOST: usize = 16;

/// Most items of a launch, times GPUs; as there.
pub(crate) const PARTS: usize = 2048;

/// Threads of a block; as there.
pub(crate) const THREADS: usize = 256;

/// Bytes of `Mailbox` there.
const MAILBOX: usize = 16 + 16 * MOST + 8 * PARTS;

/// Blocks of a launch: enough to load as fast as NVLink gives, and few enough to leave most of the GPU to other work.
const BLOCKS: usize = 64;

/// Bytes where the driver may read words.
#[repr(C, align(16))]
struct Aligned<B: ?Sized>(B);

/// Name and image of the `.cu` file. Empty in a program that was built with `LOWP_CUDA_KERNELS=none`.
const UNITS: &[(&str, &Aligned<[u8]>)] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// One GPU of a group, on the stream of one communicator. Its kernels wait on the device for those of the other GPUs, which must be given as many.
#[derive(Debug)]
pub(crate) struct Peers {
    library: CudaLibrary,
    sum: CudaFunction,
    group: CudaBuffer<u8>,
    mailbox: CudaBuffer<u8>,
    stop: Arc<Stop>,
}

/// Sums that the kernel makes in one launch.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) items: CudaBuffer<u8>,
    pub(crate) own: CudaBuffer<u8>,
    pub(crate) count: usize,
    pub(crate) tiles: usize,
}

impl Peers {
    /// The GPU of this rank among those of `control`; none where they are not all of one process, or one does not reach another. Collective.
    pub(crate) fn join(control: &dyn Control, cuda: &Cuda) -> Result<Option<Self>, CommError> {
        let of = RankOf {
            rank: control.rank(),
            world: control.world_size(),
        };
        if of.world > MOST {
            return Ok(None);
        }
        let mailbox: CudaBuffer<u8> = cuda.alloc(MAILBOX)?;
        // Others write it as soon as they know of it.
        cuda.synchronize()?;
        let given = [process(), cuda.ordinal() as u64, mailbox.pointer()];
        let given = given.into_iter().flat_map(u64::to_le_bytes).collect();
        let all = control.all_gather("the GPUs of a process", given)?;
        let all: Vec<[u64; 3]> = all.iter().map(|given| words(given)).collect();
        let ordinals: BTreeSet<u64> = all.iter().map(|&[_, ordinal, _]| ordinal).collect();
        if ordinals.len() < of.world || all.iter().any(|&[other, ..]| other != process()) {
            return Ok(None);
        }
        let mailboxes = all.iter().map(|&[_, _, mailbox]| mailbox);
        let opened = Self::open(cuda, &ordinals, mailboxes, of, mailbox);
        let code = u8::from(!matches!(opened, Ok(Some(_))));
        let failed = control.first_failed("whether GPUs reach each other", code)?;
        match failed {
            None => Ok(opened?),
            Some(_) => opened.map(|_| None).map_err(CommError::from),
        }
    }

    fn open(
        cuda: &Cuda,
        ordinals: &BTreeSet<u64>,
        mailboxes: impl Iterator<Item = u64>,
        RankOf { rank, world }: RankOf,
        mailbox: CudaBuffer<u8>,
    ) -> Result<Option<Self>, KernelError> {
        let others = ordinals.iter().map(|&ordinal| ordinal as usize);
        let others: Vec<usize> = others.filter(|&other| other != cuda.ordinal()).collect();
        if !cuda.share_memory_with(&others)? {
            return Ok(None);
        }
        let images = UNITS.iter().map(|(name, image)| (*name, &image.0));
        // SAFETY: each image is a whole fat binary, made by nvcc.
        let library = unsafe { CudaLibrary::load(cuda, images) }?;
        let sum = library.function("sum_peers", "sum_peers")?;
        let stop = Arc::new(Stop::new(cuda)?);
        let mut group = vec![rank as u64, world as u64, stop.word.as_ptr() as u64];
        group.extend(mailboxes);
        group.resize(3 + MOST, 0);
        let group: Vec<u8> = group.into_iter().flat_map(u64::to_le_bytes).collect();
        Ok(Some(Self {
            sum,
            library,
            group: cuda.upload(&group)?,
            mailbox,
            stop,
        }))
    }

    /// What stops its kernels.
    pub(crate) fn stop(&self) -> &Arc<Stop> {
        &self.stop
    }

    /// Gives the stream of `cuda`, which is always the same, the sums of `launch`: they follow the work that other GPUs gave their streams before their launch
    /// of the same sums, and later work of those follows this GPU's reads.
    pub(crate) fn launch(
        self: &Arc<Self>,
        cuda: &Cuda,
        launch: &Launch,
    ) -> Result<(), KernelError> {
        let blocks = launch.tiles.clamp(1, BLOCKS);
        let mut words = [
            self.group.pointer(),
            launch.items.pointer(),
            launch.own.pointer(),
            launch.count as u64,
        ];
        let memory = || (Arc::clone(self), launch.clone());
        cuda.foreign_work(memory, |_| {
            // SAFETY: the parameters are those of the kernel; this GPU's memory is freed after the work of its streams, which ends after
            // the reads of the other GPUs, and theirs after this one's.
            unsafe {
                self.library
                    .launch(self.sum, [blocks, 1], [THREADS, 1], &mut words)
            }
        })
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        // Kernels of other GPUs may write it after they were stopped.
        if self.stop.is_set() || std::thread::panicking() {
            std::mem::forget(self.mailbox.clone());
        }
    }
}

/// The same for all threads of this process, and for no other process.
fn process() -> u64 {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// Three words of a rank.
fn words(bytes: &[u8]) -> [u64; 3] {
    let mut words = [0; 3];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut eight = [0; 8];
        eight.copy_from_slice(bytes);
        *word = u64::from_le_bytes(eight);
    }
    words
}

/// A word of the host that waiting kernels look at.
#[derive(Debug)]
pub(crate) struct Stop {
    cuda: Cuda,
    word: NonNull<AtomicU32>,
}

// SAFETY: the word is atomic, and stays where it is until the last handle is dropped.
unsafe impl Send for Stop {}
// SAFETY: as above.
unsafe impl Sync for Stop {}

impl Stop {
    fn new(cuda: &Cuda) -> Result<Self, KernelError> {
        let word = cuda.foreign_work(
            || (),
            |_| {
                let failed = |error: result::DriverError| KernelError::Device {
                    call: "cuMemHostAlloc",
                    why: error.to_string(),
                };
                // SAFETY: the memory is written before anything reads it, and freed by `drop`.
                let word =
                    unsafe { result::malloc_host(size_of::<AtomicU32>(), 0) }.map_err(failed)?;
                let word = NonNull::new(word.cast::<AtomicU32>());
                let word = word.ok_or(KernelError::NoHostMemory {
                    bytes: size_of::<AtomicU32>(),
                })?;
                // SAFETY: the driver gives page-locked memory by whole pages.
                unsafe { word.write(AtomicU32::new(0)) };
                Ok::<_, KernelError>(word)
            },
        )?;
        Ok(Self {
            cuda: cuda.clone(),
            word,
        })
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: written by `new`, freed by `drop`.
        unsafe { self.word.as_ref() }
    }

    /// Ends kernels that wait, and those that begin.
    pub(crate) fn set(&self) {
        self.word().store(1, Ordering::SeqCst);
    }

    fn is_set(&self) -> bool {
        self.word().load(Ordering::SeqCst) != 0
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        let word = self.word.as_ptr().cast();
        self.cuda.free_foreign(|| {
            // SAFETY: allocated by `new`, freed once, after the work of the stream. Nobody is left to hear of an error.
            let _freed = unsafe { result::free_host(word) };
        });
    }
}
