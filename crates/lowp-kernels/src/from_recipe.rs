//! Jobs from a recipe: what a recipe answers (buffers, ingredients, rounding, what scales depend on)
//! becomes the fields of a job. A backend sees the job only.

use std::ops::Range;

use lowp_format::{
    Extent, Form, FormatError, KernelKey, Orientation, Part, QuantizedTensor, Quantizers, Recipe,
    Role, ScaleLayout, ScaleRule, Shape, SourceRounding, Usage,
};

use crate::check::encode::touched;
use crate::check::range;
use crate::{
    AmaxJob, Backend, BlockAmax, DecodeJob, EncodeJob, FlatBlocks, FlatEncodeJob, HistoryJob,
    KernelError, Rule, Slot, Source, StateDtype, Target, TensorInput, UpdateAmax, UpdateJob,
};

/// What an encode of `usage` reads of its tensor or its lines, in entries of their own: amaxes of 0, or a delayed scale
/// of 1.
fn tensor_inputs<B: Backend>(
    backend: &B,
    quantizers: &Quantizers,
    shape: Shape,
    usage: Usage,
) -> Result<[Option<TensorInput<B>>; 2], KernelError> {
    let mut entries = Vec::new();
    // Where its entries begin, and whether they are known.
    let places = by_orientation(quantizers, shape, usage, |known, count| {
        let index = entries.len();
        entries.resize(index + count, if known { 1.0 } else { 0.0 });
        (index, known)
    });
    let buffer = backend.upload::<f32>(&entries)?;
    Ok(places.map(|place| {
        let (index, known) = place?;
        let slot = Slot {
            buffer: buffer.clone(),
            index,
        };
        Some(match known {
            true => TensorInput::Known(slot),
            false => TensorInput::Observed(slot),
        })
    }))
}

/// By orientation what `make` makes of the number of entries that an encode of `usage` reads of its tensor or its lines, and of
/// whether they are known before the values.
pub(crate) fn by_orientation<T: Clone>(
    quantizers: &Quantizers,
    shape: Shape,
    usage: Usage,
    mut make: impl FnMut(bool, usize) -> T,
) -> [Option<T>; 2] {
    let mut made = [None, None];
    for served in quantizers.outer_usages(usage) {
        let Some(orientation) = served.orientations().next() else {
            continue;
        };
        let rule = quantizers.of(orientation).kernel.scale;
        if let Some((extent, _)) = rule.outer() {
            let new = make(rule.is_delayed(), extent.entries(orientation, shape));
            for orientation in served.orientations() {
                made[orientation as usize] = Some(new.clone());
            }
        }
    }
    made
}

impl<B: Backend> EncodeJob<B> {
    /// An encode of `source`, a matrix of `shape`, into new buffers: all that `recipe` has for `usage`.
    ///
    /// Where scales depend on the tensor or its lines, [`EncodeJob::tensor`] are new entries: amaxes, which
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
        let quantizers = recipe.quantizers(Role::Weight);
        let target = |b: &lowp_format::Buffer<_>| Target::new(b.spec, B::Buffer::clone(&b.storage));
        Ok(Self {
            shape: tensor.shape(),
            kernels: quantizers.kernels(),
            source,
            source_rounding: recipe.source_rounding(),
            tensor: tensor_inputs(backend, &quantizers, tensor.shape(), tensor.usage())?,
            targets: tensor.buffers().iter().map(target).collect(),
            stochastic: None,
        })
    }

    /// The encode with its block scales in `form`, in new buffers: one for each orientation that a buffer of
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
            hadamard: false,
        }
    }

    /// The amaxes that `encode` makes its scales of; empty where it waits for none.
    pub fn before(backend: &B, encode: &EncodeJob<B>) -> Vec<Self> {
        observations(
            backend,
            encode.shape,
            0,
            &encode.source,
            encode.source_rounding,
            &encode.kernels,
            &encode.tensor,
        )
    }

    /// The amaxes that `encode` takes as agreed: of the tensor or its lines into their vectors, then of blocks into theirs.
    /// Empty where it waits for none.
    pub fn before_flat(backend: &B, encode: &FlatEncodeJob<B>) -> Vec<Self> {
        let mut jobs = observations(
            backend,
            encode.shape,
            encode.start,
            &encode.source,
            encode.source_rounding,
            &encode.kernels,
            &encode.tensor,
        );
        jobs.extend(encode.blocks.as_ref().map(|flat| Self {
            shape: encode.shape,
            start: encode.start,
            source: encode.source.clone(),
            source_rounding: encode.source_rounding,
            out: flat.amaxes.clone(),
            tensor: None,
            blocks: flat.blocks.clone(),
            hadamard: false,
        }));
        jobs
    }
}

