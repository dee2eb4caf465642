//! Jobs from a recipe: what a recipe answers (buffers, ingredients, rounding, what scales depend on)
//! becomes the fields of a job. A backend sees the job only.

use lowp_format::{
    Form, FormatError, Orientation, Part, QuantizedTensor, Recipe, ScaleLayout, ScaleSource, Shape,
    SourceRounding, Usage,
};

use crate::check::target::touched;
use crate::{
    AdamMode, AdamwJob, AmaxJob, Backend, BlockAmax, DecodeJob, EncodeJob, FlatBlocks,
    FlatEncodeJob, HistoryJob, KernelError, Moments, Slot, Source, Target, TensorInput,
};

/// What an encode reads of its tensor, in an entry of its own: an amax of 0, or a delayed scale of 1.
fn tensor_input<B: Backend>(
    backend: &B,
    scale_source: ScaleSource,
) -> Result<Option<TensorInput<B>>, KernelError> {
    let slot = |value: f32| -> Result<Slot<B>, KernelError> {
        let buffer = backend.upload(&[value])?;
        Ok(Slot { buffer, index: 0 })
    };
    Ok(match scale_source {
        ScaleSource::None | ScaleSource::BlockAmax => None,
        ScaleSource::History { .. } => Some(TensorInput::Known(slot(1.0)?)),
        ScaleSource::TensorAmax { pow2, epsilon } => Some(TensorInput::Observed {
            slot: slot(0.0)?,
            pow2,
            epsilon,
        }),
        ScaleSource::TensorAndBlockAmax => Some(TensorInput::Observed {
            slot: slot(0.0)?,
            pow2: false,
            epsilon: 0.0,
        }),
    })
}

impl<B: Backend> EncodeJob<B> {
    /// An encode of `source`, a matrix of `shape`, into new buffers: all that `recipe` has for `usage`.
    ///
    /// Where the scale depends on the tensor, [`EncodeJob::tensor`] is a new entry: the amax, which
    /// [`AmaxJob::before`] raises, or the delayed scale, which begins as 1 and which a [`HistoryJob`] moves.
    /// Tensors that share a vector of entries set the field to theirs.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, or no room.
    pub fn new<R: Recipe>(
        backend: &B,
        recipe: &R,
        shape: Shape,
        usage: Usage,
        source: Source<B>,
    ) -> Result<Self, KernelError> {
        let alloc = |_: &_, bytes| backend.alloc(bytes);
        let tensor = QuantizedTensor::new::<KernelError>(*recipe, shape, usage, alloc)?;
        Self::fill(backend, &tensor, source)
    }

    /// An encode of `source` into the buffers of `tensor`. The rest as [`EncodeJob::new`].
    ///
    /// # Errors
    /// No room.
    pub fn fill<R: Recipe>(
        backend: &B,
        tensor: &QuantizedTensor<B::Buffer<u8>, R>,
        source: Source<B>,
    ) -> Result<Self, KernelError> {
        let recipe = tensor.recipe();
        let target = |b: &lowp_format::Buffer<_>| Target::new(b.spec, B::Buffer::clone(&b.storage));
        Ok(Self {
            shape: tensor.shape(),
            kernel: recipe.kernel(),
            source,
            source_rounding: recipe.source_rounding(),
            tensor: tensor_input(backend, recipe.scale_source())?,
            targets: tensor.buffers().iter().map(target).collect(),
            stochastic: None,
        })
    }

    /// The same with its block scales in `form`, in new buffers: one for each orientation that a buffer of
    /// the recipe serves.
    ///
    /// # Errors
    /// Scales that have no such form, or no room.
    pub fn with_scales_in(mut self, backend: &B, form: Form) -> Result<Self, KernelError> {
        let mut targets = Vec::new();
        for target in self.targets {
            let spec = target.spec;
            if spec.key.part != Part::BlockScale {
                targets.push(target);
                continue;
            }
            for orientation in spec.key.usage.orientations() {
                let layout = ScaleLayout::new(&spec, self.shape, orientation, form)?;
                let bytes = backend.alloc(layout.bytes())?;
                targets.push(Target::in_form(spec, form, orientation, bytes));
            }
        }
        self.targets = targets;
        Ok(self)
    }
}

impl<B: Backend> AmaxJob<B> {
    /// Raises `entry` to the amax of `source`, a whole matrix of `shape` that `recipe` quantizes.
    pub fn new<R: Recipe>(recipe: &R, shape: Shape, source: Source<B>, entry: Slot<B>) -> Self {
        Self {
            shape,
            start: 0,
            source,
            source_rounding: recipe.source_rounding(),
            out: entry.buffer,
            tensor: Some(entry.index),
            blocks: Vec::new(),
        }
    }

    /// The amax that `encode` makes its scale of; `None` where it waits for none.
    pub fn before(encode: &EncodeJob<B>) -> Option<Self> {
        let Some(TensorInput::Observed { slot, .. }) = &encode.tensor else {
            return None;
        };
        Some(Self {
            shape: encode.shape,
            start: 0,
            source: encode.source.clone(),
            source_rounding: encode.source_rounding,
            out: slot.buffer.clone(),
            tensor: Some(slot.index),
            blocks: Vec::new(),
        })
    }

