//! [`Region`]: where bytes of some rows of a tensor lie among those of all.

use lowp_format::{Axis, BufferSpec, Code, Form, ScaleLayout};
use std::ops::Range;

/// Runs of bytes that lie a stride apart, each with padding after it that is left out: the rows of an array whose rows are the columns of the
/// matrix have a run each, and all other rows of a matrix are one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    start: usize,
    /// Bytes of a run and of its padding.
    run: usize,
    /// Bytes of a run.
    kept: usize,
    stride: usize,
}

impl Region {
    /// All bytes, or those that come first.
    pub(crate) const FIRST: Self = Self::from(0);

    /// The bytes from byte `start` on.
    pub(crate) const fn from(start: usize) -> Self {
        Self {
            start,
            run: usize::MAX,
            kept: usize::MAX,
            stride: 0,
        }
    }

    /// Where the bytes of rows that begin with matrix row `first`, laid out as `rows`, lie in `whole`. Padding is left out, but for that of
    /// `whole` after the last rows: they have at least as much where `first` is a multiple of a power of two, up to 512, that no rows before
    /// them exceed, or of 512.
    pub(crate) fn of(whole: &ScaleLayout, rows: &ScaleLayout, first: usize) -> Self {
        let bytes = |layout: &ScaleLayout, entries: usize| match layout.form() {
            // Tiles follow each other, 128 entries high; entries of those have 8 bits.
            Form::Swizzled => entries * 128,
            Form::Compact | Form::Padded => layout.code().bytes(entries),
        };
        let axis = axis_of_rows(whole);
        let entry = first / whole.tile()[axis];
        let is_last = entry + rows.entries()[axis] >= whole.entries()[axis];
        let kept = match is_last {
            true => whole.padded()[axis] - entry,
            false => rows.entries()[axis],
        };
        assert!(kept <= rows.padded()[axis], "{whole:?} {rows:?} {first}");
        if axis == 0 {
            let row = whole.code().bytes(whole.padded()[1]);
            return Self {
                kept: kept * row,
                ..Self::from(entry * row)
            };
        }
        let region = Self {
            start: bytes(whole, entry),
            run: bytes(rows, rows.padded()[1]),
            kept: bytes(rows, kept),
            stride: bytes(whole, whole.padded()[1]),
        };
        match region.kept == region.stride {
            true => Self::from(region.start),
            false => region,
        }
    }

    /// Whether all bytes follow each other.
    pub(crate) fn is_one_run(&self) -> bool {
        self.run == usize::MAX
    }

    /// How many of the first `len` bytes are no padding.
    pub(crate) fn placed(&self, len: usize) -> usize {
        len / self.run * self.kept + (len % self.run).min(self.kept)
    }

    /// Where the `len` bytes from byte `from` on lie: ranges of them, each with where it begins.
    pub(crate) fn pieces(
        &self,
        from: usize,
        len: usize,
    ) -> impl Iterator<Item = (Range<usize>, usize)> {
        let Self {
            start,
            run,
            kept,
            stride,
        } = *self;
        let mut at = 0;
        std::iter::from_fn(move || {
            let (mut number, mut within) = ((from + at) / run, (from + at) % run);
            if within >= kept {
                // Padding.
                at = at.saturating_add(run - within);
                (number, within) = (number + 1, 0);
            }
            if at >= len {
                return None;
            }
            let piece = at..len.min(at.saturating_add(kept - within));
            at = piece.end;
            Some((piece, start + number * stride + within))
        })
    }
}

/// The physical axis that matrix rows run along.
fn axis_of_rows(layout: &ScaleLayout) -> usize {
    usize::from(layout.axes()[0] != Axis::Rows)
}

/// Whether an entry of `layout` stands for all rows: the scale of a column.
pub(crate) fn is_of_all_rows(layout: &ScaleLayout) -> bool {
    let axis = axis_of_rows(layout);
    layout.tile()[axis] == BufferSpec::WHOLE
}

