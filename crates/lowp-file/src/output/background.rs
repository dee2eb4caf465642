//! [`BackgroundFile`]: a file whose bytes are written in the background, while those that follow are made.

use crate::limits::no_room;
use crate::region::Region;
use std::fs::File;
use std::io;
use std::mem;
use std::ops::Add;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Bytes that are written at a time.
const CHUNK: usize = 1 << 20;
/// The same of one of many files.
const SMALL: usize = 64 << 10;
/// Fewer bytes that do not follow those before them wait for their neighbors: numbers, and parts of small tensors.
const SCATTERED: usize = 16 << 10;
/// Bytes of full buffers that may wait for the writer.
const WAITING: usize = 4 << 20;

/// Bytes that the writer reads where they are, when their turn comes.
pub(crate) trait Deferred: Send {
    fn len(&self) -> usize;

    /// Hands them to `take`, piece by piece.
    fn each(&self, take: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()>;
}

impl Deferred for Vec<u8> {
    fn len(&self) -> usize {
        self.len()
    }

    fn each(&self, take: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        take(self)
    }
}

/// A file whose bytes come in any order. One that is shorter than a chunk is written by the caller alone, and so is each where the
/// system has no thread for a writer.
#[derive(Debug)]
pub(crate) struct BackgroundFile {
    file: Arc<File>,
    buffer: Vec<u8>,
    /// Where the buffer begins.
    at: u64,
    chunk: usize,
    /// Places and bytes that wait for their neighbors, and how many bytes.
    scattered: Vec<(u64, Vec<u8>)>,
    waiting: usize,
    writer: Option<Writer>,
    /// No thread could be started.
    alone: bool,
}

/// A thread that writes what it is given, in that order. A second one would wait for the first: the system lets one write to a file at a
/// time.
#[derive(Debug)]
struct Writer {
    jobs: Sender<(u64, Job)>,
    empty: Receiver<Vec<u8>>,
    load: Arc<Load>,
    thread: JoinHandle<io::Result<()>>,
}

/// What is written to one place.
enum Job {
    Here(Vec<u8>),
    Deferred(Region, Box<dyn Deferred>),
}

impl Job {
    /// What it adds to what waits.
    fn load(&self) -> Waiting {
        match self {
            Self::Here(bytes) => Waiting {
                all: bytes.len(),
                copied: bytes.len(),
            },
            Self::Deferred(_, bytes) => Waiting {
                all: bytes.len(),
                copied: 0,
            },
        }
    }

    /// Writes it. Returns the buffer of bytes that were here, which is empty now.
    fn done(self, file: &File, at: u64) -> io::Result<Option<Vec<u8>>> {
        match self {
            Self::Here(mut bytes) => {
                put(file, at, &bytes)?;
                bytes.clear();
                Ok(Some(bytes))
            }
            Self::Deferred(region, bytes) => put_deferred(file, at, region, &*bytes).map(|()| None),
        }
    }
}

/// Bytes that wait for the writer, or are being written.
#[derive(Clone, Copy, Debug, Default)]
struct Waiting {
    all: usize,
    /// Those of full buffers.
    copied: usize,
}

impl Add for Waiting {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            all: self.all + more.all,
            copied: self.copied + more.copied,
        }
    }
}

/// What waits for the writer; `None` once it ended.
#[derive(Debug)]
struct Load {
    waiting: Mutex<Option<Waiting>>,
    changed: Condvar,
}

impl Load {
    fn set(&self, change: impl FnOnce(&mut Option<Waiting>)) {
        change(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Waits until at most as many wait as `most` says, and adds `more`. Whether there is a writer.
    fn add(&self, most: Waiting, more: Waiting) -> bool {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |waiting: &mut Option<Waiting>| {
            waiting.is_some_and(|now| now.all > most.all || now.copied > most.copied)
        };
        let waiting = self.changed.wait_while(waiting, full);
        let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
        *waiting = waiting.map(|now| now + more);
        waiting.is_some()
    }
}

/// Says that the writer ended, however it does.
struct Ending(Arc<Load>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.set(|waiting| *waiting = None);
    }
}

impl BackgroundFile {
    pub(crate) fn new(file: File) -> Self {
        Self::with_chunk(file, CHUNK)
    }

    /// The same for one of many files at a time: little memory, and no thread.
    pub(crate) fn small(file: File) -> Self {
        Self::with_chunk(file, SMALL)
    }

    fn with_chunk(file: File, chunk: usize) -> Self {
        Self {
            file: Arc::new(file),
            buffer: Vec::new(),
            at: 0,
            chunk,
            scattered: Vec::new(),
            waiting: 0,
            writer: None,
            alone: false,
        }
    }

