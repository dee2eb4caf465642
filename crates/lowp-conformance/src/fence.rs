//! Buffers between fences: bytes around them that no job may change.

use super::rig::Rig;
use lowp_kernels::{Backend, Cpu, Element};

/// A look at what lies around a buffer; fails if it changed.
pub type Fence<'r> = Box<dyn Fn() + 'r>;

/// A backend that can put a buffer into the middle of larger memory.
pub trait Fenced: Backend {
    /// A buffer of `values` and its fence. `shift` varies where it begins.
    fn fenced<'r, T: Element>(
        rig: &'r Rig<Self>,
        values: &[T],
        shift: usize,
    ) -> (Self::Buffer<T>, Fence<'r>);
}

/// On the CPU every access is checked against the buffer itself.
impl Fenced for Cpu {
    fn fenced<'r, T: Element>(
        rig: &'r Rig<Self>,
        values: &[T],
        _: usize,
    ) -> (Self::Buffer<T>, Fence<'r>) {
        (rig.buffer(values), Box::new(|| {}))
    }
}

#[cfg(feature = "cuda")]
mod device {
    use super::{Element, Fence, Fenced, Rig};
    use lowp_kernels::{Cuda, CudaBuffer};

    /// Bytes before and after a buffer.
    const WIDTH: usize = 1024;
    const BYTE: u8 = 0xC3;

    #[expect(
        unsafe_code,
        reason = "puts buffers into the middle of larger device memory"
    )]
    impl Fenced for Cuda {
        fn fenced<'r, T: Element>(
            rig: &'r Rig<Self>,
            values: &[T],
            shift: usize,
        ) -> (CudaBuffer<T>, Fence<'r>) {
            let start = WIDTH + shift % 16 / size_of::<T>() * size_of::<T>();
            let end = start + size_of_val(values);
            let whole = rig.buffer(&vec![BYTE; end + WIDTH]);
            let pointer = whole.pointer() + start as u64;
            // SAFETY: the entries lie within `whole`, which the wrapper keeps alive; all work on both
            // is in the order of one stream.
            let buffer =
                unsafe { CudaBuffer::from_raw(&rig.backend, pointer, values.len(), whole.clone()) };
            let buffer = buffer.unwrap();
            lowp_kernels::Backend::write(&rig.backend, &buffer, 0, values).unwrap();
            let fence = move || {
                let found = rig.content::<u8>(&whole);
                let around = found[..start].iter().chain(&found[end..]);
                let changed = around.filter(|&&byte| byte != BYTE).count();
                assert_eq!(changed, 0, "bytes changed around a buffer");
            };
            (buffer, Box::new(fence))
        }
    }
}
