//! Which buffers a plan touches and how. The same table finds aliases when work is planned and
//! locks every buffer once, in one order, when it runs: two plans can never wait for each other.

use half::bf16;

use super::buffer::{CpuBuffer, CpuRead, CpuWrite};
use crate::KernelError;

/// How a job touches a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Reads it; any number of jobs may.
    Read,
    /// Writes it; nothing else may touch it.
    Write,
    /// Updates entries between the parallel parts; jobs may share it in this mode.
    Shared,
}

#[derive(Debug)]
struct Use<T> {
    job: usize,
    what: String,
    buffer: CpuBuffer<T>,
    mode: Mode,
}

/// The uses of all buffers of one type.
#[derive(Debug)]
pub(crate) struct Table<T> {
    uses: Vec<Use<T>>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { uses: Vec::new() }
    }
}

impl<T> Table<T> {
    /// Notes a use of `buffer` and checks its length.
    pub(crate) fn add(
        &mut self,
        job: usize,
        what: impl std::fmt::Display,
        buffer: &CpuBuffer<T>,
        needed: usize,
        mode: Mode,
    ) -> Result<(), KernelError> {
        let what = format!("{what} of job {job}");
        if buffer.len() != needed {
            return Err(KernelError::Length {
                what,
                needed,
                found: buffer.len(),
            });
        }
        self.add_any(job, what, buffer, mode);
        Ok(())
    }

    /// Notes a use of `buffer`, of which entry `index` must exist.
    pub(crate) fn add_entry(
        &mut self,
        job: usize,
        what: &str,
        buffer: &CpuBuffer<T>,
        index: usize,
        mode: Mode,
    ) -> Result<(), KernelError> {
        let what = format!("{what} of job {job}");
        if index >= buffer.len() {
            let needed = index.saturating_add(1);
            return Err(KernelError::Length {
                what,
                needed,
                found: buffer.len(),
            });
        }
        self.add_any(job, what, buffer, mode);
        Ok(())
    }

    fn add_any(&mut self, job: usize, what: String, buffer: &CpuBuffer<T>, mode: Mode) {
        // Empty buffers hold nothing to alias or lock.
        if !buffer.is_empty() {
            self.uses.push(Use {
                job,
                what,
                buffer: buffer.clone(),
                mode,
            });
        }
    }

    /// Sorts by address, refuses aliases, and keeps one use per buffer.
    fn finish(&mut self) -> Result<(), KernelError> {
        self.uses.sort_by_key(|u| u.buffer.address());
        for group in self.uses.chunk_by(|a, b| a.buffer.ptr_eq(&b.buffer)) {
            let first = &group[0];
            let clash = group[1..]
                .iter()
                .find(|u| u.mode != first.mode || u.mode == Mode::Write);
            if let Some(u) = clash {
                let (written, other) = if first.mode == Mode::Read {
                    (u, first)
                } else {
                    (first, u)
                };
                let what = written.what.clone();
                return Err(KernelError::Aliased {
                    what,
                    other: other.job,
                });
            }
        }
        self.uses.dedup_by(|a, b| a.buffer.ptr_eq(&b.buffer));
        for u in &mut self.uses {
            u.what = String::new();
        }
        Ok(())
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

/// The uses of all buffers of a plan.
#[derive(Debug, Default)]
pub(crate) struct Access {
    pub(crate) bytes: Table<u8>,
    pub(crate) floats: Table<f32>,
    pub(crate) halves: Table<bf16>,
}

impl Access {
    /// Refuses aliases; the table is then ready to lock.
    pub(crate) fn finish(&mut self) -> Result<(), KernelError> {
        self.bytes.finish()?;
        self.floats.finish()?;
        self.halves.finish()
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
