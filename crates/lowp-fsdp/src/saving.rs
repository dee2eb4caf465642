//! [`Saving`]: copies of what a rank holds, made beside the next step.

use lowp_kernels::{Backend, KernelError};

/// A stream of copies to the host. Training goes on while they are made; the next step, which
/// changes what is copied, follows them.
#[derive(Debug)]
pub(crate) struct Saving<B: Backend> {
    stream: B,
    /// The point after the copies that the next step must follow.
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

    /// Lets `copies` be given to the stream after what `backend` was given so far.
    pub(crate) fn begin<T, E: From<KernelError>>(
        &mut self,
        backend: &B,
        copies: impl FnOnce(&B) -> Result<T, E>,
    ) -> Result<T, E> {
        self.stream.wait_for(backend)?;
        let made = copies(&self.stream);
        // Where one failed, the next step must follow the ones before it.
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
