//! [`Matmuls`]: the products of a model, marked in its trace.

#![expect(unsafe_code, reason = "passes on addresses")]

use std::sync::Arc;

use lowp_kernels::Cuda;
pub(super) use lowp_gemm::{Dtype, Factors, Place, Product, Scale, Side};
use lowp_gemm::{WORKSPACE, Workspace};

use super::TransformerError;
use super::place::Arena;
use super::trace::Trace;

/// The products of a stream.
#[derive(Debug)]
pub(super) struct Matmuls {
    of: lowp_gemm::Matmuls,
    workspace: Workspace,
    trace: Arc<Trace>,
}

impl Matmuls {
    pub(super) fn new(
        cuda: &Cuda,
        arena: &Arena,
        trace: &Arc<Trace>,
    ) -> Result<Self, TransformerError> {
        let of = lowp_gemm::Matmuls::new(cuda)?;
        Ok(Self {
            of,
            workspace: arena.own(WORKSPACE)?.into(),
            trace: Arc::clone(trace),
        })
    }

    /// Gives the stream `out = alpha * left * right + beta * out`.
    ///
    /// # Safety
    /// As [`lowp_gemm::Matmuls::run`].
    pub(super) unsafe fn run(
        &self,
        product: &Product,
        places: [Place; 2],
        out: u64,
        factors: impl Into<Factors>,
    ) -> Result<(), TransformerError> {
        let (factors, workspace) = (factors.into(), &self.workspace);
        // SAFETY: the caller's promise.
        unsafe { self.of.run(product, places, out, 0, factors, workspace) }?;
        Ok(self.trace.mark(|| product.describe())?)
    }
}
