//! Device memory for the bench: values that are no zeros, and buffers for any recipe.

use anyhow::Result;
use half::bf16;
use lowp_format::{AnyRecipe, BufferSpec, Philox, Recipe, ScaleSource, Shape, Usage};
use lowp_kernels::{
    AdamMode, AdamwJob, Backend, Cuda, CudaBuffer, Element, EncodeJob, Moments, ScaleJob, Slot,
    Source, Target,
};

/// Values that are drawn; longer buffers repeat them.
const NOISE: usize = 1 << 22;

/// A supply of device buffers, with the bytes that a run must move.
pub(super) struct Supply<'c> {
    pub(super) cuda: &'c Cuda,
    floats: CudaBuffer<f32>,
    halves: CudaBuffer<bf16>,
    /// What amax jobs raise, one entry per tensor.
    pub(super) observed: CudaBuffer<f32>,
    /// What encoding reads.
    pub(super) scales: CudaBuffer<f32>,
}

impl<'c> Supply<'c> {
    /// A supply for `tensors` tensors.
    pub(super) fn new(cuda: &'c Cuda, tensors: usize) -> Result<Self> {
        let random = Philox::new(7, 0);
        let value = |i: u64| {
            let word = random.block(i / 4)[(i % 4) as usize];
            // Uniform in -0.04 .. 0.04, as weights are about.
            (f32::from_bits(0x3F80_0000 | word >> 9) - 1.5) * 0.08
        };
        let values: Vec<f32> = (0..NOISE as u64).map(value).collect();
        let halves: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        Ok(Self {
            cuda,
            floats: cuda.upload(&values)?,
            halves: cuda.upload(&halves)?,
            observed: cuda.alloc(tensors)?,
            scales: cuda.upload(&vec![1.0f32; tensors])?,
        })
    }

    fn noise<T: Element>(&self, from: &CudaBuffer<T>, len: usize) -> Result<CudaBuffer<T>> {
        let buffer = self.cuda.alloc(len)?;
        for start in (0..len).step_by(NOISE) {
            let count = NOISE.min(len - start);
            self.cuda.copy::<T>(from, 0..count, &buffer, start)?;
        }
        Ok(buffer)
    }

    /// f32 values.
    pub(super) fn floats(&self, len: usize) -> Result<CudaBuffer<f32>> {
        self.noise(&self.floats, len)
    }

    /// bf16 values.
    pub(super) fn halves(&self, len: usize) -> Result<CudaBuffer<bf16>> {
        self.noise(&self.halves, len)
    }

    /// Bytes that are no zeros.
    pub(super) fn bytes(&self, len: usize) -> Result<CudaBuffer<u8>> {
        let random = Philox::new(8, 0);
        let noise: Vec<u8> = (0..NOISE as u64).map(|i| random.byte(i)).collect();
        self.noise(&self.cuda.upload(&noise)?, len)
    }

    /// An encode of both orientations of tensor `index`.
    pub(super) fn encode(
        &self,
        recipe: &AnyRecipe,
        shape: Shape,
        source: Source<Cuda>,
        index: usize,
    ) -> Result<EncodeJob<Cuda>> {
        let target = |spec: BufferSpec| {
            let bytes = self.cuda.alloc(spec.bytes(shape))?;
            Ok(Target { spec, bytes })
        };
        let targets = recipe.buffers(Usage::BOTH).into_iter().map(target);
        let targets = targets.collect::<Result<_>>()?;
        let tensor = recipe.scale_source().observes_tensor_amax().then(|| Slot {
            buffer: self.scales.clone(),
            index,
        });
        Ok(EncodeJob {
            shape,
            kernel: recipe.kernel(),
            source,
            source_rounding: recipe.source_rounding(),
            tensor,
            targets,
            stochastic: None,
        })
    }

    /// From the amax of tensor `index` to what its encode reads.
    pub(super) fn scale(&self, recipe: &AnyRecipe, index: usize) -> Result<ScaleJob<Cuda>> {
        let rule = recipe.scale_source();
        let history = match rule {
            ScaleSource::History { window, .. } => Some(self.cuda.alloc(window)?),
            _ => None,
        };
        Ok(ScaleJob {
            observed: self.observed.clone(),
            scales: self.scales.clone(),
            index,
            history,
            rule,
            element: recipe.kernel().element,
        })
    }

    /// A step with f32 state and a bf16 gradient, without an encode.
    pub(super) fn adamw(&self, shape: Shape) -> Result<AdamwJob<Cuda>> {
        let len = shape.elements();
        Ok(AdamwJob {
            master: self.floats(len)?,
            moments: Moments::F32 {
                exp_avg: self.cuda.alloc(len)?,
                exp_avg_sq: self.cuda.alloc(len)?,
            },
            grad: Source::Bf16(self.halves(len)?),
            group: 0,
            mode: AdamMode::AdamW,
            source_rounding: lowp_format::SourceRounding::F32,
            amax: None,
            encode: None,
        })
    }
}

/// Bytes of all targets.
pub(super) fn target_bytes(job: &EncodeJob<Cuda>) -> usize {
    job.targets.iter().map(|target| target.bytes.len()).sum()
}
