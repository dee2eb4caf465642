//! [`Source`]: high-precision values in a buffer, and their dtype.

use std::ops::Range;

use half::bf16;

use crate::{Backend, KernelError};

/// Storage of high-precision values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FloatDtype {
    /// binary32.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
}

impl FloatDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            FloatDtype::F32 => 4,
            FloatDtype::Bf16 => 2,
        }
    }

    /// `f32` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            FloatDtype::F32 => "f32",
            FloatDtype::Bf16 => "bf16",
        }
    }
}

/// High-precision values: what casts read, and what decodes write.
#[derive(Clone, Debug)]
pub enum Source<B: Backend> {
    /// binary32 values.
    F32(B::Buffer<f32>),
    /// bfloat16 values: widened exactly where they are read, rounded to nearest even where they are written.
    Bf16(B::Buffer<bf16>),
}

impl<B: Backend> Source<B> {
    /// `len` zeros of `dtype`.
    ///
    /// # Errors
    /// The device has no room.
    pub fn alloc(backend: &B, dtype: FloatDtype, len: usize) -> Result<Self, KernelError> {
        Ok(match dtype {
            FloatDtype::F32 => Source::F32(backend.alloc(len)?),
            FloatDtype::Bf16 => Source::Bf16(backend.alloc(len)?),
        })
    }

    /// What the values are stored as.
    pub fn dtype(&self) -> FloatDtype {
        match self {
            Source::F32(_) => FloatDtype::F32,
            Source::Bf16(_) => FloatDtype::Bf16,
        }
    }

    /// Number of values.
    pub fn len(&self, backend: &B) -> usize {
        match self {
            Source::F32(buffer) => backend.len(buffer),
            Source::Bf16(buffer) => backend.len(buffer),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self, backend: &B) -> bool {
        self.len(backend) == 0
    }

    /// The addresses of the memory, as [`Backend::span`].
    pub fn span(&self, backend: &B) -> Range<usize> {
        match self {
            Source::F32(buffer) => backend.span(buffer),
            Source::Bf16(buffer) => backend.span(buffer),
        }
    }

    /// Values `range` as a source of their own, which shares the memory.
    ///
    /// # Errors
    /// The range lies outside.
    pub fn view(&self, backend: &B, range: Range<usize>) -> Result<Self, KernelError> {
        Ok(match self {
            Source::F32(buffer) => Source::F32(backend.view(buffer, range)?),
            Source::Bf16(buffer) => Source::Bf16(backend.view(buffer, range)?),
        })
    }

    /// Checks that the values lie on the device of `backend`.
    ///
    /// # Errors
    /// They lie on another one.
    pub fn owned_by(&self, backend: &B) -> Result<(), KernelError> {
        match self {
            Source::F32(buffer) => backend.owns(buffer),
            Source::Bf16(buffer) => backend.owns(buffer),
        }
    }

    /// Copies values from `start` on to the host, widened.
    ///
    /// # Errors
    /// The range lies outside.
    pub fn read(&self, backend: &B, start: usize, values: &mut [f32]) -> Result<(), KernelError> {
        match self {
            Source::F32(buffer) => backend.read(buffer, start, values),
            Source::Bf16(buffer) => {
                let mut narrow = vec![bf16::ZERO; values.len()];
                backend.read(buffer, start, &mut narrow)?;
                let widened = narrow.iter().map(|x| x.to_f32());
                values.iter_mut().zip(widened).for_each(|(to, x)| *to = x);
                Ok(())
            }
        }
    }

    /// Copies host values into the buffer from `start` on, rounded to its dtype (to nearest even).
    ///
    /// # Errors
    /// The range lies outside.
    pub fn write(&self, backend: &B, start: usize, values: &[f32]) -> Result<(), KernelError> {
        match self {
            Source::F32(buffer) => backend.write(buffer, start, values),
            Source::Bf16(buffer) => {
                let narrow: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                backend.write(buffer, start, &narrow)
            }
        }
    }
}
