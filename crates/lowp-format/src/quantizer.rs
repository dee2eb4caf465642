//! [`Quantizer`]: how one orientation of a tensor is quantized and stored, and [`Quantizers`], the two of a tensor.
//! Its buffers follow from them.

use crate::{
    Axis, BufferKey, BufferList, BufferSpec, Extent, KernelKey, Orientation, Origin, PaddedForm,
    Part, Usage,
};

/// How one orientation is quantized and stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantizer {
    /// The ingredients of the kernels.
    pub kernel: KernelKey,
    /// The logical axis that each physical axis of the data follows.
    pub data: [Axis; 2],
    /// The logical axis that each physical axis of block scales follows.
    pub scales: [Axis; 2],
    /// Padding of block scales.
    pub padded: PaddedForm,
}

/// Where columnwise buffers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Columnwise {
    /// They are quantized from the source.
    Quantized,
    /// They are transposes of the rowwise ones, and hold the same values.
    Transposed,
    /// They are the rowwise ones.
    Shared,
}

/// How a tensor is quantized in both orientations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantizers {
    /// Blocks along K.
    pub rowwise: Quantizer,
    /// Blocks along M.
    pub columnwise: Quantizer,
    /// How the second follows from the first.
    pub relation: Columnwise,
}

impl Quantizer {
    /// Row-major data and scales, without padding.
    pub const fn row_major(kernel: KernelKey) -> Self {
        Self {
            kernel,
            data: [Axis::Rows, Axis::Cols],
            scales: [Axis::Rows, Axis::Cols],
            padded: PaddedForm::NONE,
        }
    }

    /// Data and scales whose physical rows follow the columns of the matrix, without padding.
    pub const fn column_major(kernel: KernelKey) -> Self {
        Self {
            kernel,
            data: [Axis::Cols, Axis::Rows],
            scales: [Axis::Cols, Axis::Rows],
            padded: PaddedForm::NONE,
        }
    }

    /// The quantizer with block scales in this order.
    #[must_use]
    pub const fn scales(self, scales: [Axis; 2]) -> Self {
        Self { scales, ..self }
    }

    /// The quantizer with padded block scales.
    #[must_use]
    pub const fn padded(self, padded: PaddedForm) -> Self {
        Self { padded, ..self }
    }

    /// Data and block scales that serve `usage`.
    fn push(&self, usage: Usage, origin: impl Fn(Part) -> Origin, buffers: &mut BufferList) {
        let KernelKey {
            element,
            scale,
            block,
            ..
        } = self.kernel;
        buffers.push(BufferSpec::data(
            usage,
            element,
            self.data,
            origin(Part::Data),
        ));
        if let Some((block, code)) = block.zip(scale.entry()) {
            let origin = origin(Part::BlockScale);
            buffers.push(BufferSpec::block_scale(
                usage,
                code,
                self.scales,
                block,
                self.padded,
                origin,
            ));
        }
    }

    /// What stands above the block scales of `orientation`, or alone; for `usage`.
    fn outer(&self, orientation: Orientation, usage: Usage) -> Option<BufferSpec> {
        let (extent, part) = self.kernel.scale.outer()?;
        Some(match (extent, orientation) {
            (Extent::Tensor, _) => BufferSpec::of_tensor(usage, part),
            // Rows of a shard are its own; of columns every rank has a part.
            (Extent::Line, Orientation::Rowwise) => {
                BufferSpec::of_lines(usage, part, orientation, Origin::Quantized)
            }
            (Extent::Line, Orientation::Columnwise) => {
                BufferSpec::of_lines(usage, part, orientation, Origin::Replicated)
            }
        })
    }
}

impl Quantizers {
    /// One copy of row-major buffers for both orientations.
    pub const fn shared(quantizer: Quantizer) -> Self {
        Self {
            rowwise: quantizer,
            columnwise: quantizer,
            relation: Columnwise::Shared,
        }
    }

    /// Columnwise buffers that are transposes of row-major rowwise ones.
    pub const fn transposed(rowwise: Quantizer) -> Self {
        let [data, scales] = [[Axis::Cols, Axis::Rows]; 2];
        Self {
            rowwise,
            columnwise: Quantizer {
                data,
                scales,
                ..rowwise
            },
            relation: Columnwise::Transposed,
        }
    }

    /// Orientations that are quantized apart.
    pub const fn independent(rowwise: Quantizer, columnwise: Quantizer) -> Self {
        Self {
            rowwise,
            columnwise,
            relation: Columnwise::Quantized,
        }
    }

    /// Orientations that are quantized apart, each with the axis of its blocks innermost (K-major), and block scales padded
    /// for GEMMs.
    pub const fn k_major(rowwise: KernelKey, columnwise: KernelKey) -> Self {
        let padded = PaddedForm::TILES_128X4;
        Self::independent(
            Quantizer::row_major(rowwise).padded(padded),
            Quantizer::column_major(columnwise).padded(padded),
        )
    }

    /// The quantizer of `orientation`.
    pub const fn of(&self, orientation: Orientation) -> &Quantizer {
        match orientation {
            Orientation::Rowwise => &self.rowwise,
            Orientation::Columnwise => &self.columnwise,
        }
    }

    /// The ingredients by orientation, rowwise first.
    pub const fn kernels(&self) -> [KernelKey; 2] {
        [self.rowwise.kernel, self.columnwise.kernel]
    }

    /// Whether the widest element code is narrower than 16 bits.
    pub const fn is_low_precision(&self) -> bool {
        self.rowwise.kernel.element.bits() < 16
    }

    /// Whether one amax, or one scale, of the tensor serves both orientations.
    fn share_outer(&self) -> bool {
        let [row, col] = self.kernels();
        let of_tensor = matches!(row.scale.outer(), Some((Extent::Tensor, _)));
        of_tensor
            && row.scale == col.scale
            && row.element == col.element
            && row.hadamard == col.hadamard
    }

    /// The orientations of `usage` whose amax of the tensor or its lines is one and the same, as sets: one or two.
    pub fn outer_usages(&self, usage: Usage) -> impl Iterator<Item = Usage> {
        let all = if self.share_outer() {
            [Usage::BOTH, Usage::empty()]
        } else {
            [usage & Usage::ROWWISE, usage & Usage::COLUMNWISE]
        };
        all.into_iter().filter(|usage| !usage.is_empty())
    }

    /// The buffers of a tensor that serves `usage`, in a fixed order: data and block scales of each orientation, then
    /// scales or amaxes of the tensor or its lines.
    pub fn buffers(&self, usage: Usage) -> BufferList {
        let mut buffers = BufferList::new();
        let quantized = |_| Origin::Quantized;
        if self.relation == Columnwise::Shared {
            self.rowwise.push(Usage::BOTH, quantized, &mut buffers);
        } else {
            if usage.contains(Usage::ROWWISE) {
                self.rowwise.push(Usage::ROWWISE, quantized, &mut buffers);
            }
            if usage.contains(Usage::COLUMNWISE) {
                let transposed = |part| match self.relation {
                    Columnwise::Transposed => {
                        Origin::TransposeOf(BufferKey::new(Usage::ROWWISE, part))
                    }
                    Columnwise::Quantized | Columnwise::Shared => Origin::Quantized,
                };
                self.columnwise
                    .push(Usage::COLUMNWISE, transposed, &mut buffers);
            }
        }
        for outer in self.outer_usages(usage) {
            let orientation = outer.orientations().next().unwrap_or(Orientation::Rowwise);
            buffers.extend(self.of(orientation).outer(orientation, outer));
        }
        buffers
    }
}
