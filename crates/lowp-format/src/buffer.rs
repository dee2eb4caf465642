//! [`BufferSpec`]: one physical buffer of a quantized tensor, described without a device.

use smallvec::SmallVec;

use crate::{BufferKey, Code, FormatError, Orientation, Part, Shape, Usage, lcm};

/// A logical axis of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// M.
    Rows,
    /// K.
    Cols,
}

impl Axis {
    /// The length of this axis in `shape`.
    pub const fn len(self, shape: Shape) -> usize {
        match self {
            Axis::Rows => shape.rows,
            Axis::Cols => shape.cols,
        }
    }

    /// The axis along which the outer GEMM index of `orientation` runs: the one that blocks do
    /// not run along.
    pub const fn outer(orientation: Orientation) -> Self {
        match orientation {
            Orientation::Rowwise => Axis::Rows,
            Orientation::Columnwise => Axis::Cols,
        }
    }
}

/// How a block-scale buffer is padded for interchange and for GEMMs (docs/scale-layouts.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PaddedForm {
    /// Padding multiple along the outer GEMM axis.
    pub outer: usize,
    /// Padding multiple along the axis that blocks run along.
    pub block: usize,
    /// Whether a 2-D scale is repeated for every index of the outer axis.
    pub repeat: bool,
}

impl PaddedForm {
    /// No padding and no repetition.
    pub const NONE: PaddedForm = PaddedForm {
        outer: 1,
        block: 1,
        repeat: false,
    };
    /// The padding of cuBLASLt's 128x4 scale tiles.
    pub const TILES_128X4: PaddedForm = PaddedForm {
        outer: 128,
        block: 4,
        repeat: true,
    };
}

/// Where a buffer's content comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// Written by quantization; a shard of it travels.
    Quantized,
    /// The transpose of another buffer with the same values; derived locally, never sent.
    TransposeOf(BufferKey),
    /// Equal on all ranks after the scales were agreed; never sent.
    Replicated,
}

/// The description of one physical buffer. An *entry* is one code of [`BufferSpec::code`]; entries are stored densely
/// in row-major order over the two physical axes, and each physical row begins on a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferSpec {
    /// Name within the tensor.
    pub key: BufferKey,
    /// Encoding of one entry.
    pub code: Code,
    /// The logical axis that each physical axis follows.
    pub axes: [Axis; 2],
    /// Logical elements per entry along each physical axis.
    pub tile: [usize; 2],
    /// Padding of the Padded form.
    pub padded: PaddedForm,
    /// Where the content comes from.
    pub origin: Origin,
}

/// The buffers of a tensor, in a fixed order.
pub type BufferList = SmallVec<[BufferSpec; 6]>;

impl BufferSpec {
    /// Longest side of a block, and largest padding multiple.
    pub const MAX_SIDE: usize = 4096;
    /// A side that is as long as the matrix.
    pub const WHOLE: usize = usize::MAX;

    /// Whether a tensor of `shape` can have this buffer. The fields are public, so this is asked
    /// before anything is computed from them.
    ///
    /// # Errors
    /// Two physical axes along one logical axis; a tile side or a padding multiple that is not 1 to
    /// [`BufferSpec::MAX_SIDE`] (a tile side may be [`BufferSpec::WHOLE`]); or a shape with too many elements ([`Shape::check`]).
    pub fn check(&self, shape: Shape) -> Result<(), FormatError> {
        shape.check()?;
        let reject = |why| Err(FormatError::NoSuchBuffer { key: self.key, why });
        if self.axes[0] == self.axes[1] {
            return reject("both physical axes follow the same logical axis".to_owned());
        }
        let sides = [
            ("tile side", self.tile[0]),
            ("tile side", self.tile[1]),
            ("padding multiple", self.padded.outer),
            ("padding multiple", self.padded.block),
        ];
        let fits = |what: &str, n: usize| {
            (1..=Self::MAX_SIDE).contains(&n) || (n == Self::WHOLE && what == "tile side")
        };
        match sides.iter().find(|(what, n)| !fits(what, *n)) {
            Some((what, n)) => reject(format!("a {what} is 1 to {}, not {n}", Self::MAX_SIDE)),
            None => Ok(()),
        }
    }

    /// Element codes, one per element, in the order of `axes`.
    pub const fn data(usage: Usage, code: Code, axes: [Axis; 2], origin: Origin) -> Self {
        let key = BufferKey::new(usage, Part::Data);
        Self {
            key,
            code,
            axes,
            tile: [1, 1],
            padded: PaddedForm::NONE,
            origin,
        }
    }

