//! [`Quantized`]: a quantized matrix on a backend, for those who cast one and not a model.

use lowp_format::{AnyRecipe, Orientation, QuantizedTensor, Recipe, Shape, Usage};

use crate::{AmaxJob, Backend, DecodeJob, EncodeJob, HistoryJob, KernelError, Source};
use crate::{TensorInput, Work};

/// A quantized matrix and the backend that holds it. Each call plans its work anew; who casts the same
/// buffers again and again plans [`EncodeJob`]s once.
#[derive(Clone, Debug)]
pub struct Quantized<B: Backend, R: Recipe = AnyRecipe> {
    backend: B,
    tensor: QuantizedTensor<B::Buffer<u8>, R>,
}

impl<B: Backend, R: Recipe> Quantized<B, R> {
    /// Quantizes `values`, a row-major matrix of `shape`, with scales from these values alone, for both
    /// orientations.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, another number of values, or no room.
    pub fn encode(
        backend: &B,
        recipe: R,
        shape: Shape,
        values: &[f32],
    ) -> Result<Self, KernelError> {
        let source = Source::F32(backend.upload(values)?);
        Self::encode_source(backend, recipe, shape, Usage::BOTH, source)
    }

    /// Quantizes `source`, which lies on the backend, for the orientations of `usage`. The rest as
    /// [`Quantized::encode`].
    ///
    /// # Errors
    /// As [`Quantized::encode`].
    pub fn encode_source(
        backend: &B,
        recipe: R,
        shape: Shape,
        usage: Usage,
        source: Source<B>,
    ) -> Result<Self, KernelError> {
        let alloc = |_: &_, bytes| backend.alloc(bytes);
        let tensor = QuantizedTensor::new::<KernelError>(recipe, shape, usage, alloc)?;
        let job = EncodeJob::fill(backend, &tensor, source)?;
        backend.once(Work::Amax(AmaxJob::before(backend, &job)))?;
        // A delayed scale has no history yet: these values begin it.
        if let Some(TensorInput::Known(scale)) = &job.tensor[Orientation::Rowwise as usize] {
            let observed = crate::Slot {
                buffer: backend.alloc(1)?,
                index: scale.index,
            };
            let (source, entry) = (job.source.clone(), observed.clone());
            let amax = AmaxJob::new(&recipe, shape, source, entry);
            backend.once(Work::Amax(vec![amax]))?;
            let scales = scale.buffer.clone();
            let roll = HistoryJob::new(backend, &recipe, observed.buffer, scales, observed.index)?;
            backend.once(Work::History(roll.into_iter().collect()))?;
        }
        backend.once(Work::Encode(vec![job]))?;
        Ok(Self {
            backend: backend.clone(),
            tensor,
        })
    }

    /// The values of the rowwise orientation, row-major.
    ///
    /// # Errors
    /// The matrix was quantized without it, or no room.
    pub fn decode(&self) -> Result<Vec<f32>, KernelError> {
        self.decode_as(Orientation::Rowwise)
    }

    /// The values of `orientation`, row-major.
    ///
    /// # Errors
    /// The matrix was quantized without it, or no room.
    pub fn decode_as(&self, orientation: Orientation) -> Result<Vec<f32>, KernelError> {
        let out = self.backend.alloc(self.tensor.shape().elements())?;
        let job = DecodeJob::new(&self.tensor, orientation, Source::F32(out.clone()))?;
        self.backend.once(Work::Decode(vec![job]))?;
        self.backend.download(&out)
    }

    /// The recipe, the shape and the buffers.
    pub fn tensor(&self) -> &QuantizedTensor<B::Buffer<u8>, R> {
        &self.tensor
    }
}
