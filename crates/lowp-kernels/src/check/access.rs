//! Which buffers a plan touches and how, and that none is written and touched otherwise too.

use std::ops::Range;

use half::bf16;

use crate::{Backend, Element, KernelError};

/// How a job touches a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Reads it; any number of jobs may.
    Read,
    /// Writes it; nothing else may touch it.
    Write,
    /// Updates entries in an order that does not show; jobs may share it in this mode.
    Shared,
}

/// A buffer and how a job touches it.
#[derive(Debug)]
pub(crate) struct BufferUse<H> {
    pub(crate) buffer: H,
    pub(crate) mode: Mode,
}

/// The same use as memory, with its name for messages.
#[derive(Debug)]
struct Touch {
    span: Range<usize>,
    job: usize,
    what: String,
    mode: Mode,
}

/// Every use of every buffer of a plan. Empty buffers have none: they hold nothing to alias.
#[derive(Debug)]
pub(crate) struct Access<B: Backend> {
    pub(crate) bytes: Vec<BufferUse<B::Buffer<u8>>>,
    pub(crate) floats: Vec<BufferUse<B::Buffer<f32>>>,
    pub(crate) halves: Vec<BufferUse<B::Buffer<bf16>>>,
    touches: Vec<Touch>,
}

impl<B: Backend> Default for Access<B> {
    fn default() -> Self {
        Self {
            bytes: Vec::new(),
            floats: Vec::new(),
            halves: Vec::new(),
            touches: Vec::new(),
        }
    }
}

/// Where uses of buffers of one type are kept.
pub(crate) trait AccessList: Element {
    fn list<B: Backend>(access: &mut Access<B>) -> &mut Vec<BufferUse<B::Buffer<Self>>>;
}
impl AccessList for u8 {
    fn list<B: Backend>(access: &mut Access<B>) -> &mut Vec<BufferUse<B::Buffer<u8>>> {
        &mut access.bytes
    }
}
impl AccessList for f32 {
    fn list<B: Backend>(access: &mut Access<B>) -> &mut Vec<BufferUse<B::Buffer<f32>>> {
        &mut access.floats
    }
}
impl AccessList for bf16 {
    fn list<B: Backend>(access: &mut Access<B>) -> &mut Vec<BufferUse<B::Buffer<bf16>>> {
        &mut access.halves
    }
}

impl<B: Backend> Access<B> {
    /// Notes a use of `buffer`, which must lie on the device.
    pub(super) fn add<T: AccessList>(
        &mut self,
        backend: &B,
        job: usize,
        what: String,
        buffer: &B::Buffer<T>,
        mode: Mode,
    ) -> Result<(), KernelError> {
        let span = backend.span(buffer);
        if span.is_empty() {
            return Ok(());
        }
        backend.owns(buffer)?;
        self.touches.push(Touch {
            span,
            job,
            what,
            mode,
        });
        T::list(self).push(BufferUse {
            buffer: buffer.clone(),
            mode,
        });
        Ok(())
    }

    /// Checks that memory which is written is not touched otherwise too.
    pub(super) fn check_aliases(&mut self) -> Result<(), KernelError> {
        self.touches.sort_by_key(|touch| touch.span.start);
        // Of each mode, the earlier touch that reaches farthest: it overlaps if any does.
        let mut farthest: [Option<&Touch>; 3] = [None; 3];
        for touch in &self.touches {
            for earlier in farthest.into_iter().flatten() {
                let overlap = touch.span.start < earlier.span.end;
                if overlap && (touch.mode != earlier.mode || touch.mode == Mode::Write) {
                    let (written, other) = match earlier.mode {
                        Mode::Read => (touch, earlier),
                        _ => (earlier, touch),
                    };
                    return Err(KernelError::Aliased {
                        what: written.what.clone(),
                        other: other.job,
                    });
                }
            }
            let slot = &mut farthest[touch.mode as usize];
            if slot.is_none_or(|slot| slot.span.end < touch.span.end) {
                *slot = Some(touch);
            }
        }
        self.touches = Vec::new();
        Ok(())
    }
}
