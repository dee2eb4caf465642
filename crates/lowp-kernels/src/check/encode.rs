//! The checks of encodes: which targets a kernel can fill (parts, codes, blocks and columns that fit its
//! ingredients), and what must be known of the tensor.

use std::mem::discriminant;
use std::ops::Range;

use lowp_format::{
    Axis, Code, Extent, FormatError, KernelKey, Orientation, Part, ScaleRule, Shape, Usage, lcm,
};

use super::access::Mode;
use super::planner::{Done, Planner, check_block, elements, missing, range};
use crate::ingredients::{RuleKind, TABLE, is_stochastic, known};
use crate::{Backend, EncodeJob, FlatEncodeJob, KernelError, Target, TensorInput};

impl<B: Backend> Planner<'_, B> {
    /// What is known of the tensor or its lines for `orientation`. An observed amax fits the rules that are made of one;
    /// an orientation without a target needs nothing.
    fn tensor(
        &mut self,
        job: usize,
        shape: Shape,
        orientation: Orientation,
        key: &KernelKey,
        input: Option<&TensorInput<B>>,
        served: bool,
    ) -> Done {
        let outer = key.scale.outer();
        let entries = outer.map_or(1, |(extent, _)| extent.entries(orientation, shape));
        match input {
            Some(TensorInput::Known(slot)) => {
                self.slot(job, "tensor scale slot", slot, entries, Mode::Read)
            }
            Some(TensorInput::Observed(_)) if !key.scale.waits_for_amax() => {
                Err(KernelError::ObservedAmax { scale: key.scale })
            }
            Some(TensorInput::Observed(slot)) => {
                self.slot(job, "observed amax", slot, entries, Mode::Shared)
            }
            None if served && outer.is_some() => {
                missing(job, "the slot of the tensor scale or amax")
            }
            None => Ok(()),
        }
    }

    /// The ingredients of a job and what is known of its tensor, for the orientations of `usage` and those that targets serve.
    fn kernels(
        &mut self,
        job: usize,
        shape: Shape,
        kernels: &[KernelKey; 2],
        usage: Usage,
        inputs: &[Option<TensorInput<B>>; 2],
        targets: &[Target<B>],
    ) -> Result<Usage, KernelError> {
        let all = |usage, target: &Target<B>| usage | target.spec.key.usage;
        let served = targets.iter().fold(usage, all);
        for orientation in Orientation::ALL {
            let index = orientation as usize;
            let serves = served.contains(orientation.usage());
            let key = &kernels[index];
            if serves {
                ingredients(orientation, key)?;
            }
            let input = inputs[index].as_ref();
            self.tensor(job, shape, orientation, key, input, serves)?;
        }
        if slots_differ(self.backend, kernels, inputs, targets) {
            return Err(KernelError::SlotsDiffer { job });
        }
        Ok(served)
    }

    fn targets(&mut self, job: usize, shape: Shape, targets: &[Target<B>]) -> Done {
        targets.iter().try_for_each(|target| {
            let Target { spec, form, bytes } = target;
            let needed = match form {
                None => spec.bytes(shape),
                Some(_) => target.layout(shape)?.bytes(),
            };
            self.whole::<u8>(job, spec.key, bytes, needed, Mode::Write)
        })
    }

    pub(super) fn encode(&mut self, index: usize, job: &EncodeJob<B>) -> Done {
        self.encode_beside(index, job, Usage::empty())
    }

    /// Checks an encode where values of the orientations of `usage` are made, too.
    pub(super) fn encode_beside(&mut self, index: usize, job: &EncodeJob<B>, usage: Usage) -> Done {
        let (shape, kernels) = (job.shape, &job.kernels);
        let served = self.kernels(index, shape, kernels, usage, &job.tensor, &job.targets)?;
        for orientation in served.orientations() {
            let key = &kernels[orientation as usize];
            if job.stochastic.is_some() && !is_stochastic(key) {
                let element = key.element;
                return Err(KernelError::Stochastic { element });
            }
        }
        for target in &job.targets {
            check_target(shape, kernels, target)?;
        }
        self.targets(index, shape, &job.targets)
    }

    pub(super) fn flat(&mut self, index: usize, job: &FlatEncodeJob<B>) -> Done {
        let all = elements(job.shape)?;
        range("elements of a flat encode", job.start, job.len, all)?;
        self.source(index, "source", &job.source, job.len)?;
        let (shape, kernels) = (job.shape, &job.kernels);
        let none = Usage::empty();
        let served = self.kernels(index, shape, kernels, none, &job.tensor, &job.targets)?;
        for orientation in served.orientations() {
            let key = &kernels[orientation as usize];
            if key.hadamard {
                let what = "a flat encode";
                let remedy = "encode rows";
                return Err(KernelError::Hadamard { what, remedy });
            }
            if RuleKind::of(key.scale) == RuleKind::FourOverSix {
                return Err(KernelError::FlatChoice);
            }
        }
        if let Some(flat) = &job.blocks {
            for (i, part) in flat.blocks.iter().enumerate() {
                self.blocks(index, "agreed block amaxes", job.shape, part, &flat.amaxes)?;
                if flat.blocks[..i].iter().any(|p| p.block == part.block) {
                    return Err(KernelError::BlocksTwice { block: part.block });
                }
            }
        }
        for target in &job.targets {
            let Target { spec, bytes, .. } = target;
            check_target(shape, kernels, target)?;
            compact(target, "a flat encode")?;
            let needed = match spec.key.part {
                Part::Data if spec.axes[0] != Axis::Rows => {
                    return Err(KernelError::FlatTransposed { key: spec.key });
                }
                // An empty range touches nothing, whatever its buffer is.
                Part::Data if job.len == 0 => self.backend.len::<u8>(bytes),
                Part::Data => touched(spec.code, job.start, job.len).len(),
                Part::BlockScale | Part::DecodeScale | Part::Amax => spec.bytes(shape),
            };
            self.whole::<u8>(index, spec.key, bytes, needed, Mode::Write)?;
            if spec.key.part.is_outer() {
                continue;
            }
            if let Some(block) = kernel_of(kernels, spec.key.usage)?.1.block {
                self.flat_blocks(index, job, block)?;
            }
        }
        Ok(())
    }

    /// The agreed amaxes of blocks that a target needs.
    fn flat_blocks(&self, index: usize, job: &FlatEncodeJob<B>, block: [usize; 2]) -> Done {
        let mut parts = job.blocks.iter().flat_map(|flat| &flat.blocks);
        if parts.any(|part| part.block == block) {
            return Ok(());
        }
        let [rows, cols] = block;
        missing(index, &format!("the agreed amaxes of {rows}x{cols} blocks"))
    }
}

