//! [`Behind`]: a file whose bytes are written beside the work that makes them.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};

/// Bytes that are written at a time.
const CHUNK: usize = 1 << 20;
/// The same of one of many files.
const SMALL: usize = 64 << 10;
/// Fewer bytes that do not follow those before them wait for their neighbors: numbers, and parts of small tensors.
const SCATTERED: usize = 16 << 10;
/// Full buffers that wait for the writer.
const WAITING: usize = 3;

/// A file that is written place by place. One that is shorter than a chunk is written by the caller alone.
#[derive(Debug)]
pub(super) struct Behind {
    file: Arc<File>,
    buffer: Vec<u8>,
    /// Where the buffer begins.
    at: u64,
    chunk: usize,
    /// Places and bytes that wait for their neighbors, and how many bytes.
    scattered: Vec<(u64, Vec<u8>)>,
    waiting: usize,
    writer: Option<Writer>,
}

/// A thread that writes buffers in the order in which they come. A second one would wait for the first: the system lets one write to a
/// file at a time.
#[derive(Debug)]
struct Writer {
    full: SyncSender<(u64, Vec<u8>)>,
    empty: Receiver<Vec<u8>>,
    thread: JoinHandle<io::Result<()>>,
}

impl Behind {
    /// Writes `file`, which is empty.
    pub(super) fn new(file: File) -> Self {
        Self::with_chunk(file, CHUNK)
    }

    /// The same for one of many files at a time: little memory, and no thread.
    pub(super) fn small(file: File) -> Self {
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
        }
    }

    /// Writes `bytes` to the place that begins at byte `at`.
    ///
    /// # Errors
    /// These or earlier ones cannot be written.
    pub(super) fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
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

    /// Waits until everything is on the disk.
    ///
    /// # Errors
    /// Something cannot be written.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.gather()?;
        if let Some(writer) = self.writer.take() {
            writer.join()?;
        }
        put(&self.file, self.at, &self.buffer)?;
        self.file.sync_all()
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
        let writer = match &self.writer {
            Some(writer) => writer,
            None => self.writer.insert(Writer::start(&self.file)?),
        };
        let next = writer.empty.try_recv();
        let next = next.unwrap_or_else(|_| Vec::with_capacity(CHUNK));
        let full = mem::replace(&mut self.buffer, next);
        if writer.full.send((at, full)).is_ok() {
            return Ok(());
        }
        // It ends before it is told to where it cannot write.
        let ended = self.writer.take().map_or(Ok(()), Writer::join);
        ended.and_then(|()| Err(io::Error::other("its writer ended")))
    }
}

/// Writes `bytes` to their place, with the position that whoever writes the file has for itself.
fn put(mut file: &File, at: u64, bytes: &[u8]) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    file.seek(SeekFrom::Start(at))?;
    file.write_all(bytes)
}

impl Writer {
    fn start(file: &Arc<File>) -> io::Result<Self> {
        let (full, jobs) = sync_channel::<(u64, Vec<u8>)>(WAITING);
        let (done, empty) = channel();
        let file = Arc::clone(file);
        let work = move || {
            for (at, mut bytes) in jobs {
                put(&file, at, &bytes)?;
                bytes.clear();
                // Whoever fills them may be done.
                drop(done.send(bytes));
            }
            Ok(())
        };
        let thread = thread::Builder::new().name("lowp-writer".to_owned());
        Ok(Self {
            full,
            empty,
            thread: thread.spawn(work)?,
        })
    }

    /// Waits until all that was given is written.
    fn join(self) -> io::Result<()> {
        drop((self.full, self.empty));
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
        ) {
            let folder = tempfile::tempdir()?;
            let path = folder.path().join("file");
            let file = File::create(&path)?;
            let mut out = if small { Behind::small(file) } else { Behind::new(file) };
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
            for (_, place) in places {
                out.write_at(place.start as u64, &expected[place])?;
            }
            out.finish()?;
            prop_assert!(fs::read(&path)? == expected);
        }
    }

    /// A file that takes no bytes is an error of a write or of the end, and nothing waits for ever.
    #[test]
    fn what_cannot_be_written_is_told() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("file");
        fs::write(&path, "")?;
        for chunks in [0, 1, 2, 20] {
            let mut out = Behind::new(File::open(&path)?);
            let mut written = Ok(());
            for part in 0..chunks * CHUNK / SMALL + 1 {
                let at = (part * SMALL) as u64;
                written = written.and_then(|()| out.write_at(at, &[1; SMALL]));
            }
            assert!(written.and_then(|()| out.finish()).is_err(), "{chunks}");
        }
        Ok(())
    }
}
