//! Locking every buffer of a plan once, in one order: two plans can never wait for each other. What works
//! while they are locked never locks (`threads.rs`), so no plan waits for itself either.

use half::bf16;

use super::Cpu;
use super::buffer::{CpuBuffer, CpuRead, CpuWrite};
use crate::KernelError;
use crate::check::access::{self, Mode, Use};

/// The buffers of one type, sorted by address, each once.
#[derive(Debug)]
struct Table<T> {
    uses: Vec<Use<CpuBuffer<T>>>,
}

impl<T> Table<T> {
    fn new(mut uses: Vec<Use<CpuBuffer<T>>>) -> Self {
        uses.sort_by_key(|u| u.buffer.address());
        uses.dedup_by(|a, b| a.buffer.ptr_eq(&b.buffer));
        Self { uses }
    }

    fn lock(&self) -> Result<Guards<'_, T>, KernelError> {
        self.uses
            .iter()
            .map(|u| {
                let guard = match u.mode {
                    Mode::Read => Guard::Read(u.buffer.read()?),
                    Mode::Write | Mode::Shared => Guard::Write(u.buffer.write()?),
                };
                Ok((u.buffer.address(), guard))
            })
            .collect()
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
    Read(CpuRead<'a, T>),
    Write(CpuWrite<'a, T>),
}

type Guards<'a, T> = Vec<(usize, Guard<'a, T>)>;

/// Guards of every buffer of a plan.
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

/// The content of the buffers of one type, found by handle.
pub(crate) struct Views<'v, T> {
    views: Vec<(usize, View<'v, T>)>,
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
        let view = |guard: &'v mut Guard<'_, T>| match guard {
            Guard::Read(guard) => View::Read(guard),
            Guard::Write(guard) => View::Write(guard),
        };
        Self {
            views: guards
                .iter_mut()
                .map(|(address, guard)| (*address, view(guard)))
                .collect(),
        }
    }

    fn find(&mut self, buffer: &CpuBuffer<T>) -> Result<&mut View<'v, T>, KernelError> {
        let at = self
            .views
            .binary_search_by_key(&buffer.address(), |(address, _)| *address);
        at.map(|at| &mut self.views[at].1).map_err(|_| undeclared())
    }

    /// The content of a buffer that is only read.
    pub(crate) fn read(&mut self, buffer: &CpuBuffer<T>) -> Result<&'v [T], KernelError> {
        if buffer.is_empty() {
            return Ok(&[]);
        }
        match self.find(buffer)? {
            View::Read(values) => Ok(values),
            View::Write(_) => Err(undeclared()),
        }
    }

    /// The content of a buffer that one job writes; taken once.
    pub(crate) fn take(&mut self, buffer: &CpuBuffer<T>) -> Result<&'v mut [T], KernelError> {
        if buffer.is_empty() {
            return Ok(&mut []);
        }
        match self.find(buffer)? {
            View::Write(values) => Ok(std::mem::take(values)),
            View::Read(_) => Err(undeclared()),
        }
    }

    /// From here on `buffer`, which jobs updated, is only read.
    pub(crate) fn settle(&mut self, buffer: &CpuBuffer<T>) -> Result<(), KernelError> {
        if buffer.is_empty() {
            return Ok(());
        }
        let view = self.find(buffer)?;
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
            View::Write(values) => Ok(values),
            View::Read(_) => Err(undeclared()),
        }
    }
}
