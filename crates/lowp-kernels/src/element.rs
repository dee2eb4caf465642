//! [`Element`]: what buffers are made of.

use std::fmt::Debug;

use half::bf16;

mod sealed {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

/// A plain value that buffers are made of: `u8`, `f32` or `bf16`.
pub trait Element:
    Copy + Debug + Default + PartialEq + Send + Sync + sealed::Sealed + 'static
{
}
impl Element for u8 {}
impl Element for f32 {}
impl Element for bf16 {}
