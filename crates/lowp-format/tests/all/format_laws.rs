//! The laws of shapes, cuts and layouts, over every recipe in the list.

use std::collections::HashSet;

use lowp_format::{
    AnyRecipe, Axis, BufferSpec, Code, Extent, Form, FormatError, Orientation, Origin, PaddedForm,
    Part, QuantizedTensor, Recipe, RowCuts, ScaleLayout, Shape, Usage,
};
use proptest::prelude::*;

fn recipes() -> impl Strategy<Value = AnyRecipe> {
    proptest::sample::select(AnyRecipe::all())
}

fn usages() -> impl Strategy<Value = Usage> {
    proptest::sample::select(vec![Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH])
}

/// The columns that a recipe can take are the multiples of this.
fn col_quantum(recipe: AnyRecipe) -> usize {
    (1..)
        .find(|&cols| recipe.check(Shape::new(1, cols)).is_ok())
        .expect("some width")
}

/// A recipe with a shape that it can take; no rows included.
fn tensors() -> impl Strategy<Value = (AnyRecipe, Shape)> {
    (recipes(), 0..300usize, 1..10usize)
        .prop_map(|(recipe, rows, blocks)| (recipe, Shape::new(rows, blocks * col_quantum(recipe))))
}

proptest! {
    #[test]
    fn cuts_tile_the_rows(rows in 0..5000usize, world in 1..40usize, quantum in 1..200usize) {
        let cuts = RowCuts::new(rows, world, quantum).unwrap();
        prop_assert_eq!((cuts.world(), cuts.rows()), (world, rows));
        let chunk = rows.div_ceil(world).next_multiple_of(quantum);
        let mut end = 0;
        for range in cuts.ranges() {
            prop_assert_eq!(range.start, end);
            end = range.end;
            // A short range is the last one with rows.
            prop_assert!(range.len() == chunk || end == rows);
            prop_assert!(range.is_empty() || range.start % quantum == 0);
        }
        prop_assert_eq!(end, rows);
        prop_assert_eq!(cuts.off_quantum(quantum), None);
        let ranges: Vec<_> = cuts.ranges().collect();
        prop_assert_eq!(&(0..world).map(|rank| cuts.range(rank)).collect::<Vec<_>>(), &ranges);
        prop_assert_eq!(RowCuts::from_ranges(&ranges).unwrap(), cuts);
    }

    #[test]
    fn shards_have_the_bytes_of_the_whole((recipe, shape) in tensors(), world in 1..10usize) {
        let cuts = RowCuts::new(shape.rows, world, recipe.row_quantum(Usage::BOTH)).unwrap();
        for spec in recipe.buffers(Usage::BOTH) {
            if spec.origin == Origin::Quantized {
                let shards = cuts.ranges().map(|range| spec.bytes(shape.with_rows(range.len())));
                prop_assert_eq!(shards.sum::<usize>(), spec.bytes(shape), "{}", spec.key);
            }
        }
    }

    #[test]
    fn a_tensor_serves_what_it_was_made_for((recipe, shape) in tensors(), usage in usages()) {
        let tensor: QuantizedTensor<usize> =
            QuantizedTensor::new(recipe, shape, usage, |_, bytes| Ok::<_, FormatError>(bytes)).unwrap();
        prop_assert!(tensor.usage().contains(usage));
        prop_assert_eq!(tensor.bytes(), tensor.buffers().iter().map(|b| b.storage).sum::<usize>());
        for orientation in Orientation::ALL {
            let served = tensor.usage().contains(orientation.usage());
            prop_assert_eq!(tensor.data(orientation).is_ok(), served);
        }
        for buffer in tensor.buffers() {
            prop_assert_eq!(tensor.buffer(buffer.spec.key), Ok(buffer));
        }
        let doubled = tensor.try_map(|b| Ok::<_, FormatError>(2 * b.storage)).unwrap();
        prop_assert_eq!(doubled.buffers().iter().map(|b| b.storage).sum::<usize>(), 2 * tensor.bytes());
    }

    #[test]
    fn only_multiples_of_the_column_quantum_are_taken(recipe in recipes(), cols in 1..200usize) {
        let multiple = col_quantum(recipe);
        let shape = Shape::new(3, cols);
        let expected = if cols % multiple == 0 {
            Ok(())
        } else {
            Err(FormatError::Columns { recipe: recipe.name(), shape, multiple })
        };
        prop_assert_eq!(recipe.check(shape), expected);
    }
}

