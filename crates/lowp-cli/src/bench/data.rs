//! Device memory for the bench: values that are no zeros, and buffers for any recipe.

use anyhow::Result;
use half::bf16;
use lowp_format::{AnyRecipe, Form, Part, Philox, Recipe, ScaleLayout, ScaleSource, Shape, Usage};
use lowp_kernels::{
    AdamMode, AdamwJob, Backend, Cuda, CudaBuffer, Element, EncodeJob, HistoryJob, Moments, Slot,
    Source, Target, TensorInput,
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
    /// Delayed scales.
    scales: CudaBuffer<f32>,
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

    /// An encode of both orientations of tensor `index`, with block scales in `form` where they have
    /// it.
    pub(super) fn encode(
        &self,
        recipe: &AnyRecipe,
        shape: Shape,
        source: Source<Cuda>,
        index: usize,
        form: Form,
    ) -> Result<EncodeJob<Cuda>> {
        let mut targets = Vec::new();
        for spec in recipe.buffers(Usage::BOTH) {
            let first = targets.len();
            if form != Form::Compact && spec.key.part == Part::BlockScale {
                for orientation in spec.key.usage.orientations() {
                    let layout = ScaleLayout::new(&spec, shape, orientation, form)?;
                    let bytes = self.cuda.alloc(layout.bytes())?;
                    targets.push(Target::in_form(spec, form, orientation, bytes));
                }
            }
            if targets.len() == first {
                targets.push(Target::new(spec, self.cuda.alloc(spec.bytes(shape))?));
            }
        }
        Ok(EncodeJob {
            shape,
            kernel: recipe.kernel(),
            source,
            source_rounding: recipe.source_rounding(),
            tensor: self.tensor(recipe, index),
            targets,
            stochastic: None,
        })
    }

    /// What the encode of tensor `index` reads.
    fn tensor(&self, recipe: &AnyRecipe, index: usize) -> Option<TensorInput<Cuda>> {
        let slot = |buffer: &CudaBuffer<f32>| {
            let buffer = buffer.clone();
            Slot { buffer, index }
        };
        let observed = |pow2, epsilon| TensorInput::Observed {
            slot: slot(&self.observed),
            pow2,
            epsilon,
        };
        match recipe.scale_source() {
            ScaleSource::None | ScaleSource::BlockAmax => None,
            ScaleSource::History { .. } => Some(TensorInput::Known(slot(&self.scales))),
            ScaleSource::TensorAmax { pow2, epsilon } => Some(observed(pow2, epsilon)),
            ScaleSource::TensorAndBlockAmax => Some(observed(false, 0.0)),
        }
    }

    /// From the amax of tensor `index` to the scale of its next encode, where that is delayed.
    pub(super) fn history(
        &self,
        recipe: &AnyRecipe,
        index: usize,
    ) -> Result<Option<HistoryJob<Cuda>>> {
        let ScaleSource::History {
            window,
            algorithm,
            margin,
        } = recipe.scale_source()
        else {
            return Ok(None);
        };
        Ok(Some(HistoryJob {
            observed: self.observed.clone(),
            scales: self.scales.clone(),
            index,
            history: self.cuda.alloc(window)?,
            algorithm,
            margin,
            element: recipe.kernel().element,
        }))
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