    /// The amaxes that `encode` takes as agreed: of the tensor into its vector, then of blocks into theirs.
    /// Empty where it waits for none.
    pub fn before_flat(encode: &FlatEncodeJob<B>) -> Vec<Self> {
        let job = |out: &B::Buffer<f32>, tensor, blocks| Self {
            shape: encode.shape,
            start: encode.start,
            source: encode.source.clone(),
            source_rounding: encode.source_rounding,
            out: out.clone(),
            tensor,
            blocks,
        };
        let mut jobs = Vec::new();
        if let Some(TensorInput::Observed { slot, .. }) = &encode.tensor {
            jobs.push(job(&slot.buffer, Some(slot.index), Vec::new()));
        }
        if let Some(flat) = &encode.blocks {
            jobs.push(job(&flat.amaxes, None, flat.blocks.clone()));
        }
        jobs
    }
}

impl<B: Backend> HistoryJob<B> {
    /// Moves the delayed scale in entry `index` of `scales` by the amax in entry `index` of `observed`, over a new
    /// history; `None` where the scales of `recipe` are not delayed.
    ///
    /// # Errors
    /// No room.
    pub fn new<R: Recipe>(
        backend: &B,
        recipe: &R,
        observed: B::Buffer<f32>,
        scales: B::Buffer<f32>,
        index: usize,
    ) -> Result<Option<Self>, KernelError> {
        let ScaleSource::History {
            window,
            algorithm,
            margin,
        } = recipe.scale_source()
        else {
            return Ok(None);
        };
        Ok(Some(Self {
            observed,
            scales,
            index,
            history: backend.alloc(window)?,
            algorithm,
            margin,
            element: recipe.kernel().element,
        }))
    }
}

impl<B: Backend> FlatEncodeJob<B> {
    /// An encode of elements `start..start + len` of a matrix of `shape`, the content of `source`, into new
    /// buffers: the bytes that they touch of the stored row-major data of `usage`, and whole arrays of scales.
    /// Amaxes are new entries, as in [`EncodeJob::new`]; [`AmaxJob::before_flat`] raises them.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, or no room.
    pub fn new<R: Recipe>(
        backend: &B,
        recipe: &R,
        shape: Shape,
        usage: Usage,
        (start, len): (usize, usize),
        source: Source<B>,
    ) -> Result<Self, KernelError> {
        recipe.check(shape)?;
        let elements = shape.elements();
        if start.checked_add(len).is_none_or(|end| end > elements) {
            return Err(KernelError::Range {
                what: "elements of a flat encode",
                start,
                end: start.saturating_add(len),
                len: elements,
            });
        }
        let kernel = recipe.kernel();
        let mut targets = Vec::new();
        for spec in recipe.stored(usage) {
            let bytes = match spec.key.part {
                Part::Data => touched(spec.code, start, len).len(),
                Part::BlockScale | Part::DecodeScale | Part::TensorAmax => spec.bytes(shape),
            };
            targets.push(Target::new(spec, backend.alloc(bytes)?));
        }
        let mut blocks: Vec<BlockAmax> = Vec::new();
        let mut entries = 0;
        for block in kernel.blocks.into_iter().flatten() {
            if !blocks.iter().any(|part| part.block == block) {
                let first = entries;
                entries += shape.rows.div_ceil(block[0]) * shape.cols.div_ceil(block[1]);
                blocks.push(BlockAmax {
                    block,
                    start: first,
                });
            }
        }
        let blocks = match blocks.is_empty() {
            true => None,
            false => Some(FlatBlocks {
                amaxes: backend.alloc(entries)?,
                blocks,
            }),
        };
        Ok(Self {
            shape,
            start,
            len,
            kernel,
            source,
            source_rounding: recipe.source_rounding(),
            tensor: tensor_input(backend, recipe.scale_source())?,
            blocks,
            targets,
        })
    }
}

impl<B: Backend> DecodeJob<B> {
    /// Decodes `orientation` of `tensor` into `out`.
    ///
    /// # Errors
    /// The tensor cannot serve that orientation.
    pub fn new<R: Recipe>(
        tensor: &QuantizedTensor<B::Buffer<u8>, R>,
        orientation: Orientation,
        out: B::Buffer<f32>,
    ) -> Result<Self, FormatError> {
        let target = |b: &lowp_format::Buffer<_>| Target::new(b.spec, B::Buffer::clone(&b.storage));
        let tensor_scale = tensor.per_tensor();
        Ok(Self {
            shape: tensor.shape(),
            kernel: tensor.recipe().kernel(),
            data: target(tensor.data(orientation)?),
            block_scale: tensor.part(orientation, Part::BlockScale).map(target),
            tensor_scale: tensor_scale.map(|buffer| buffer.storage.clone()),
            out,
        })
    }
}

impl<B: Backend> AdamwJob<B> {
    /// Updates `master` with `grad`; the moments are new, in binary32.
    ///
    /// # Errors
    /// No room.
    pub fn new(backend: &B, master: B::Buffer<f32>, grad: Source<B>) -> Result<Self, KernelError> {
        let len = backend.len::<f32>(&master);
        Ok(Self {
            master,
            moments: Moments::F32 {
                exp_avg: backend.alloc(len)?,
                exp_avg_sq: backend.alloc(len)?,
            },
            grad,
            group: 0,
            mode: AdamMode::AdamW,
            source_rounding: SourceRounding::F32,
            amax: None,
            encode: None,
        })
    }

    /// The same with `encode`, whose source is the master, in the pass of the update. An encode that makes its
    /// scale of the amax of the new master comes back: the update raises that amax, and the encode follows in a
    /// plan of its own.
    #[must_use]
    pub fn with_encode(mut self, encode: EncodeJob<B>) -> (Self, Option<EncodeJob<B>>) {
        self.source_rounding = encode.source_rounding;
        if let Some(TensorInput::Observed { slot, .. }) = &encode.tensor {
            self.amax = Some(slot.clone());
            return (self, Some(encode));
        }
        self.encode = Some(Box::new(encode));
        (self, None)
    }
}