proptest! {
    // Every entry of every buffer in nine conversions: each case is long.
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_form_leads_back_to_every_other((recipe, shape) in tensors()) {
        for spec in recipe.buffers(Usage::BOTH) {
            for orientation in spec.key.usage.orientations() {
                let layout = |form| ScaleLayout::new(&spec, shape, orientation, form).ok();
                let compact = layout(Form::Compact).unwrap();
                prop_assert_eq!(compact.bytes(), spec.bytes(shape));
                let values: Vec<usize> = (0..slots(&compact)).collect();
                for a in Form::ALL.into_iter().filter_map(layout) {
                    let in_a = repack(&compact, &a, &values);
                    prop_assert_eq!(&repack(&a, &compact, &in_a)[..], &kept(&compact, &values)[..]);
                    for b in Form::ALL.into_iter().filter_map(layout) {
                        let in_b = repack(&a, &b, &in_a);
                        prop_assert_eq!(&in_b, &repack(&compact, &b, &values));
                    }
                }
            }
        }
    }
}

/// Positions in a buffer, padding included.
fn slots(layout: &ScaleLayout) -> usize {
    layout.bytes() * 8 / layout.code().bits()
}

const PADDING: usize = usize::MAX;

/// Converts by the one rule of [`ScaleLayout::source`]; no two entries share a place.
fn repack(from: &ScaleLayout, to: &ScaleLayout, values: &[usize]) -> Vec<usize> {
    let mut result = vec![PADDING; slots(to)];
    let mut used = HashSet::new();
    for i in 0..to.entries()[0] {
        for j in 0..to.entries()[1] {
            let place = to.offset(i, j);
            assert_eq!(to.source(to, i, j), place, "a form is its own source");
            assert!(used.insert(place), "{i},{j} shares place {place} in {to:?}");
            result[place] = values[to.source(from, i, j)];
        }
    }
    result
}

/// `values` with the places that hold no entry (half a byte at the end of a row) as padding.
fn kept(layout: &ScaleLayout, values: &[usize]) -> Vec<usize> {
    repack(layout, layout, values)
}

#[test]
fn an_orientation_is_a_part_of_both() {
    for recipe in AnyRecipe::all() {
        let both = recipe.buffers(Usage::BOTH);
        let mut keys = HashSet::new();
        assert!(
            both.iter().all(|spec| keys.insert(spec.key)),
            "{}",
            recipe.name()
        );
        let one = Orientation::ALL.map(|o| recipe.buffers(o.usage()));
        for spec in one.iter().flatten() {
            assert!(both.contains(spec), "{} {}", recipe.name(), spec.key);
            keys.remove(&spec.key);
        }
        assert!(
            keys.is_empty(),
            "{}: {keys:?} serve no orientation",
            recipe.name()
        );
        for orientation in Orientation::ALL {
            let data = one[orientation as usize].iter();
            let data = data.filter(|s| s.key.serves(orientation, Part::Data));
            assert_eq!(data.count(), 1, "{} {orientation}", recipe.name());
        }
    }
}

#[test]
fn a_transpose_has_the_same_entries_the_other_way_round() {
    for recipe in AnyRecipe::all() {
        let both = recipe.buffers(Usage::BOTH);
        for spec in &both {
            if let Origin::TransposeOf(key) = spec.origin {
                let from = both
                    .iter()
                    .find(|s| s.key == key)
                    .expect("the source is a buffer");
                assert_eq!(from.origin, Origin::Quantized);
                assert_eq!((spec.code, spec.block()), (from.code, from.block()));
                assert_eq!(spec.axes, [from.axes[1], from.axes[0]]);
            }
        }
    }
}