    /// Writes `bytes` to the place that begins at byte `at`.
    pub(crate) fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let follows = at == self.at + self.buffer.len() as u64;
        if follows || bytes.len() >= SCATTERED {
            return self.put(at, bytes);
        }
        self.scattered.push((at, bytes.to_vec()));
        self.waiting += bytes.len() + size_of::<(u64, Vec<u8>)>();
        match self.waiting < self.chunk {
            true => Ok(()),
            false => self.gather(),
        }
    }

    /// Writes `bytes` to their `region` of what begins at byte `at`, while the caller goes on.
    pub(crate) fn write_deferred(
        &mut self,
        at: u64,
        region: Region,
        bytes: Box<dyn Deferred>,
    ) -> io::Result<()> {
        if self.chunk < CHUNK {
            return put_deferred(&self.file, at, region, &*bytes);
        }
        self.give(at, Job::Deferred(region, bytes))
    }

    /// Waits until at most `most` bytes are left to be written, in the order in which they were given: the memory that all before them lie
    /// in is free.
    pub(crate) fn settle(&mut self, most: usize) -> io::Result<()> {
        let most = Waiting {
            all: most,
            copied: usize::MAX,
        };
        self.wait_for(most, Waiting::default())
    }

    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.gather()?;
        if let Some(writer) = self.writer.take() {
            writer.join()?;
        }
        put(&self.file, self.at, &self.buffer)?;
        let synced = self.file.sync_all();
        synced.map_err(|error| no_room(error, &self.file))
    }

    /// Writes what waits, in the order of the file.
    fn gather(&mut self) -> io::Result<()> {
        let mut scattered = mem::take(&mut self.scattered);
        self.waiting = 0;
        scattered.sort_unstable_by_key(|(at, _)| *at);
        let mut scattered = scattered.iter();
        scattered.try_for_each(|(at, bytes)| self.put(*at, bytes))
    }

    fn put(&mut self, at: u64, mut bytes: &[u8]) -> io::Result<()> {
        if at != self.at + self.buffer.len() as u64 {
            self.flush()?;
            self.at = at;
        }
        while !bytes.is_empty() {
            let room = self.chunk - self.buffer.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
            if self.buffer.len() == self.chunk {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Gives the buffer to the writer, or writes it.
    fn flush(&mut self) -> io::Result<()> {
        let at = self.at;
        self.at += self.buffer.len() as u64;
        if self.chunk < CHUNK || (self.writer.is_none() && self.buffer.len() < CHUNK) {
            put(&self.file, at, &self.buffer)?;
            self.buffer.clear();
            return Ok(());
        }
        let next = self.writer.as_ref().map(|writer| writer.empty.try_recv());
        let next = next.and_then(Result::ok);
        let next = next.unwrap_or_else(|| Vec::with_capacity(CHUNK));
        let full = mem::replace(&mut self.buffer, next);
        self.give(at, Job::Here(full))
    }

    /// Gives `job` to the writer, which is started if there is none, or does it.
    fn give(&mut self, at: u64, job: Job) -> io::Result<()> {
        if self.writer.is_none() && !self.alone {
            self.writer = Writer::start(&self.file).ok();
            self.alone = self.writer.is_none();
        }
        if self.alone {
            return job.done(&self.file, at).map(drop);
        }
        let load = job.load();
        let most = Waiting {
            all: usize::MAX,
            copied: WAITING.saturating_sub(load.copied),
        };
        self.wait_for(most, load)?;
        let writer = self.writer.as_ref();
        match writer.map(|writer| writer.jobs.send((at, job))) {
            Some(Ok(())) => Ok(()),
            _ => self.ended(),
        }
    }

    /// Waits until at most as many bytes wait for the writer, if there is one, as `most` says, and adds `more`.
    fn wait_for(&mut self, most: Waiting, more: Waiting) -> io::Result<()> {
        let writer = self.writer.as_ref();
        match writer.is_none_or(|writer| writer.load.add(most, more)) {
            true => Ok(()),
            false => self.ended(),
        }
    }

    /// The error of a writer that ended before it was asked to, as it does where it cannot write.
    fn ended(&mut self) -> io::Result<()> {
        let ended = self.writer.take().map_or(Ok(()), Writer::join);
        ended.and_then(|()| Err(io::Error::other("its writer ended")))
    }
}

#[cfg(unix)]
fn put(file: &File, at: u64, bytes: &[u8]) -> io::Result<()> {
    let written = std::os::unix::fs::FileExt::write_all_at(file, bytes, at);
    written.map_err(|error| no_room(error, file))
}

/// The same with the position that whoever writes the file has for itself.
#[cfg(not(unix))]
fn put(mut file: &File, at: u64, bytes: &[u8]) -> io::Result<()> {
    use std::io::{Seek, SeekFrom, Write};
    if bytes.is_empty() {
        return Ok(());
    }
    file.seek(SeekFrom::Start(at))?;
    let written = file.write_all(bytes);
    written.map_err(|error| no_room(error, file))
}

fn put_deferred(file: &File, at: u64, region: Region, bytes: &dyn Deferred) -> io::Result<()> {
    let mut done = 0;
    bytes.each(&mut |piece| {
        for (range, to) in region.pieces(done, piece.len()) {
            put(file, at + to as u64, &piece[range])?;
        }
        done += piece.len();
        Ok(())
    })
}

impl Writer {
    fn start(file: &Arc<File>) -> io::Result<Self> {
        let (jobs, given) = channel::<(u64, Job)>();
        let (done, empty) = channel();
        let load = Arc::new(Load {
            waiting: Mutex::new(Some(Waiting::default())),
            changed: Condvar::new(),
        });
        let (file, ending) = (Arc::clone(file), Ending(Arc::clone(&load)));
        let work = move || {
            for (at, job) in given {
                let done_now = job.load();
                if let Some(bytes) = job.done(&file, at)? {
                    // Whoever fills them may be done.
                    drop(done.send(bytes));
                }
                ending.0.set(|waiting| {
                    let left = |now: Waiting| Waiting {
                        all: now.all - done_now.all,
                        copied: now.copied - done_now.copied,
                    };
                    *waiting = waiting.map(left);
                });
            }
            Ok(())
        };
        let thread = thread::Builder::new().name("lowp-writer".to_owned());
        Ok(Self {
            jobs,
            empty,
            load,
            thread: thread.spawn(work)?,
        })
    }

    fn join(self) -> io::Result<()> {
        drop((self.jobs, self.empty));
        let ended = self.thread.join();
        ended.unwrap_or_else(|_| Err(io::Error::other("its writer panicked")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// However the bytes come, the file has them in their places.
        #[test]
        fn the_file_is_what_was_written(
            parts in prop::collection::vec((prop_oneof![0usize..100, 0..CHUNK * 2, Just(CHUNK), Just(SMALL)], any::<u32>()), 0..14),
            small in any::<bool>(),
            in_order in any::<bool>(),
            alone in any::<bool>(),
        ) {
            let folder = tempfile::tempdir()?;
            let path = folder.path().join("file");
            let file = File::create(&path)?;
            let mut out = if small { BackgroundFile::small(file) } else { BackgroundFile::new(file) };
            out.alone = alone;
            let (mut expected, mut next, mut places) = (Vec::new(), 0u32, Vec::new());
            for (part, order) in parts {
                let byte = |_| {
                    next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (next >> 24) as u8
                };
                places.push((order, expected.len()..expected.len() + part));
                expected.extend((0..part).map(byte));
            }
            if !in_order {
                places.sort_by_key(|(order, _)| *order);
            }
            for (order, place) in places {
                let (at, bytes) = (place.start as u64, &expected[place]);
                match order % 4 {
                    0 => out.write_deferred(at, Region::FIRST, Box::new(bytes.to_vec()))?,
                    1 => out.settle(order as usize).and_then(|()| out.write_at(at, bytes))?,
                    _ => out.write_at(at, bytes)?,
                }
            }
            out.finish()?;
            prop_assert!(fs::read(&path)? == expected);
        }
    }

    /// A file that takes no bytes is an error of a write or of the end, and nothing waits forever.
    #[test]
    fn what_cannot_be_written_is_an_error() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("file");
        fs::write(&path, "")?;
        for chunks in [0, 1, 2, 20] {
            let mut out = BackgroundFile::new(File::open(&path)?);
            let mut written = Ok(());
            for part in 0..chunks * CHUNK / SMALL + 1 {
                let at = (part * SMALL) as u64;
                written = written.and_then(|()| out.write_at(at, &[1; SMALL]));
            }
            assert!(written.and_then(|()| out.finish()).is_err(), "{chunks}");
        }
        for most in [0, CHUNK] {
            let mut out = BackgroundFile::new(File::open(&path)?);
            let written = out.write_deferred(0, Region::FIRST, Box::new(vec![1; 3 * CHUNK]));
            let settled = written.and_then(|()| out.settle(most));
            assert!(settled.and_then(|()| out.finish()).is_err());
        }
        // What cannot be read is an error, too.
        struct Gone;
        impl Deferred for Gone {
            fn len(&self) -> usize {
                CHUNK
            }

            fn each(&self, _: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
                Err(io::Error::other("the device is gone"))
            }
        }
        let mut out = BackgroundFile::new(File::create(&path)?);
        out.write_deferred(0, Region::FIRST, Box::new(Gone))?;
        let error = out.settle(0).and_then(|()| out.finish());
        assert!(error.expect_err("no bytes").to_string().contains("gone"));
        Ok(())
    }
}
