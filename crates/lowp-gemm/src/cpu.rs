//! [`CpuProducts`]: products of bf16 matrices on the CPU.

use std::sync::Arc;

use half::bf16;
use lowp_kernels::{Cpu, KernelError};

use crate::GemmError;
use crate::dense::{MatMut, MatRef, matmul};
use crate::products::{Multiplies, ProductJob, Products};

/// Products on at most so many threads, which change no bit of a result.
#[derive(Clone, Copy, Debug)]
pub struct CpuProducts {
    /// How many.
    pub threads: usize,
}

impl Products<Cpu> for CpuProducts {
    fn backend(&self) -> &Cpu {
        &Cpu
    }

    fn workspace_bytes(&self) -> usize {
        0
    }

    fn multiply(&self, job: &ProductJob<Cpu>) -> Result<(), GemmError> {
        job.check(&Cpu)?;
        if job.sizes.contains(&0) {
            return Err(GemmError::Empty { sizes: job.sizes });
        }
        let (job, threads) = (job.clone(), self.threads);
        Ok(Cpu.foreign_work(move || run(&job, threads))?)
    }
}

impl Multiplies for Cpu {
    /// On as many threads as the current rayon pool has.
    fn products(&self) -> Result<Arc<dyn Products<Self>>, GemmError> {
        let threads = rayon::current_num_threads();
        Ok(Arc::new(CpuProducts { threads }))
    }
}

/// Buffers are read and written apart from the products: a thread that waits for others must hold no lock.
fn run(job: &ProductJob<Cpu>, threads: usize) -> Result<(), KernelError> {
    let [rows, cols, k] = job.sizes;
    let widened = |values: &[bf16]| values.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    let left = widened(&job.left.values.read()?);
    let right = widened(&job.right.values.read()?);
    let mut out = match &job.addend {
        Some((beta, values)) => values.read()?.iter().map(|x| beta * x.to_f32()).collect(),
        None => vec![0.0; rows * cols],
    };
    matmul(
        MatMut::new(&mut out, rows, cols),
        job.addend.is_some(),
        job.alpha,
        operand(&left, job.left.transposed, [rows, k]),
        operand(&right, job.right.transposed, [k, cols]),
        threads,
    );
    let mut to = job.out.write()?;
    for (to, x) in to.iter_mut().zip(out) {
        *to = bf16::from_f32(x);
    }
    Ok(())
}

/// A matrix of these sides, stored with them exchanged where it is transposed.
fn operand(values: &[f32], transposed: bool, [rows, cols]: [usize; 2]) -> MatRef<'_> {
    match transposed {
        false => MatRef::new(values, rows, cols),
        true => MatRef::new(values, cols, rows).t(),
    }
}