/// Storage that serves an orientation twice does not take it away.
#[test]
fn usage_is_the_union_over_data_buffers() {
    let shape = Shape::new(4, 8);
    let recipe = AnyRecipe::all()[0];
    let data = |usage| {
        BufferSpec::data(
            usage,
            Code::F32,
            [Axis::Rows, Axis::Cols],
            Origin::Quantized,
        )
    };
    for (usages, union) in [
        (&[Usage::ROWWISE][..], Usage::ROWWISE),
        (&[Usage::ROWWISE, Usage::COLUMNWISE], Usage::BOTH),
        (&[Usage::BOTH, Usage::ROWWISE], Usage::BOTH),
        (&[], Usage::empty()),
    ] {
        let specs = usages.iter().copied().map(data);
        let tensor: QuantizedTensor<(), _> =
            QuantizedTensor::with_buffers(recipe, shape, specs, |_, _| Ok::<_, FormatError>(()))
                .unwrap();
        assert_eq!(tensor.usage(), union);
    }
}

#[test]
fn cuts_that_do_not_tile_are_rejected() {
    assert_eq!(RowCuts::new(8, 0, 1), Err(FormatError::EmptyWorld));
    assert_eq!(RowCuts::from_ranges(&[]), Err(FormatError::EmptyWorld));
    for ranges in [[0..4, 5..8], [0..4, 3..8], [1..4, 4..8]] {
        let error = RowCuts::from_ranges(&ranges).unwrap_err();
        assert!(
            matches!(error, FormatError::NotATiling { rows: 8, .. }),
            "{error}"
        );
    }
    let backwards = [0..4, std::ops::Range { start: 4, end: 2 }, 2..8];
    let error = RowCuts::from_ranges(&backwards).unwrap_err();
    assert!(
        matches!(error, FormatError::NotATiling { rank: 1, .. }),
        "{error}"
    );
    // Empty ranges anywhere are legal.
    assert_eq!(RowCuts::from_ranges(&[0..0, 0..4, 4..4]).unwrap().rows(), 4);
}

#[test]
fn shapes_flatten_and_parse() {
    assert_eq!(Shape::from_dims(&[2, 3, 4]), Ok(Shape::new(6, 4)));
    assert_eq!("2x3x4".parse(), Ok(Shape::new(6, 4)));
    assert_eq!("4096X1024".parse(), Ok(Shape::new(4096, 1024)));
    assert_eq!(
        Shape::new(17, 32).to_string().parse(),
        Ok(Shape::new(17, 32))
    );
    for text in ["", "x", "4", "4x", "4x-1", "4*4"] {
        assert!(text.parse::<Shape>().is_err(), "{text}");
    }
    assert!(matches!(
        Shape::from_dims(&[4]),
        Err(FormatError::NotAMatrix { .. })
    ));
    assert!(matches!(
        Shape::from_dims(&[usize::MAX, 2]),
        Err(FormatError::TooLarge { .. })
    ));
}

#[test]
fn half_bytes_end_a_row() {
    assert_eq!([0, 1, 2, 3].map(|n| Code::E2M1.bytes(n)), [0, 1, 1, 2]);
    assert_eq!(Code::F32.bytes(3), 12);
    for code in Code::ALL {
        assert_eq!(
            code.entries_per_byte(),
            if code.bits() == 4 { 2 } else { 1 }
        );
    }
}

/// The definition of docs/scale-layouts.md, for a matrix of `inner` entries per outer index.
fn swizzled_offset(i: usize, j: usize, inner: usize) -> usize {
    ((i / 128) * inner.div_ceil(4) + j / 4) * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + j % 4
}

