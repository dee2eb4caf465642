//! [`CudaProducts`]: products of bf16 matrices on a GPU, by cuBLASLt.

#![expect(
    unsafe_code,
    reason = "gives cuBLASLt the addresses of buffers that were checked"
)]

use std::sync::Arc;

use lowp_kernels::{Backend, Cuda, KernelError};

use crate::products::{Factor, Multiplies, ProductJob, Products};
use crate::{CublasLt, Dtype, GemmDesc, GemmError, OperandDesc, OperandPtr, Scalars, Workspace};

/// Products on the stream of a handle, with their workspace.
#[derive(Debug)]
pub struct CudaProducts {
    cuda: Cuda,
    cublaslt: CublasLt,
    workspace: Workspace,
}

impl CudaProducts {
    /// Products on the stream of `cuda`.
    ///
    /// # Errors
    /// No cuBLASLt, or no room for the workspace.
    pub fn new(cuda: &Cuda) -> Result<Self, GemmError> {
        Ok(Self {
            cuda: cuda.clone(),
            cublaslt: CublasLt::new(cuda)?.with_f32_sums(),
            workspace: Workspace::from(cuda.alloc(Workspace::BYTES)?),
        })
    }
}

impl Products<Cuda> for CudaProducts {
    fn backend(&self) -> &Cuda {
        &self.cuda
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace.bytes
    }

    fn multiply(&self, job: &ProductJob<Cuda>) -> Result<(), GemmError> {
        job.check(&self.cuda)?;
        let [rows, cols, k] = job.sizes;
        if [rows, cols, k].contains(&0) {
            return Err(GemmError::Empty { sizes: job.sizes });
        }
        let operand = |k_inner| OperandDesc::plain(Dtype::Bf16, k_inner);
        let operands = [operand(!job.left.transposed), operand(job.right.transposed)];
        let desc = GemmDesc::new(job.sizes, operands, Dtype::Bf16);
        let pointer = |of: &Factor<Cuda>| OperandPtr::values(of.values.pointer());
        let (beta, addend) = match &job.addend {
            Some((beta, values)) => (*beta, values.pointer()),
            None => (0.0, job.out.pointer()),
        };
        let scalars = Scalars::Host {
            alpha: job.alpha,
            beta,
        };
        // A graph keeps the buffers.
        self.cuda
            .foreign_work(|| job.clone(), |_| Ok::<_, KernelError>(()))?;
        let (operands, out) = ([pointer(&job.left), pointer(&job.right)], job.out.pointer());
        // SAFETY: the buffers have the lengths that the description says, and lie on this device. They are freed after the work of all streams.
        unsafe {
            self.cublaslt
                .run_adding(&desc, operands, addend, out, 0, scalars, &self.workspace)
        }
    }
}

impl Multiplies for Cuda {
    fn products(&self) -> Result<Arc<dyn Products<Self>>, GemmError> {
        Ok(Arc::new(CudaProducts::new(self)?))
    }
}
