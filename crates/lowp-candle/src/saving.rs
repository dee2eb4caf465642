//! [`Saving`]: copies of what a rank holds, made beside the next step.

use lowp_kernels::{Backend, Element, KernelError, Pending};

/// A stream of copies to the host. Training goes on while they are made; the next step, which
/// changes what is copied, follows them.
#[derive(Debug)]
pub(crate) struct Saving<B: Backend> {
    stream: B,
    /// Behind the copies that the next step must follow.
    copied: Option<B::Event>,
}

impl<B: Backend> Saving<B> {
    /// A stream beside `backend`.
    pub(crate) fn new(backend: &B) -> Result<Self, KernelError> {
        Ok(Self {
            stream: backend.fork()?,
            copied: None,
        })
    }

    /// Lets `copies` be given to the stream behind what `backend` was given so far.
    pub(crate) fn begin<T, E: From<KernelError>>(
        &mut self,
        backend: &B,
        copies: impl FnOnce(&Copies<'_, B>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.stream.wait_for(backend)?;
        let made = copies(&Copies {
            stream: &self.stream,
        });
        // Also behind those before one that failed.
        self.copied = Some(self.stream.record()?);
        made
    }

    /// Makes later work of `backend` follow the copies.
    pub(crate) fn follow(&mut self, backend: &B) -> Result<(), KernelError> {
        match self.copied.take() {
            Some(copied) => backend.wait(&copied),
            None => Ok(()),
        }
    }
}

/// Where copies are given.
#[derive(Debug)]
pub(crate) struct Copies<'a, B: Backend> {
    pub(crate) stream: &'a B,
}

impl<B: Backend> Copies<'_, B> {
    /// Entries `range` of `buffer` as bytes.
    pub(crate) fn bytes<T: Element>(
        &self,
        buffer: &B::Buffer<T>,
        range: std::ops::Range<usize>,
    ) -> Result<Pending<u8>, KernelError> {
        self.stream.start_read_bytes(buffer, range)
    }
}