#[test]
fn swizzled_scales_lie_in_128x4_tiles() {
    for (i, j, inner, offset) in [
        (37, 6, 8, 598),
        (200, 6, 8, 1674),
        (0, 0, 4, 0),
        (0, 1, 4, 1),
        (1, 0, 4, 16),
        (32, 0, 4, 4),
        (127, 3, 4, 511),
    ] {
        assert_eq!(swizzled_offset(i, j, inner), offset);
    }
    let shape = Shape::new(256, 288);
    let mut checked = 0;
    for recipe in AnyRecipe::all()
        .into_iter()
        .filter(|r| r.check(shape).is_ok())
    {
        for spec in recipe.buffers(Usage::BOTH) {
            for orientation in spec.key.usage.orientations() {
                let Ok(layout) = ScaleLayout::new(&spec, shape, orientation, Form::Swizzled) else {
                    continue;
                };
                // Blocks run along the inner axis, whatever the order of the buffer is.
                let [rows, cols] = spec.block();
                let (along_rows, inner) = match orientation {
                    Orientation::Rowwise => (false, shape.cols.div_ceil(cols)),
                    Orientation::Columnwise => (true, shape.rows.div_ceil(rows)),
                };
                for row in 0..shape.rows {
                    for col in 0..shape.cols {
                        let (i, j) = if along_rows {
                            (col, row / rows)
                        } else {
                            (row, col / cols)
                        };
                        let offset = swizzled_offset(i, j, inner);
                        assert_eq!(
                            layout.offset_of([row, col]),
                            offset,
                            "{} {row},{col}",
                            spec.key
                        );
                    }
                }
                checked += 1;
            }
        }
    }
    assert!(checked > 0);
}

#[test]
fn only_block_scales_have_a_swizzled_form() {
    for recipe in AnyRecipe::all() {
        for spec in recipe.buffers(Usage::BOTH) {
            let shape = Shape::new(32, 32);
            for orientation in spec.key.usage.orientations() {
                let swizzled = ScaleLayout::new(&spec, shape, orientation, Form::Swizzled);
                // In f32 they have forms of their own.
                let tiled = spec.key.part == Part::BlockScale && spec.code.bits() == 8;
                assert_eq!(swizzled.is_ok(), tiled, "{}", spec.key);
            }
        }
    }
}

/// Scales or amaxes of lines: one of each row for the rowwise orientation, one of each column for the columnwise one,
/// whatever the other side is. They have no other form, and no cut goes through them.
#[test]
fn lines_have_an_entry_each() {
    for (rows, cols) in [(0, 0), (0, 5), (5, 0), (1, 1), (17, 40), (128, 3)] {
        let shape = Shape::new(rows, cols);
        for (orientation, entries) in Orientation::ALL.into_iter().zip([rows, cols]) {
            let usage = orientation.usage();
            for part in [Part::DecodeScale, Part::Amax] {
                let spec = BufferSpec::of_lines(usage, part, orientation, Origin::Quantized);
                assert_eq!(spec.check(shape), Ok(()));
                assert_eq!(spec.entries(shape), [entries, 1]);
                assert_eq!(spec.bytes(shape), 4 * entries);
                assert_eq!(spec.block(), Extent::Line.block(orientation));
                assert_eq!(Extent::Line.entries(orientation, shape), entries);
                assert_eq!((spec.row_quantum(), spec.col_quantum()), (1, 1));
                assert!(!spec.is_scalar());
                for form in Form::ALL {
                    let layout = ScaleLayout::new(&spec, shape, orientation, form);
                    let bytes = layout.map(|layout| layout.bytes()).ok();
                    assert_eq!(bytes, (form != Form::Swizzled).then_some(4 * entries));
                }
                let scalar = BufferSpec::of_tensor(usage, part);
                assert!(scalar.is_scalar() && scalar.bytes(shape) == 4);
                assert_eq!(scalar.block(), Extent::Tensor.block(orientation));
                assert_eq!(Extent::Tensor.entries(orientation, shape), 1);
            }
        }
    }
}

