//! [`ScaleLayout`]: where each entry of a buffer lies in its Compact, Padded or Swizzled form.

use crate::{Axis, BufferSpec, Code, FormatError, Orientation, Part, Shape};

/// The three forms of a buffer (docs/scale-layouts.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Exactly one entry per block, no padding: stored, sharded, gathered, saved.
    Compact,
    /// TransformerEngine's in-memory layout: padded, 2-D scales repeated. For interchange.
    Padded,
    /// cuBLASLt's 128x4 tiles: the GEMM operand.
    Swizzled,
}

impl Form {
    /// Every form.
    pub const ALL: [Form; 3] = [Form::Compact, Form::Padded, Form::Swizzled];

    /// The name in tables and options.
    pub const fn name(self) -> &'static str {
        match self {
            Form::Compact => "compact",
            Form::Padded => "padded",
            Form::Swizzled => "swizzled",
        }
    }
}

/// Outer entries of a swizzle tile.
const TILE_OUTER: usize = 128;
/// Inner entries of a swizzle tile.
const TILE_INNER: usize = 4;

/// The layout of one buffer of one shape in one form. Only [`ScaleLayout::new`] makes one, so entries
/// never exceed what is allocated, and a Swizzled form is made of whole 128x4 tiles.
///
/// ```compile_fail,E0616
/// # use lowp_format::ScaleLayout;
/// fn shorten(layout: &mut ScaleLayout) {
///     layout.padded = [1, 4];
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleLayout {
    form: Form,
    code: Code,
    axes: [Axis; 2],
    tile: [usize; 2],
    entries: [usize; 2],
    padded: [usize; 2],
}

impl ScaleLayout {
    /// The layout of `spec` for `shape`. Padded and Swizzled depend on which `orientation` the
    /// buffer is used for; Compact does not.
    ///
    /// # Errors
    /// As [`BufferSpec::check`]; or a Swizzled form of a buffer that is not made of 8-bit scales in
    /// 128x4 tiles.
    pub fn new(
        spec: &BufferSpec,
        shape: Shape,
        orientation: Orientation,
        form: Form,
    ) -> Result<Self, FormatError> {
        spec.check(shape)?;
        let BufferSpec {
            code,
            axes,
            mut tile,
            padded: pad,
            ..
        } = *spec;
        let compact = spec.entries(shape);
        // A scalar follows no axis: nothing to pad, nothing to repeat.
        let scalar = spec.is_scalar();
        if form == Form::Compact || (scalar && form == Form::Padded) {
            return Ok(Self {
                form,
                code,
                axes,
                tile,
                entries: compact,
                padded: compact,
            });
        }
        let no_form = |why| FormatError::NoSuchForm {
            key: spec.key,
            form: form.name(),
            why,
        };
        if form == Form::Swizzled {
            if spec.key.part != Part::BlockScale {
                return Err(no_form("only block scales are swizzled"));
            }
            if code.bits() != 8 || (pad.outer, pad.block) != (TILE_OUTER, TILE_INNER) {
                return Err(no_form(
                    "128x4 tiles hold 8-bit scales of 1-D or repeated 2-D blocks",
                ));
            }
        }
        let mut align = [1, 1];
        for axis in 0..2 {
            let outer = axes[axis] == Axis::outer(orientation);
            align[axis] = if outer { pad.outer } else { pad.block };
            if outer && pad.repeat {
                tile[axis] = 1;
            }
        }
        let entries = [0, 1].map(|axis| match tile[axis] {
            BufferSpec::WHOLE => 1,
            side => axes[axis].len(shape).div_ceil(side),
        });
        let padded = [0, 1].map(|axis| entries[axis].next_multiple_of(align[axis]));
        let mut layout = Self {
            form,
            code,
            axes,
            tile,
            entries,
            padded,
        };
        // A swizzled matrix is indexed outer axis first, whatever the physical order was.
        if form == Form::Swizzled && axes[0] != Axis::outer(orientation) {
            layout = layout.swapped();
        }
        Ok(layout)
    }

    /// The same layout with the physical axes exchanged.
    fn swapped(self) -> Self {
        let Self {
            axes: [a, b],
            tile: [c, d],
            entries: [e, f],
            padded: [g, h],
            ..
        } = self;
        Self {
            axes: [b, a],
            tile: [d, c],
            entries: [f, e],
            padded: [h, g],
            ..self
        }
    }

    /// The form.
    pub const fn form(&self) -> Form {
        self.form
    }

    /// Encoding of one entry.
    pub const fn code(&self) -> Code {
        self.code
    }

    /// The logical axis of each physical axis.
    pub const fn axes(&self) -> [Axis; 2] {
        self.axes
    }

    /// Logical elements per entry along each physical axis.
    pub const fn tile(&self) -> [usize; 2] {
        self.tile
    }

    /// Entries that carry a value, along each physical axis.
    pub const fn entries(&self) -> [usize; 2] {
        self.entries
    }

    /// Entries allocated, padding included, along each physical axis.
    pub const fn padded(&self) -> [usize; 2] {
        self.padded
    }

    /// Bytes of the buffer.
    pub const fn bytes(&self) -> usize {
        self.padded[0] * self.code.bytes(self.padded[1])
    }

    /// The position of entry `(i, j)`, in entries from the start of the buffer.
    ///
    /// Sub-byte entries count from a start that is aligned to bytes in every physical row.
    pub const fn offset(&self, i: usize, j: usize) -> usize {
        match self.form {
            Form::Swizzled => {
                let tile = (i / TILE_OUTER) * (self.padded[1] / TILE_INNER) + j / TILE_INNER;
                tile * (TILE_OUTER * TILE_INNER)
                    + (i % 32) * 16
                    + (i % TILE_OUTER / 32) * TILE_INNER
                    + j % TILE_INNER
            }
            Form::Compact | Form::Padded => {
                let row = self.code.bytes(self.padded[1]) * 8 / self.code.bits();
                i * row + j
            }
        }
    }

    /// The first logical element (row, column) that entry `(i, j)` covers.
    pub const fn element(&self, i: usize, j: usize) -> [usize; 2] {
        let [a, b] = [i * self.tile[0], j * self.tile[1]];
        match self.axes[0] {
            Axis::Rows => [a, b],
            Axis::Cols => [b, a],
        }
    }

    /// The position of the entry that covers logical element (row, column).
    pub const fn offset_of(&self, [row, col]: [usize; 2]) -> usize {
        match self.axes[0] {
            Axis::Rows => self.offset(row / self.tile[0], col / self.tile[1]),
            Axis::Cols => self.offset(col / self.tile[0], row / self.tile[1]),
        }
    }

    /// The position in `from` of the value of entry `(i, j)`: the entry of `from` that covers the
    /// same element. This one rule converts between all forms, repeats 2-D scales and transposes.
    pub const fn source(&self, from: &ScaleLayout, i: usize, j: usize) -> usize {
        from.offset_of(self.element(i, j))
    }
}