/// The observations that `inputs` are made of, each once; `source` has the elements of a matrix of `shape` from `start` on.
fn observations<B: Backend>(
    backend: &B,
    shape: Shape,
    start: usize,
    source: &Source<B>,
    source_rounding: SourceRounding,
    kernels: &[KernelKey; 2],
    inputs: &[Option<TensorInput<B>>; 2],
) -> Vec<AmaxJob<B>> {
    let mut jobs: Vec<AmaxJob<B>> = Vec::new();
    for orientation in Orientation::ALL {
        let key = &kernels[orientation as usize];
        let Some(TensorInput::Observed(slot)) = &inputs[orientation as usize] else {
            continue;
        };
        let mut job = AmaxJob {
            shape,
            start,
            source: source.clone(),
            source_rounding,
            out: slot.buffer.clone(),
            tensor: None,
            blocks: Vec::new(),
            hadamard: key.hadamard,
        };
        match key.scale.is_by_line() {
            true => job.blocks.push(BlockAmax {
                block: Extent::Line.block(orientation),
                start: slot.index,
            }),
            false => job.tensor = Some(slot.index),
        }
        let same = |other: &AmaxJob<B>| {
            let [a, b] = [&other.out, &job.out].map(|out| backend.span(out));
            a == b
                && (other.tensor, &other.blocks, other.hadamard)
                    == (job.tensor, &job.blocks, job.hadamard)
        };
        if !jobs.iter().any(same) {
            jobs.push(job);
        }
    }
    jobs
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
        let KernelKey { element, scale, .. } = recipe.kernel(Orientation::Rowwise);
        let ScaleRule::Delayed {
            window,
            algorithm,
            margin,
        } = scale
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
            element,
        }))
    }
}

impl<B: Backend> FlatEncodeJob<B> {
    /// An encode of `elements` of the flattened matrix of `shape`, the content of `source`, into new
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
        elements: Range<usize>,
        source: Source<B>,
    ) -> Result<Self, KernelError> {
        recipe.check(shape)?;
        let (start, len) = (elements.start, elements.len());
        range("elements of a flat encode", start, len, shape.elements())?;
        let quantizers = recipe.quantizers(Role::Weight);
        let kernels = quantizers.kernels();
        let mut targets = Vec::new();
        for spec in recipe.stored(usage) {
            let bytes = match spec.key.part {
                Part::Data => touched(spec.code, start, len).len(),
                Part::BlockScale | Part::DecodeScale | Part::Amax => spec.bytes(shape),
            };
            targets.push(Target::new(spec, backend.alloc(bytes)?));
        }
        let mut blocks: Vec<BlockAmax> = Vec::new();
        let mut entries = 0;
        for orientation in usage.orientations() {
            let Some(block) = kernels[orientation as usize].block else {
                continue;
            };
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
            kernels,
            source,
            source_rounding: recipe.source_rounding(),
            tensor: tensor_inputs(backend, &quantizers, shape, usage)?,
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
        out: Source<B>,
    ) -> Result<Self, FormatError> {
        let target = |b: &lowp_format::Buffer<_>| Target::new(b.spec, B::Buffer::clone(&b.storage));
        let tensor_scale = tensor.outer(orientation);
        Ok(Self {
            shape: tensor.shape(),
            kernel: tensor.recipe().kernel(orientation),
            data: target(tensor.data(orientation)?),
            block_scale: tensor.part(orientation, Part::BlockScale).map(target),
            tensor_scale: tensor_scale.map(|buffer| buffer.storage.clone()),
            out,
        })
    }
}

impl<B: Backend> UpdateJob<B> {
    /// Updates `master` with `grad` by `rule`, whose states are new, in binary32.
    ///
    /// # Errors
    /// No room.
    pub fn new(
        backend: &B,
        rule: Rule,
        master: B::Buffer<f32>,
        grad: Source<B>,
    ) -> Result<Self, KernelError> {
        let len = backend.len::<f32>(&master);
        Ok(Self {
            rule,
            master: Source::F32(master).into(),
            states: rule.alloc(backend, |_| StateDtype::F32, len)?,
            grad,
            group: 0,
            random: None,
            source_rounding: SourceRounding::F32,
            amax: None,
            encode: None,
        })
    }

    /// The update with `encode`, whose source is the master, in the pass of the update. An encode that makes its
    /// scales of amaxes of the new master comes back: the update raises those amaxes, which lie in one vector, and the
    /// encode follows in a plan of its own.
    #[must_use]
    pub fn with_encode(mut self, encode: EncodeJob<B>) -> (Self, Option<EncodeJob<B>>) {
        self.source_rounding = encode.source_rounding;
        let observed = |input: &Option<TensorInput<B>>| match input {
            Some(TensorInput::Observed(slot)) => Some(slot.clone()),
            _ => None,
        };
        let mut amax: Option<UpdateAmax<B>> = None;
        for orientation in Orientation::ALL {
            let Some(slot) = observed(&encode.tensor[orientation as usize]) else {
                continue;
            };
            let amax = amax.get_or_insert_with(|| UpdateAmax {
                shape: encode.shape,
                out: slot.buffer.clone(),
                tensor: None,
                lines: [None; 2],
            });
            match encode.kernels[orientation as usize].scale.outer() {
                Some((Extent::Line, _)) => amax.lines[orientation as usize] = Some(slot.index),
                _ => amax.tensor = Some(slot.index),
            }
        }
        if amax.is_some() {
            self.amax = amax;
            return (self, Some(encode));
        }
        self.encode = Some(Box::new(encode));
        (self, None)
    }
}
