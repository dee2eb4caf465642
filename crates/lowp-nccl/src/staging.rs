//! [`Staging`]: memory of a device between what arrives and the sums. All batches use it one after the other, on one stream.

use std::ops::Range;

use lowp_comm::ReduceStaging;
use lowp_kernels::{
    Backend, Cuda, CudaBuffer, CudaPlan, FloatDtype, KernelError, Source, SumJob, Work,
};

/// Graphs keep what it was when they were captured.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    /// Parts that arrive, by dtype.
    pub(crate) arrivals: [Option<Source<Cuda>>; 2],
    /// Gradients in the dtype of the wire.
    pub(crate) narrow: Option<Source<Cuda>>,
    /// Sums that are added to others.
    added: Option<Source<Cuda>>,
    /// Sums of even parts, on their way to the ranks that own uneven ones.
    passed_on: Option<Source<Cuda>>,
}

/// Where sums arrive.
pub(crate) struct Arrivals {
    /// By gradient: its own, or memory of sums that are added to earlier ones.
    pub(crate) into: Vec<CudaBuffer<f32>>,
    /// What adds those; none where there are none.
    pub(crate) add: Option<CudaPlan>,
}

impl Staging {
    /// Makes room for `needed`. Whether it moved: plans over what it was are of no use.
    pub(crate) fn hold(&mut self, cuda: &Cuda, needed: ReduceStaging) -> Result<bool, KernelError> {
        let [wide, narrow] = needed.arrivals;
        let [arrive_wide, arrive_narrow] = &mut self.arrivals;
        let mut moved = false;
        for (place, dtype, len) in [
            (arrive_wide, FloatDtype::F32, wide),
            (arrive_narrow, FloatDtype::Bf16, narrow),
            (&mut self.narrow, FloatDtype::Bf16, needed.narrow),
            (&mut self.added, FloatDtype::F32, needed.added),
            (&mut self.passed_on, FloatDtype::F32, needed.passed_on),
        ] {
            let has = place.as_ref().map_or(0, |memory| memory.len(cuda));
            if has < len {
                *place = Some(Source::alloc(cuda, dtype, len)?);
                moved = true;
            }
        }
        Ok(moved)
    }

    /// These elements of a memory that holds them.
    pub(crate) fn view(
        cuda: &Cuda,
        memory: Option<&Source<Cuda>>,
        dtype: FloatDtype,
        elements: Range<usize>,
    ) -> Result<Source<Cuda>, KernelError> {
        match memory {
            Some(memory) => memory.view(cuda, elements),
            None => Source::alloc(cuda, dtype, 0),
        }
    }

    /// Memory for sums of even parts and of the elements after them, of these lengths.
    pub(crate) fn passed_on(
        &self,
        cuda: &Cuda,
        lens: impl Iterator<Item = [usize; 2]>,
    ) -> Result<Vec<[CudaBuffer<f32>; 2]>, KernelError> {
        let mut start = 0;
        let mut place = |len: usize| {
            let view = start..start + len;
            start += ReduceStaging::of_run(len, 0).passed_on;
            f32_view(cuda, self.passed_on.as_ref(), view)
        };
        lens.map(|[part, rest]| Ok([place(part)?, place(rest)?]))
            .collect()
    }

    /// Where the sums of gradients arrive whose own places are `outs`, each with whether its sum is added to what is there.
    pub(crate) fn arrivals<'a>(
        &self,
        cuda: &Cuda,
        outs: impl Iterator<Item = (&'a CudaBuffer<f32>, bool)>,
    ) -> Result<Arrivals, KernelError> {
        let (mut into, mut jobs, mut start) = (vec![], vec![], 0);
        for (out, accumulate) in outs {
            if !accumulate {
                into.push(out.clone());
                continue;
            }
            let sum = f32_view(cuda, self.added.as_ref(), start..start + out.len())?;
            start += ReduceStaging::of_sums(out.len()).added;
            let [from, out] = [&sum, out].map(|values| Source::F32(values.clone()));
            jobs.push(SumJob { from, into: out });
            into.push(sum);
        }
        let add = (!jobs.is_empty()).then(|| cuda.plan(Work::Sum(jobs)));
        Ok(Arrivals {
            into,
            add: add.transpose()?,
        })
    }
}

fn f32_view(
    cuda: &Cuda,
    memory: Option<&Source<Cuda>>,
    elements: Range<usize>,
) -> Result<CudaBuffer<f32>, KernelError> {
    match memory {
        Some(Source::F32(memory)) => cuda.view(memory, elements),
        _ => cuda.alloc(0),
    }
}