/// Whether other rows can follow the `rows` of `layout`: they end where a block, a byte and a tile of scales ends.
pub(crate) fn is_whole(layout: &ScaleLayout, rows: usize) -> bool {
    let axis = axis_of_rows(layout);
    let entries = layout.entries()[axis];
    let whole_bytes = axis == 0 || layout.code() != Code::E2M1 || entries.is_multiple_of(2);
    let unit = match (layout.form(), axis) {
        (Form::Swizzled, 0) => 128,
        (Form::Swizzled, _) => 4,
        (Form::Compact | Form::Padded, _) => 1,
    };
    let whole_blocks = rows.is_multiple_of(layout.tile()[axis]);
    whole_bytes && whole_blocks && entries.is_multiple_of(unit)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use lowp_format::{AnyRecipe, Orientation, Recipe, Shape, Usage};

    /// Every entry of rows lies where their place says, whatever the recipe, the orientation and the form.
    #[test]
    fn rows_lie_in_the_whole_where_their_place_says() {
        const STEPS: [usize; 6] = [32, 64, 128, 256, 512, 1536];
        // A place follows from the layout of the whole alone, which recipes have in common.
        let mut seen = HashSet::new();
        let mut cut = [0; STEPS.len()];
        // Rows that end in the first, the second, the third and the last block of four.
        let shapes = [1100, 1180, 1300, 1500].map(|rows| Shape::new(rows, 320));
        for (recipe, (number, step), full) in
            AnyRecipe::low_precision().into_iter().flat_map(|recipe| {
                let steps = STEPS.into_iter().enumerate();
                steps.flat_map(move |step| shapes.map(|full| (recipe, step, full)))
            })
        {
            for spec in recipe
                .buffers(Usage::BOTH)
                .iter()
                .filter(|s| !s.is_scalar())
            {
                for (form, orientation) in Form::ALL
                    .into_iter()
                    .flat_map(|f| Orientation::ALL.map(|o| (f, o)))
                {
                    if spec.key.part.is_outer() || !spec.key.usage.contains(orientation.usage()) {
                        continue;
                    }
                    let of = |shape| ScaleLayout::new(spec, shape, orientation, form);
                    let Ok(whole) = of(full) else {
                        continue;
                    };
                    if !seen.insert(format!("{step} {whole:?}")) {
                        continue;
                    }
                    let first = of(Shape::new(step, full.cols)).expect("the form of the whole");
                    let filled = is_whole(&first, step);
                    assert!(filled || step < 128, "{form:?} {first:?}");
                    // Rows that end within a block are none that others can follow.
                    let axis = usize::from(first.axes()[0] != Axis::Rows);
                    assert!(!filled || step.is_multiple_of(first.tile()[axis]));
                    if !filled {
                        continue;
                    }
                    cut[number] += 1;
                    let mut covered = vec![false; whole.bytes()];
                    for first in (0..full.rows).step_by(step) {
                        let rows = step.min(full.rows - first);
                        let part = of(Shape::new(rows, full.cols)).expect("the form of the whole");
                        assert!(rows < step || is_whole(&part, rows), "{form:?} {part:?}");
                        let region = Region::of(&whole, &part, first);
                        let mut at = vec![usize::MAX; part.bytes()];
                        let mut placed = 0;
                        // In two pieces that end anywhere.
                        for (from, len) in [
                            (0, part.bytes() / 3),
                            (part.bytes() / 3, part.bytes() - part.bytes() / 3),
                        ] {
                            for (piece, start) in region.pieces(from, len) {
                                assert!(!piece.is_empty() && piece.end <= len);
                                placed += piece.len();
                                for (at, start) in at[from..][piece].iter_mut().zip(start..) {
                                    *at = start;
                                    assert!(!covered[start], "{form:?}");
                                    covered[start] = true;
                                }
                            }
                        }
                        assert_eq!(placed, region.placed(part.bytes()));
                        let bits = part.code().bits();
                        for i in 0..part.entries()[0] {
                            for j in 0..part.entries()[1] {
                                let [row, col] = part.element(i, j);
                                let byte = part.offset(i, j) * bits / 8;
                                let expected = whole.offset_of([row + first, col]) * bits / 8;
                                assert_eq!(at[byte], expected, "{form:?} {spec:?} {i},{j}");
                            }
                        }
                    }
                    assert!(covered.into_iter().all(|byte| byte), "{form:?}");
                }
            }
        }
        assert!(cut.into_iter().all(|cut| cut > 0), "{cut:?}");
    }
}
