//! [`Element`]: what buffers are made of, and [`FloatDtype`] of high-precision values.

use std::fmt::Debug;

use half::bf16;

mod sealed {
    pub trait Sealed: Sized {
        /// The values as little-endian bytes.
        fn to_bytes(values: &[Self]) -> Vec<u8>;
    }

    impl Sealed for u8 {
        fn to_bytes(values: &[Self]) -> Vec<u8> {
            values.to_vec()
        }
    }

    impl Sealed for f32 {
        fn to_bytes(values: &[Self]) -> Vec<u8> {
            put(values, f32::to_le_bytes)
        }
    }

    impl Sealed for half::bf16 {
        fn to_bytes(values: &[Self]) -> Vec<u8> {
            put(values, half::bf16::to_le_bytes)
        }
    }

    fn put<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        let mut out = vec![0; N * values.len()];
        for (to, value) in out.as_chunks_mut::<N>().0.iter_mut().zip(values) {
            *to = bytes(*value);
        }
        out
    }
}

/// A plain value that buffers are made of: `u8`, `f32` or `bf16`.
pub trait Element:
    bytemuck::Pod + Debug + Default + PartialEq + Send + Sync + sealed::Sealed
{
}
impl Element for u8 {}
impl Element for f32 {}
impl Element for bf16 {}

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
    /// Every dtype.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

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
