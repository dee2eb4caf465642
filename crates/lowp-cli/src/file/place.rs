//! [`Place`]: where bytes of some rows of a tensor lie among those of all.

use lowp_format::{Axis, BufferSpec, Code, Form, ScaleLayout};
use std::ops::Range;

/// Runs of bytes that lie a stride apart: the rows of an array whose rows are the columns of the matrix have a run each, and all other rows of
/// a matrix are one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    start: usize,
    run: usize,
    stride: usize,
}

impl Place {
    /// All bytes, or those that come first.
    pub(super) const FIRST: Self = Self::from(0);

    /// The bytes from byte `start` on.
    pub(super) const fn from(start: usize) -> Self {
        Self {
            start,
            run: usize::MAX,
            stride: 0,
        }
    }

    /// Where the bytes of rows that begin with matrix row `first`, laid out as `rows`, lie in `whole`.
    pub(super) fn of(whole: &ScaleLayout, rows: &ScaleLayout, first: usize) -> Self {
        let bytes = |layout: &ScaleLayout, entries: usize| match layout.form() {
            // Tiles follow each other, 128 entries high; entries of those have 8 bits.
            Form::Swizzled => entries * 128,
            Form::Compact | Form::Padded => layout.code().bytes(entries),
        };
        if whole.axes()[0] == Axis::Rows {
            let entry = first / whole.tile()[0];
            return Self::from(entry * whole.code().bytes(whole.padded()[1]));
        }
        Self {
            start: bytes(whole, first / whole.tile()[1]),
            run: bytes(rows, rows.padded()[1]),
            stride: bytes(whole, whole.padded()[1]),
        }
    }

    /// Whether all bytes follow each other.
    pub(super) fn is_one_run(&self) -> bool {
        self.run == usize::MAX || self.run == self.stride
    }

    /// Where the `len` bytes from byte `from` on lie: ranges of them, each with its place.
    pub(super) fn pieces(
        &self,
        from: usize,
        len: usize,
    ) -> impl Iterator<Item = (Range<usize>, usize)> {
        let Self { start, run, stride } = *self;
        let one = self.is_one_run();
        let mut at = 0;
        std::iter::from_fn(move || {
            if at == len {
                return None;
            }
            let (left, place) = match one {
                true => (len - at, start + from + at),
                false => {
                    let (number, within) = ((from + at) / run, (from + at) % run);
                    (run - within, start + number * stride + within)
                }
            };
            let piece = at..at + left.min(len - at);
            at = piece.end;
            Some((piece, place))
        })
    }
}

/// Whether an entry of `layout` stands for all rows: the scale of a column.
pub(super) fn is_of_all_rows(layout: &ScaleLayout) -> bool {
    let axis = usize::from(layout.axes()[0] != Axis::Rows);
    layout.tile()[axis] == BufferSpec::WHOLE
}

/// Whether the `rows` of `layout`, which are not the last of their matrix, fill what they take: those behind them follow without padding.
pub(super) fn is_filled(layout: &ScaleLayout, rows: usize) -> bool {
    let axis = usize::from(layout.axes()[0] != Axis::Rows);
    let entries = layout.entries()[axis];
    let whole_bytes = axis == 0 || layout.code() != Code::E2M1 || entries.is_multiple_of(2);
    let unit = match (layout.form(), axis) {
        (Form::Swizzled, 0) => 128,
        (Form::Swizzled, _) => 4,
        (Form::Compact | Form::Padded, _) => 1,
    };
    let whole_blocks = rows.is_multiple_of(layout.tile()[axis]);
    whole_bytes && whole_blocks && entries == layout.padded()[axis] && entries.is_multiple_of(unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_format::{AnyRecipe, Orientation, Recipe, Shape, Usage};

    /// Every entry of rows lies where their place says, whatever the recipe, the orientation and the form.
    #[test]
    fn rows_lie_in_the_whole_where_their_place_says() {
        let full = Shape::new(1100, 320);
        let mut cut = [0; 3];
        for (recipe, (number, step)) in AnyRecipe::low_precision().into_iter().flat_map(|recipe| {
            [32, 128, 512]
                .into_iter()
                .enumerate()
                .map(move |of| (recipe, of))
        }) {
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
                    let first = of(Shape::new(step, full.cols)).expect("the form of the whole");
                    let filled = is_filled(&first, step);
                    assert!(filled || step < 512, "{form:?} {first:?}");
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
                        assert!(rows < step || is_filled(&part, rows), "{form:?} {part:?}");
                        let place = Place::of(&whole, &part, first);
                        let mut at = vec![0; part.bytes()];
                        // In two pieces that end anywhere.
                        for (from, len) in [
                            (0, part.bytes() / 3),
                            (part.bytes() / 3, part.bytes() - part.bytes() / 3),
                        ] {
                            for (piece, start) in place.pieces(from, len) {
                                for (at, start) in at[from..][piece].iter_mut().zip(start..) {
                                    *at = start;
                                    assert!(!covered[start], "{form:?}");
                                    covered[start] = true;
                                }
                            }
                        }
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
