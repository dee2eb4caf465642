//! Locking every memory of a plan once, in one order: two plans can never wait for each other. What works
//! while they are locked never locks (`threads.rs`), so no plan waits for itself either.

use std::ops::Range;
use std::sync::{RwLockReadGuard, RwLockWriteGuard};

use half::bf16;

use super::Cpu;
use super::buffer::CpuBuffer;
use super::memory::Memory;
use crate::KernelError;
use crate::check::access::{self, BufferUse, Mode};

/// One memory that a plan touches, and the parts that it touches.
#[derive(Debug)]
struct Touched<T> {
    buffer: CpuBuffer<T>,
    /// Sorted, apart from each other. Buffers that overlap, all in one mode, are one part.
    parts: Vec<(Range<usize>, Mode)>,
}

impl<T> Touched<T> {
    fn add(&mut self, range: Range<usize>, mode: Mode) {
        match self.parts.last_mut() {
            Some((last, _)) if range.start < last.end => last.end = last.end.max(range.end),
            _ => self.parts.push((range, mode)),
        }
    }

    fn lock(&self) -> Result<Guard<'_, T>, KernelError> {
        let memory = self.buffer.memory();
        let poisoned = |_| KernelError::Poisoned;
        if self.parts.iter().all(|(_, mode)| *mode == Mode::Read) {
            return Ok(Guard::Read(memory.read().map_err(poisoned)?));
        }
        let write = memory.write();
        Ok(Guard::Write(write.map_err(|_| KernelError::Poisoned)?))
    }
}

/// The memories of one type, sorted by address, each once.
#[derive(Debug)]
struct Table<T> {
    memories: Vec<Touched<T>>,
}

impl<T> Table<T> {
    fn new(mut uses: Vec<BufferUse<CpuBuffer<T>>>) -> Self {
        uses.sort_by_key(|u| (u.buffer.address(), u.buffer.range().start));
        let mut memories: Vec<Touched<T>> = Vec::new();
        for BufferUse { buffer, mode } in uses {
            let range = buffer.range();
            if memories
                .last()
                .is_none_or(|last| !last.buffer.ptr_eq(&buffer))
            {
                let parts = Vec::new();
                memories.push(Touched { buffer, parts });
            }
            if let Some(last) = memories.last_mut() {
                last.add(range, mode);
            }
        }
        Self { memories }
    }

    fn lock(&self) -> Result<Guards<'_, T>, KernelError> {
        let lock = |memory| Ok((memory, Touched::lock(memory)?));
        self.memories.iter().map(lock).collect()
    }
}

/// All buffers of a plan, ready to lock.
#[derive(Debug)]
pub(crate) struct Access {
    bytes: Table<u8>,
    floats: Table<f32>,
    halves: Table<bf16>,
}

impl Access {
    /// The buffers that checked work touches.
    pub(crate) fn new(checked: access::Access<Cpu>) -> Self {
        Self {
            bytes: Table::new(checked.bytes),
            floats: Table::new(checked.floats),
            halves: Table::new(checked.halves),
        }
    }

    /// Locks every buffer: by type, then by address.
    pub(crate) fn lock(&self) -> Result<Locked<'_>, KernelError> {
        Ok(Locked {
            bytes: self.bytes.lock()?,
            floats: self.floats.lock()?,
            halves: self.halves.lock()?,
        })
    }
}

enum Guard<'a, T> {
    Read(RwLockReadGuard<'a, Memory<T>>),
    Write(RwLockWriteGuard<'a, Memory<T>>),
}

type Guards<'a, T> = Vec<(&'a Touched<T>, Guard<'a, T>)>;

/// Guards of every memory of a plan.
pub(crate) struct Locked<'a> {
    bytes: Guards<'a, u8>,
    floats: Guards<'a, f32>,
    halves: Guards<'a, bf16>,
}

impl Locked<'_> {
    /// The content of every buffer.
    pub(crate) fn views(&mut self) -> AllViews<'_> {
        AllViews {
            bytes: Views::new(&mut self.bytes),
            floats: Views::new(&mut self.floats),
            halves: Views::new(&mut self.halves),
        }
    }
}

