//! [`Products`]: products of bf16 matrices on any backend.

use std::fmt::Debug;
use std::sync::Arc;

use half::bf16;
use lowp_kernels::{Backend, KernelError};

use crate::GemmError;

/// A row-major matrix that is multiplied.
#[derive(Clone, Debug)]
pub struct Factor<B: Backend> {
    /// Its entries, row-major without gaps.
    pub values: B::Buffer<bf16>,
    /// Whether it is transposed before it is multiplied.
    pub transposed: bool,
}

impl<B: Backend> Factor<B> {
    /// A matrix that is multiplied as it is.
    pub fn new(values: &B::Buffer<bf16>) -> Self {
        Self {
            values: values.clone(),
            transposed: false,
        }
    }

    /// The same matrix, transposed.
    #[must_use]
    pub fn t(self) -> Self {
        Self {
            transposed: !self.transposed,
            ..self
        }
    }
}

/// `out = alpha * left * right + beta * addend`: `[rows, k]` by `[k, cols]`.
///
/// Products and sums are f32, and the result is rounded to bf16 once, to nearest even. The order of a sum over `k` is that of the library:
/// the same in every run of a product of these sizes on one machine, not the same on a CPU and a GPU.
#[derive(Clone, Debug)]
pub struct ProductJob<B: Backend> {
    /// Rows and columns of the result, and the length of the contracted axis.
    pub sizes: [usize; 3],
    /// The left operand, `[rows, k]`; stored as `[k, rows]` where it is transposed.
    pub left: Factor<B>,
    /// The right operand, `[k, cols]`; stored as `[cols, k]` where it is transposed.
    pub right: Factor<B>,
    /// What the product is multiplied by.
    pub alpha: f32,
    /// What is added to it, multiplied by `beta`; it may be an operand, too.
    pub addend: Option<(f32, B::Buffer<bf16>)>,
    /// The result, apart from all that is read.
    pub out: B::Buffer<bf16>,
}

impl<B: Backend> ProductJob<B> {
    /// Checks that buffers have the lengths of their matrices, and that the result is written over nothing that is read.
    pub(crate) fn check(&self, backend: &B) -> Result<(), KernelError> {
        let [rows, cols, k] = self.sizes;
        let out = backend.span::<bf16>(&self.out);
        let read = [
            ("the left operand", &self.left.values, [rows, k]),
            ("the right operand", &self.right.values, [k, cols]),
        ];
        let addend = self.addend.iter();
        let read = read
            .into_iter()
            .chain(addend.map(|(_, values)| ("the addend", values, [rows, cols])));
        for (what, values, sides) in read {
            check_length(backend, what, values, sides)?;
            let span = backend.span::<bf16>(values);
            if span.start < out.end && out.start < span.end {
                let what = format!("{what} of a product");
                return Err(KernelError::Aliased { what, other: 0 });
            }
        }
        check_length(backend, "the result", &self.out, [rows, cols])
    }
}

fn check_length<B: Backend>(
    backend: &B,
    what: &str,
    values: &B::Buffer<bf16>,
    [outer, inner]: [usize; 2],
) -> Result<(), KernelError> {
    backend.owns(values)?;
    let needed = outer.saturating_mul(inner);
    let found = backend.len(values);
    if needed == found {
        return Ok(());
    }
    Err(KernelError::Length {
        what: format!("{what} of a product"),
        needed,
        found,
    })
}

/// Bytes that [`Products`] of a GPU work in.
pub const DEVICE_WORKSPACE: usize = 64 << 20;

/// What multiplies bf16 matrices on the stream of a backend.
pub trait Products<B: Backend>: Debug + Send + Sync {
    /// The stream.
    fn backend(&self) -> &B;

    /// Bytes of the backend that products work in: [`DEVICE_WORKSPACE`] on a GPU, none on a CPU.
    fn workspace_bytes(&self) -> usize;

    /// Gives the stream a product, or the graph that this thread captures.
    ///
    /// # Errors
    /// Buffers of other lengths than the sizes say, a result that shares memory with what is read, or a library that has no kernel or fails.
    fn multiply(&self, job: &ProductJob<B>) -> Result<(), GemmError>;
}

/// A backend on whose streams bf16 matrices are multiplied.
pub trait Multiplies: Backend {
    /// Products on this stream.
    ///
    /// # Errors
    /// No library for them, or no room for their workspace.
    fn products(&self) -> Result<Arc<dyn Products<Self>>, GemmError>;
}
