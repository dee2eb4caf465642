//! [`Gemms`]: the products of a model, marked in its trace.

#![expect(unsafe_code, reason = "passes on addresses")]

use std::sync::Arc;

use lowp_gemm::{CublasLt, GemmDesc, OperandPtr, Scalars, Workspace};
use lowp_kernels::{Cuda, CudaBuffer};

use super::TransformerError;
use super::trace::Trace;

/// The products of a stream.
#[derive(Debug)]
pub(super) struct Gemms {
    of: CublasLt,
    workspace: Workspace,
    trace: Arc<Trace>,
}

impl Gemms {
    pub(super) fn new(
        cuda: &Cuda,
        workspace: CudaBuffer<u8>,
        trace: &Arc<Trace>,
    ) -> Result<Self, TransformerError> {
        let of = CublasLt::new(cuda)?;
        Ok(Self {
            of,
            workspace: workspace.into(),
            trace: Arc::clone(trace),
        })
    }

    /// Gives the stream `out = alpha * left * right + beta * out`.
    ///
    /// # Safety
    /// As [`CublasLt::run`].
    pub(super) unsafe fn run(
        &self,
        desc: &GemmDesc,
        operands: [OperandPtr; 2],
        out: u64,
        scalars: Scalars,
    ) -> Result<(), TransformerError> {
        let workspace = &self.workspace;
        // SAFETY: the caller's promise.
        unsafe { self.of.run(desc, operands, out, 0, scalars, workspace) }?;
        Ok(self.trace.mark(|| desc.describe())?)
    }
}