/// Checks the ingredients of one orientation, their blocks and their constants.
pub(super) fn ingredients(orientation: Orientation, key: &KernelKey) -> Result<(), KernelError> {
    known(key)?;
    key.block.map_or(Ok(()), check_block)?;
    // A block under the amax of a line lies within it.
    if let (Some((Extent::Line, _)), Some(block)) = (key.scale.outer(), key.block)
        && block[orientation as usize] != 1
    {
        return Err(KernelError::Ingredients { key: *key });
    }
    match key.scale {
        ScaleRule::BlockF32 { epsilon, .. } | ScaleRule::Current { epsilon, .. } => {
            check_epsilon(epsilon)
        }
        _ => Ok(()),
    }
}

/// Checks that elements of `element` have a scale of their tensor, which may then be delayed.
pub(super) fn check_delayed(element: Code) -> Result<(), KernelError> {
    if TABLE.contains(&(element, RuleKind::PerTensor)) {
        return Ok(());
    }
    Err(KernelError::DelayedElement { element })
}

/// Checks that a least amax is a magnitude.
pub(super) fn check_epsilon(epsilon: f32) -> Result<(), KernelError> {
    if epsilon >= 0.0 && epsilon.is_finite() {
        return Ok(());
    }
    Err(KernelError::Epsilon { epsilon })
}

/// Whether one of `targets` holds both orientations while `inputs` say different things of their tensor. Ingredients that differ
/// are found with the target; each orientation has lines of its own.
fn slots_differ<B: Backend>(
    backend: &B,
    kernels: &[KernelKey; 2],
    inputs: &[Option<TensorInput<B>>; 2],
    targets: &[Target<B>],
) -> bool {
    let [Some(rowwise), Some(columnwise)] = inputs else {
        return false;
    };
    let [key, other] = kernels;
    let shares = key == other && matches!(key.scale.outer(), Some((Extent::Tensor, _)));
    let entry = |input: &TensorInput<B>| {
        let slot = input.slot();
        (discriminant(input), backend.span(&slot.buffer), slot.index)
    };
    let both = |target: &Target<B>| target.spec.key.usage == Usage::BOTH;
    shares && targets.iter().any(both) && entry(rowwise) != entry(columnwise)
}

/// The ingredients that every orientation of `usage` has, of which there is at least one.
pub(crate) fn kernel_of(
    kernels: &[KernelKey; 2],
    usage: Usage,
) -> Result<(Orientation, &KernelKey), KernelError> {
    let columnwise = usage == Usage::COLUMNWISE;
    if usage == Usage::BOTH && kernels[0] != kernels[1] {
        let kernels = Box::new(*kernels);
        return Err(KernelError::KernelsDiffer { kernels });
    }
    Ok(match columnwise {
        true => (Orientation::Columnwise, &kernels[1]),
        false => (Orientation::Rowwise, &kernels[0]),
    })
}