    /// Block scales, one per `block` = rows x columns, in the order of `axes`.
    pub const fn block_scale(
        usage: Usage,
        code: Code,
        axes: [Axis; 2],
        block: [usize; 2],
        padded: PaddedForm,
        origin: Origin,
    ) -> Self {
        let tile = match axes {
            [Axis::Rows, _] => block,
            _ => [block[1], block[0]],
        };
        let key = BufferKey::new(usage, Part::BlockScale);
        Self {
            key,
            code,
            axes,
            tile,
            padded,
            origin,
        }
    }

    /// One f32 of the whole tensor, equal on all ranks.
    pub const fn of_tensor(usage: Usage, part: Part) -> Self {
        Self {
            key: BufferKey::new(usage, part),
            code: Code::F32,
            axes: [Axis::Rows, Axis::Cols],
            tile: [Self::WHOLE; 2],
            padded: PaddedForm::NONE,
            origin: Origin::Replicated,
        }
    }

    /// One f32 of each line along which blocks of `orientation` run: rows, or columns.
    pub const fn of_lines(
        usage: Usage,
        part: Part,
        orientation: Orientation,
        origin: Origin,
    ) -> Self {
        let axes = match orientation {
            Orientation::Rowwise => [Axis::Rows, Axis::Cols],
            Orientation::Columnwise => [Axis::Cols, Axis::Rows],
        };
        Self {
            key: BufferKey::new(usage, part),
            code: Code::F32,
            axes,
            tile: [1, Self::WHOLE],
            padded: PaddedForm::NONE,
            origin,
        }
    }

    /// This buffer as a rank stores it whose rows may begin and end within blocks: codes in the order of rows, and scales of
    /// the whole tensor, equal on all ranks.
    #[must_use]
    pub const fn cut_anywhere(mut self) -> Self {
        match self.key.part {
            Part::Data => self.axes = [Axis::Rows, Axis::Cols],
            Part::BlockScale | Part::DecodeScale | Part::Amax => self.origin = Origin::Replicated,
        }
        self
    }

    /// Whether it is one entry, whatever the shape.
    pub const fn is_scalar(&self) -> bool {
        self.tile[0] == Self::WHOLE && self.tile[1] == Self::WHOLE
    }

    /// Entries along each physical axis (Compact form: exactly one per tile, no padding).
    pub const fn entries(&self, shape: Shape) -> [usize; 2] {
        if self.is_scalar() {
            return [1, 1];
        }
        let mut entries = [0; 2];
        let mut axis = 0;
        while axis < 2 {
            let len = self.axes[axis].len(shape);
            // Lines of nothing have an entry, too.
            entries[axis] = if self.tile[axis] == Self::WHOLE {
                1
            } else {
                len.div_ceil(self.tile[axis])
            };
            axis += 1;
        }
        entries
    }

    /// Bytes of one physical row.
    pub const fn row_bytes(&self, shape: Shape) -> usize {
        self.code.bytes(self.entries(shape)[1])
    }

    /// Bytes of the whole buffer.
    pub const fn bytes(&self, shape: Shape) -> usize {
        self.entries(shape)[0] * self.row_bytes(shape)
    }

    /// Tile rows x columns in logical order.
    pub const fn block(&self) -> [usize; 2] {
        match self.axes[0] {
            Axis::Rows => self.tile,
            Axis::Cols => [self.tile[1], self.tile[0]],
        }
    }

    /// The multiple at which rows are cut, so that no entry and no byte straddles a cut.
    pub const fn row_quantum(&self) -> usize {
        let (side, entries) = match self.axes[0] {
            Axis::Rows => (self.tile[0], 1),
            Axis::Cols => (self.tile[1], self.code.entries_per_byte()),
        };
        // What covers all rows is equal on all ranks.
        if side == Self::WHOLE {
            1
        } else {
            side * entries
        }
    }

    /// The multiple that the number of columns must be.
    pub const fn col_quantum(&self) -> usize {
        let (side, entries) = match self.axes[1] {
            Axis::Cols => (self.tile[1], self.code.entries_per_byte()),
            Axis::Rows => (self.tile[0], 1),
        };
        // A block with an f32 scale may have fewer columns at the edge.
        let partial = matches!((self.key.part, self.code), (Part::BlockScale, Code::F32));
        if side == Self::WHOLE || partial {
            1
        } else {
            side * entries
        }
    }
}

/// The row quantum of a set of buffers: the least common multiple of theirs.
pub(crate) fn row_quantum<'a>(specs: impl IntoIterator<Item = &'a BufferSpec>) -> usize {
    specs
        .into_iter()
        .fold(1, |q, spec| lcm(q, spec.row_quantum()))
}

/// The column quantum of a set of buffers: the least common multiple of theirs.
pub(crate) fn col_quantum<'a>(specs: impl IntoIterator<Item = &'a BufferSpec>) -> usize {
    specs
        .into_iter()
        .fold(1, |q, spec| lcm(q, spec.col_quantum()))
}