enum View<'v, T> {
    Read(&'v [T]),
    Write(&'v mut [T]),
}

/// A part of a memory.
struct Part<'v, T> {
    address: usize,
    range: Range<usize>,
    view: View<'v, T>,
}

/// The content of the buffers of one type, found by handle.
pub(crate) struct Views<'v, T> {
    /// Sorted by address and range.
    parts: Vec<Part<'v, T>>,
}

/// The content of every buffer of a plan.
pub(crate) struct AllViews<'v> {
    pub(crate) bytes: Views<'v, u8>,
    pub(crate) floats: Views<'v, f32>,
    pub(crate) halves: Views<'v, bf16>,
}

/// A buffer that the plan did not declare; a defect of this crate.
fn undeclared() -> KernelError {
    KernelError::Missing {
        what: "the declaration of a buffer that the plan uses".to_owned(),
    }
}

impl<'v, T> Views<'v, T> {
    fn new(guards: &'v mut Guards<'_, T>) -> Self {
        let mut parts = Vec::new();
        for (touched, guard) in guards {
            let address = touched.buffer.address();
            match guard {
                Guard::Read(values) => parts.extend(touched.parts.iter().map(|(range, _)| Part {
                    address,
                    range: range.clone(),
                    view: View::Read(&values[range.clone()]),
                })),
                Guard::Write(values) => {
                    let (mut rest, mut done) = (&mut values[..], 0);
                    for (range, mode) in &touched.parts {
                        let (part, after) = std::mem::take(&mut rest)[range.start - done..]
                            .split_at_mut(range.len());
                        (rest, done) = (after, range.end);
                        let view = match mode {
                            Mode::Read => View::Read(part),
                            Mode::Write | Mode::Shared => View::Write(part),
                        };
                        let range = range.clone();
                        parts.push(Part {
                            address,
                            range,
                            view,
                        });
                    }
                }
            }
        }
        Self { parts }
    }

    /// The part that holds `buffer`, and the buffer's place in it.
    fn find(
        &mut self,
        buffer: &CpuBuffer<T>,
    ) -> Result<(&mut View<'v, T>, Range<usize>), KernelError> {
        let (address, range) = (buffer.address(), buffer.range());
        let up_to = |part: &Part<'_, T>| (part.address, part.range.start) <= (address, range.start);
        let after = self.parts.partition_point(up_to);
        let part = self.parts[..after].last_mut();
        let part = part.filter(|part| part.address == address && range.end <= part.range.end);
        let part = part.ok_or_else(undeclared)?;
        let start = range.start - part.range.start;
        Ok((&mut part.view, start..start + range.len()))
    }

    /// The content of a buffer that is only read.
    pub(crate) fn read(&mut self, buffer: &CpuBuffer<T>) -> Result<&'v [T], KernelError> {
        if buffer.is_empty() {
            return Ok(&[]);
        }
        match self.find(buffer)? {
            (View::Read(values), range) => Ok(&values[range]),
            (View::Write(_), _) => Err(undeclared()),
        }
    }

    /// The content of a buffer that one job writes; taken once.
    pub(crate) fn take(&mut self, buffer: &CpuBuffer<T>) -> Result<&'v mut [T], KernelError> {
        if buffer.is_empty() {
            return Ok(&mut []);
        }
        match self.find(buffer)? {
            (View::Write(values), range) => Ok(&mut std::mem::take(values)[range]),
            (View::Read(_), _) => Err(undeclared()),
        }
    }

    /// From here on `buffer`, which jobs updated, is only read.
    pub(crate) fn freeze(&mut self, buffer: &CpuBuffer<T>) -> Result<(), KernelError> {
        if buffer.is_empty() {
            return Ok(());
        }
        let (view, _) = self.find(buffer)?;
        if let View::Write(values) = view {
            let values: &'v mut [T] = std::mem::take(values);
            *view = View::Read(values);
        }
        Ok(())
    }

    /// The content of a buffer that jobs update one after another.
    pub(crate) fn shared(&mut self, buffer: &CpuBuffer<T>) -> Result<&mut [T], KernelError> {
        if buffer.is_empty() {
            return Ok(&mut []);
        }
        match self.find(buffer)? {
            (View::Write(values), range) => Ok(&mut values[range]),
            (View::Read(_), _) => Err(undeclared()),
        }
    }
}