/// As [`kernel_of`] for what stands above block scales, whatever the blocks are.
pub(crate) fn outer_kernel_of(
    kernels: &[KernelKey; 2],
    usage: Usage,
) -> Result<(Orientation, &KernelKey), KernelError> {
    let without_blocks = kernels.map(|key| KernelKey { block: None, ..key });
    match usage == Usage::BOTH && without_blocks[0] == without_blocks[1] {
        true => Ok((Orientation::Rowwise, &kernels[0])),
        false => kernel_of(kernels, usage),
    }
}

/// Whether one quantization fills the targets of both orientations of a job: their ingredients are the same, and so is
/// what they know of the tensor.
pub(crate) fn share_pass<B: Backend>(
    backend: &B,
    kernels: &[KernelKey; 2],
    inputs: &[Option<TensorInput<B>>; 2],
) -> bool {
    if kernels[0] != kernels[1] || kernels[0].scale.is_by_line() {
        return false;
    }
    let place = |input: &TensorInput<B>| {
        let slot = input.slot();
        (backend.span(&slot.buffer).start, slot.index)
    };
    match [inputs[0].as_ref(), inputs[1].as_ref()] {
        [Some(a), Some(b)] => place(a) == place(b),
        _ => true,
    }
}

/// The orientation whose ingredients fill a target of `usage`, where orientations that `share` are filled by the first.
pub(crate) fn filled_by(usage: Usage, share: bool) -> Orientation {
    match usage == Usage::COLUMNWISE && !share {
        true => Orientation::Columnwise,
        false => Orientation::Rowwise,
    }
}

/// What is known for the pass of `orientation`: if the orientations `share`, either of the two.
pub(crate) fn input_of<B: Backend>(
    inputs: &[Option<TensorInput<B>>; 2],
    orientation: Orientation,
    share: bool,
) -> Option<&TensorInput<B>> {
    let own = inputs[orientation as usize].as_ref();
    match share {
        true => own.or(inputs[1 - orientation as usize].as_ref()),
        false => own,
    }
}

/// Checks that a target is made of the ingredients of the orientations that it serves.
pub(crate) fn check_target<B: Backend>(
    shape: Shape,
    kernels: &[KernelKey; 2],
    target: &Target<B>,
) -> Result<(), KernelError> {
    let spec = &target.spec;
    let at = spec.key;
    let holds = |block: [usize; 2], needed: Option<(Code, [usize; 2])>| {
        if needed == Some((spec.code, block)) {
            return Ok(());
        }
        Err(KernelError::TargetEntries {
            key: at,
            code: spec.code,
            block,
            needed,
        })
    };
    spec.check(shape)?;
    if at.usage.is_empty() || !Usage::BOTH.contains(at.usage) {
        return Err(KernelError::TargetUsage { key: at });
    }
    if let Some((form, orientation)) = target.form
        && (at.part != Part::BlockScale || !at.usage.contains(orientation.usage()))
    {
        return Err(KernelError::TargetForm {
            key: at,
            form,
            orientation,
        });
    }
    let (orientation, key) = match at.part.is_outer() {
        true => outer_kernel_of(kernels, at.usage)?,
        false => kernel_of(kernels, at.usage)?,
    };
    let scale = key.scale;
    match at.part {
        Part::DecodeScale | Part::Amax => {
            let outer = scale.outer();
            let Some((extent, _)) = outer.filter(|(_, part)| *part == at.part) else {
                return Err(KernelError::TargetPart { key: at, scale });
            };
            // Lines lie one after another, whatever the order of the axes.
            let both = at.usage == Usage::BOTH && extent == Extent::Line;
            let block = if both {
                [0, 0]
            } else {
                extent.block(orientation)
            };
            return holds(spec.block(), Some((Code::F32, block)));
        }
        Part::Data => holds(spec.tile, Some((key.element, [1, 1])))?,
        Part::BlockScale => holds(spec.block(), scale.entry().zip(key.block))?,
    }
    let packed = if spec.axes[1] == Axis::Cols {
        spec.code.entries_per_byte()
    } else {
        1
    };
    let multiple = match (scale, key.block) {
        // The last blocks of a row may have fewer columns.
        (ScaleRule::BlockF32 { .. }, _) | (_, None) => packed,
        (_, Some(block)) => lcm(packed, block[1]),
    };
    if !shape.cols.is_multiple_of(multiple) {
        let recipe = "the kernel";
        return Err(FormatError::Columns {
            recipe,
            shape,
            multiple,
        }
        .into());
    }
    Ok(())
}

/// Checks that scales are in Compact form.
pub(super) fn compact<B: Backend>(
    target: &Target<B>,
    what: &'static str,
) -> Result<(), KernelError> {
    match target.form {
        Some((form, _)) if !target.is_compact() => Err(KernelError::NotCompact {
            what,
            key: target.spec.key,
            form,
        }),
        _ => Ok(()),
    }
}

/// The bytes that elements `start..start + len` touch.
pub(crate) fn touched(code: Code, start: usize, len: usize) -> Range<usize> {
    let bits = code.bits();
    start * bits / 8..((start + len) * bits).div_ceil(8)
}
