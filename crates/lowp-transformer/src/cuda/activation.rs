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

/// Rows and columns of what a block of threads makes and casts.
const TILE: [usize; 2] = [32, 256];

/// What becomes of a matrix that an activation makes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Made<'a> {
    /// It is stored.
    Values(&'a Values),
    /// The same, and its amaxes go where the job at this address says.
    Observed(&'a Values, u64),
    /// It is rounded, as the job at this address says.
    Rounded(u64),
}

impl Ops {
    /// The GELU of `x`, a matrix of `size`.
    pub(super) fn gelu(&self, x: &Values, y: Made<'_>, size: [usize; 2]) -> Done {
        let names = ["gelu_forward", "gelu_forward_cast"];
        self.activate(names, &[x], &[y], &[], size)
    }

    /// Its gradient, which may take the place of `dy`. With `again` what forward made is made again and rounded, as the job there says.
    pub(super) fn gelu_backward(
        &self,
        x: &Values,
        dy: &Values,
        dx: Made<'_>,
        again: Option<u64>,
        size: [usize; 2],
    ) -> Done {
        let names = ["gelu_backward", "gelu_backward_cast"];
        self.activate(names, &[x, dy], &[dx], &[again], size)
    }

    /// The SwiGLU of matrices of `size`.
    pub(super) fn swiglu(&self, gate: &Values, up: &Values, y: Made<'_>, size: [usize; 2]) -> Done {
        let names = ["swiglu_forward", "swiglu_forward_cast"];
        self.activate(names, &[gate, up], &[y], &[], size)
    }

    /// Its gradients for gate and up, and what forward made as in [`Ops::gelu_backward`].
    pub(super) fn swiglu_backward(
        &self,
        gate: &Values,
        up: &Values,
        dy: &Values,
        made: [Made<'_>; 2],
        again: Option<u64>,
        size: [usize; 2],
    ) -> Done {
        let names = ["swiglu_backward", "swiglu_backward_cast"];
        self.activate(names, &[gate, up, dy], &made, &[again], size)
    }

    /// What is `made` of matrices of `size`, by the first kernel where all of it is only stored, else by the second; and what `again` is of.
    fn activate(
        &self,
        [stored, cast]: [&'static str; 2],
        read: &[&Values],
        made: &[Made<'_>],
        again: &[Option<u64>],
        [tokens, width]: [usize; 2],
    ) -> Done {
        let address = |values: &Values| Ok(Arg::Pointer(at(values, tokens * width)?));
        let read = read.iter().map(|values| address(values));
        let read = read.collect::<Result<Vec<_>, TransformerError>>()?;
        let once = again.iter().all(Option::is_none);
        if once && made.iter().all(|made| matches!(made, Made::Values(_))) {
            let mut args = read;
            for made in made {
                if let Made::Values(values) = made {
                    args.push(address(values)?);
                }
            }
            // SAFETY: buffers as long as the kernel takes them to be.
            return unsafe { self.launch_each(stored, &args, octets(tokens * width)?) };
        }
        let [rows, cols] = TILE;
        if !tokens.is_multiple_of(rows) || !width.is_multiple_of(8) {
            return Err(TransformerError::Unsupported(format!(
                "an activation of {tokens} x {width} that is cast; take a multiple of {rows} x 8"
            )));
        }
        let mut args = Vec::new();
        for made in made {
            let none = Arg::Pointer(0);
            args.extend(match made {
                Made::Values(values) => [address(values)?, none, none],
                Made::Observed(values, job) => [address(values)?, none, Arg::Pointer(*job)],
                Made::Rounded(job) => [none, Arg::Pointer(*job), none],
            });
        }
        args.extend(again.iter().map(|job| Arg::Pointer(job.unwrap_or(0))));
        args.extend(read);
        args.push(int(width)?);
        let blocks = tokens / rows * width.div_ceil(cols);
        // SAFETY: as above; the jobs are those of plans over matrices of this size, which their owner keeps.
        unsafe { self.launch(cast, [blocks, 1], [THREADS, 1], &args) }
    }
}

#[cfg(test)]
mod tests;
