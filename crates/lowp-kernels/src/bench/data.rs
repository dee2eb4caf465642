//! Device memory for the bench: values that are no zeros, and buffers for any recipe.

use std::cell::Cell;

use half::bf16;
use lowp_format::{Form, Part, Philox, Quantizers, ScaleLayout, Shape, SourceRounding, Usage};

use super::Result;
use super::cases::Stored;
use crate::from_recipe::by_orientation;
use crate::{
    Backend, Cuda, CudaBuffer, Element, EncodeJob, Master, MasterDtype, Rule, Slot, Source,
    StateName, Target, TensorInput, UpdateJob, UpdateRandom,
};

/// Values that are drawn; longer buffers repeat them.
const NOISE: usize = 1 << 22;

/// A supply of device buffers, with the bytes that a run must move.
pub(super) struct Supply<'c> {
    pub(super) cuda: &'c Cuda,
    floats: CudaBuffer<f32>,
    halves: CudaBuffer<bf16>,
    bytes: CudaBuffer<u8>,
    /// What amax jobs raise: of tensors and lines.
    pub(super) observed: CudaBuffer<f32>,
    /// Delayed scales.
    pub(super) scales: CudaBuffer<f32>,
    /// Entries that tensors of this run have.
    used: Cell<usize>,
}

impl<'c> Supply<'c> {
    /// A supply for `tensors` tensors of `shape`.
    pub(super) fn new(cuda: &'c Cuda, tensors: usize, shape: Shape) -> Result<Self> {
        // An amax of the tensor for each orientation, or of each row and each column.
        let entries = tensors * (shape.rows + shape.cols).max(2);
        let random = Philox::new(7, 0);
        let value = |i: u64| {
            let word = random.block(i / 4)[(i % 4) as usize];
            // Uniform in -0.04 .. 0.04, as weights are about.
            (f32::from_bits(0x3F80_0000 | word >> 9) - 1.5) * 0.08
        };
        let values: Vec<f32> = (0..NOISE as u64).map(value).collect();
        let halves: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        let random = Philox::new(8, 0);
        let bytes: Vec<u8> = (0..NOISE as u64).map(|i| random.byte(i)).collect();
        Ok(Self {
            cuda,
            floats: cuda.upload(&values)?,
            halves: cuda.upload(&halves)?,
            bytes: cuda.upload(&bytes)?,
            observed: cuda.alloc(entries)?,
            scales: cuda.upload(&vec![1.0f32; entries])?,
            used: Cell::new(0),
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
        self.noise(&self.bytes, len)
    }

    /// An encode of `usage` as `quantizers` say, with block scales in `form` where they have it.
    pub(super) fn encode(
        &self,
        quantizers: &Quantizers,
        shape: Shape,
        usage: Usage,
        source: Source<Cuda>,
        form: Form,
    ) -> Result<EncodeJob<Cuda>> {
        let mut targets = Vec::new();
        for spec in quantizers.buffers(usage) {
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
            kernels: quantizers.kernels(),
            source,
            source_rounding: SourceRounding::F32,
            tensor: self.tensor(quantizers, shape, usage),
            targets,
            stochastic: None,
        })
    }

    /// What an encode of one more tensor reads of the tensor or its lines.
    pub(super) fn tensor(
        &self,
        quantizers: &Quantizers,
        shape: Shape,
        usage: Usage,
    ) -> [Option<TensorInput<Cuda>>; 2] {
        by_orientation(quantizers, shape, usage, |known, count| {
            let index = self.used.get();
            self.used.set(index + count);
            let slot = |buffer: &CudaBuffer<f32>| {
                let buffer = buffer.clone();
                Slot { buffer, index }
            };
            match known {
                true => TensorInput::Known(slot(&self.scales)),
                false => TensorInput::Observed(slot(&self.observed)),
            }
        })
    }

    /// Begins another run: its tensors have the entries of those before.
    pub(super) fn begin(&self) {
        self.used.set(0);
    }

    /// A step with a bf16 gradient, without an encode.
    pub(super) fn adamw(&self, shape: Shape, stored: Stored) -> Result<UpdateJob<Cuda>> {
        let len = shape.elements();
        let [exp_avg, exp_avg_sq] = stored.moments;
        let dtype = |state| match state {
            StateName::ExpAvgSq => exp_avg_sq,
            _ => exp_avg,
        };
        let rule = Rule::AdamW;
        Ok(UpdateJob {
            rule,
            master: match stored.master {
                MasterDtype::F32 => Source::F32(self.floats(len)?).into(),
                MasterDtype::Bf16 => Source::Bf16(self.halves(len)?).into(),
                MasterDtype::Bf16Plus16 => Master::Bf16Plus16 {
                    parameter: self.cuda.alloc(2 * len)?,
                    remainder: self.bytes(2 * len)?,
                },
            },
            states: rule.alloc(self.cuda, dtype, len)?,
            grad: Source::Bf16(self.halves(len)?),
            group: 0,
            random: Some(UpdateRandom {
                seed: 7,
                stream: 1 << 63,
                tiles: None,
                first: 0,
            }),
            source_rounding: SourceRounding::F32,
            amax: None,
            encode: None,
        })
    }
}

/// Bytes of all targets.
pub(super) fn target_bytes(targets: &[Target<Cuda>]) -> usize {
    targets.iter().map(|target| target.bytes.len()).sum()
}
