//! The activations of [`Ops`]: what they make is stored, or rounded where it is made.

#![expect(
    unsafe_code,
    reason = "launches kernels over addresses of buffers whose lengths were checked"
)]

use half::bf16;
use lowp_kernels::CudaBuffer;

use super::TransformerError;
use super::ops::{Ops, THREADS, int, octets};
use super::place::at;
use crate::params::Arg;

type Values = CudaBuffer<bf16>;
type Done = Result<(), TransformerError>;

/// Rows and columns of what a block rounds.
const ROUNDED_TILE: [usize; 2] = [32, 256];

/// What an activation makes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Made<'a> {
    Values(&'a Values),
    /// What the job at this address rounds them to.
    Rounded(u64),
}

impl Ops {
    /// The GELU of `x`, a matrix of `size`.
    pub(super) fn gelu(&self, x: &Values, y: Made<'_>, size: [usize; 2]) -> Done {
        match y {
            Made::Values(y) => self.octets("gelu_forward", &[x, y], size),
            Made::Rounded(y) => {
                self.rounded("gelu_forward_rounded", &[Arg::Pointer(y)], &[x], size)
            }
        }
    }

    /// Its gradient, which may take the place of `dy`.
    pub(super) fn gelu_backward(
        &self,
        x: &Values,
        dy: &Values,
        dx: Made<'_>,
        size: [usize; 2],
    ) -> Done {
        match dx {
            Made::Values(dx) => self.octets("gelu_backward", &[x, dy, dx], size),
            Made::Rounded(dx) => {
                let dx = [Arg::Pointer(dx)];
                self.rounded("gelu_backward_rounded", &dx, &[x, dy], size)
            }
        }
    }

    /// The SwiGLU of matrices of `size`.
    pub(super) fn swiglu(&self, [gate, up]: [&Values; 2], y: Made<'_>, size: [usize; 2]) -> Done {
        match y {
            Made::Values(y) => self.octets("swiglu_forward", &[gate, up, y], size),
            Made::Rounded(y) => {
                let y = [Arg::Pointer(y)];
                self.rounded("swiglu_forward_rounded", &y, &[gate, up], size)
            }
        }
    }

    /// Its gradients for gate and up.
    pub(super) fn swiglu_backward(
        &self,
        [gate, up]: [&Values; 2],
        dy: &Values,
        made: [Made<'_>; 2],
        size: [usize; 2],
    ) -> Done {
        if let [Made::Values(dgate), Made::Values(dup)] = made {
            return self.octets("swiglu_backward", &[gate, up, dy, dgate, dup], size);
        }
        let len = size[0] * size[1];
        let mut to = Vec::new();
        for made in made {
            to.extend(match made {
                Made::Values(values) => [Arg::Pointer(0), Arg::Pointer(at(values, len)?)],
                Made::Rounded(job) => [Arg::Pointer(job), Arg::Pointer(0)],
            });
        }
        self.rounded("swiglu_backward_rounded", &to, &[gate, up, dy], size)
    }

    /// A kernel that takes a matrix of `size` in each of `buffers`.
    fn octets(&self, name: &'static str, buffers: &[&Values], [tokens, width]: [usize; 2]) -> Done {
        let args = matrices(buffers, tokens * width)?;
        // SAFETY: as in `norm`.
        unsafe { self.launch_each(name, &args, octets(tokens * width)?) }
    }

    /// A kernel that makes what goes `to` jobs and matrices from those of `size` in `buffers`, in tiles.
    fn rounded(
        &self,
        name: &'static str,
        to: &[Arg],
        buffers: &[&Values],
        [tokens, width]: [usize; 2],
    ) -> Done {
        let args = [to, &matrices(buffers, tokens * width)?, &[int(width)?]].concat();
        let [rows, cols] = ROUNDED_TILE;
        let blocks = tokens.div_ceil(rows) * width.div_ceil(cols);
        // SAFETY: as in `norm`; the jobs were planned for matrices of this size, whose rows are a multiple of a tile's, and plans keep them.
        unsafe { self.launch(name, [blocks, 1], [THREADS, 1], &args) }
    }
}

/// The addresses of matrices of `len` values.
fn matrices(buffers: &[&Values], len: usize) -> Result<Vec<Arg>, TransformerError> {
    let address = |buffer: &&Values| Ok(Arg::Pointer(at(buffer, len)?));
    buffers.iter().map(address).collect()
}

#[cfg(test)]
mod tests;