/// Blocks with f32 scales may have fewer columns at the edge; others may not (docs/numerics.md 8).
#[test]
fn only_f32_scales_have_partial_blocks() {
    for recipe in AnyRecipe::all() {
        let specs = recipe.buffers(Usage::BOTH);
        let scales = || {
            specs
                .iter()
                .filter(|spec| spec.key.part == Part::BlockScale)
        };
        let floats = scales().count() > 0 && scales().all(|spec| spec.code == Code::F32);
        let any = recipe.check(Shape::new(1, 1)).is_ok();
        assert_eq!(any, floats || scales().count() == 0, "{}", recipe.name());
        for spec in scales().filter(|spec| spec.code == Code::F32) {
            let [height, width] = spec.block();
            let blocks = |rows: usize, cols: usize| rows.div_ceil(height) * cols.div_ceil(width);
            for (rows, cols) in [(1, 1), (130, 140), (128, 256), (3, 129)] {
                let shape = Shape::new(rows, cols);
                assert_eq!(spec.bytes(shape), 4 * blocks(rows, cols), "{}", spec.key);
            }
        }
    }
}

/// What a caller can write into the public fields of a description, but no buffer has.
#[test]
fn descriptions_that_no_buffer_has_are_rejected() {
    let (rows, cols) = (Axis::Rows, Axis::Cols);
    let good = BufferSpec::block_scale(
        Usage::ROWWISE,
        Code::E8M0,
        [rows, cols],
        [1, 32],
        PaddedForm::TILES_128X4,
        Origin::Quantized,
    );
    let shape = Shape::new(100, 96);
    let with = |set: fn(&mut BufferSpec, usize), n| {
        let mut spec = good;
        set(&mut spec, n);
        spec
    };
    let fields: [fn(&mut BufferSpec, usize); 4] = [
        |spec, n| spec.tile[0] = n,
        |spec, n| spec.tile[1] = n,
        |spec, n| spec.padded.outer = n,
        |spec, n| spec.padded.block = n,
    ];
    for (number, field) in fields.into_iter().enumerate() {
        // A tile side may be as long as the matrix.
        let whole = if number < 2 {
            usize::MAX - 1
        } else {
            BufferSpec::WHOLE
        };
        for n in [0, BufferSpec::MAX_SIDE + 1, 1 << 32, whole] {
            let spec = with(field, n);
            for (orientation, form) in Orientation::ALL.into_iter().zip(Form::ALL) {
                let error = ScaleLayout::new(&spec, shape, orientation, form).unwrap_err();
                assert!(error.to_string().contains(&format!("not {n}")), "{error}");
            }
        }
        assert_eq!(with(field, 1).check(shape), Ok(()));
        assert_eq!(with(field, BufferSpec::MAX_SIDE).check(shape), Ok(()));
        let whole = with(field, BufferSpec::WHOLE).check(shape);
        assert_eq!(whole.is_ok(), number < 2);
    }
    for axes in [[rows; 2], [cols; 2]] {
        let error = BufferSpec { axes, ..good }.check(shape).unwrap_err();
        assert!(error.to_string().contains("same logical axis"), "{error}");
    }
    // The largest layouts are computed without overflow.
    let widest = PaddedForm {
        outer: 4096,
        block: 4096,
        repeat: true,
    };
    let widest = BufferSpec {
        padded: widest,
        code: Code::F32,
        tile: [1, 1],
        ..good
    };
    for (rows, cols) in [(1 << 48, 1), (1, 1 << 48), (1 << 24, 1 << 24), (1 << 48, 0)] {
        let shape = Shape::new(rows, cols);
        let padded = ScaleLayout::new(&widest, shape, Orientation::Rowwise, Form::Padded).unwrap();
        assert!(padded.bytes() >= 4 * rows * cols);
    }
    for (rows, cols) in [((1 << 48) + 1, 1), (1 << 49, 0), (usize::MAX, usize::MAX)] {
        let error = widest.check(Shape::new(rows, cols)).unwrap_err();
        assert!(matches!(error, FormatError::TooLarge { .. }), "{error}");
    }
}
