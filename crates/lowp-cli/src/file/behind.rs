//! [`Behind`]: a file whose bytes are written beside the work that makes them.

use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};

/// Bytes that are written at a time.
const CHUNK: usize = 4 << 20;
/// The same of one of many files.
const SMALL: usize = 64 << 10;
/// Full buffers that wait for the writer.
const WAITING: usize = 2;

/// A file that is written from its beginning. One that is shorter than a chunk is written by the caller alone.
#[derive(Debug)]
pub(super) struct Behind {
    file: Arc<File>,
    buffer: Vec<u8>,
    chunk: usize,
    writer: Option<Writer>,
}

/// A thread that writes buffers in the order in which they come. A second one would wait for the first: the system lets one write to a
/// file at a time.
#[derive(Debug)]
struct Writer {
    full: SyncSender<Vec<u8>>,
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
            chunk,
            writer: None,
        }
    }

    /// Appends `bytes`.
    ///
    /// # Errors
    /// These or earlier ones cannot be written.
    pub(super) fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
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

    /// Waits until everything is on the disk.
    ///
    /// # Errors
    /// Something cannot be written.
    pub(super) fn finish(mut self) -> io::Result<()> {
        if let Some(writer) = self.writer.take() {
            writer.join()?;
        }
        (&*self.file).write_all(&self.buffer)?;
        self.file.sync_all()
    }

    /// Gives the full buffer to the writer, or writes it.
    fn flush(&mut self) -> io::Result<()> {
        if self.chunk < CHUNK {
            (&*self.file).write_all(&self.buffer)?;
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
        if writer.full.send(full).is_ok() {
            return Ok(());
        }
        // It ends before it is told to where it cannot write.
        let ended = self.writer.take().map_or(Ok(()), Writer::join);
        ended.and_then(|()| Err(io::Error::other("its writer ended")))
    }
}

impl Writer {
    fn start(file: &Arc<File>) -> io::Result<Self> {
        let (full, jobs) = sync_channel::<Vec<u8>>(WAITING);
        let (done, empty) = channel();
        let file = Arc::clone(file);
        let work = move || {
            for mut bytes in jobs {
                (&*file).write_all(&bytes)?;
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
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// However the bytes come, the file has them in their order.
        #[test]
        fn the_file_is_what_was_written(
            parts in prop::collection::vec(prop_oneof![0usize..100, 0..CHUNK * 2, Just(CHUNK), Just(SMALL)], 0..12),
            small in any::<bool>(),
        ) {
            let folder = tempfile::tempdir()?;
            let path = folder.path().join("file");
            let file = File::create(&path)?;
            let mut out = if small { Behind::small(file) } else { Behind::new(file) };
            let (mut expected, mut next) = (Vec::new(), 0u32);
            for part in parts {
                let byte = |_| {
                    next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (next >> 24) as u8
                };
                let bytes: Vec<u8> = (0..part).map(byte).collect();
                out.write(&bytes)?;
                expected.extend(bytes);
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
            for _ in 0..chunks * CHUNK / SMALL + 1 {
                written = written.and_then(|()| out.write(&[1; SMALL]));
            }
            assert!(written.and_then(|()| out.finish()).is_err(), "{chunks}");
        }
        Ok(())
    }
}
