//! Readable snapshots: the buffers and gathers of every recipe, and drawings of the layouts.

use lowp_format::{
    AnyRecipe, Axis, BufferSpec, Code, Form, FormatError, Orientation, Origin, PaddedForm, Phase,
    PhasePlans, Recipe, RowCuts, ScaleLayout, Shape, Usage, buffers_table, gather_table,
    layout_map,
};

/// One row, awkward edges, a shape off the FP4 and MX blocks, and whole blocks.
const SHAPES: [Shape; 5] = [
    Shape::new(1, 64),
    Shape::new(17, 32),
    Shape::new(136, 152),
    Shape::new(136, 160),
    Shape::new(256, 128),
];

/// More ranks than blocks, a short last rank with empty ones after it, and an even cut.
const GATHERS: [(Shape, usize); 4] = [
    (Shape::new(17, 32), 3),
    (Shape::new(136, 160), 2),
    (Shape::new(136, 160), 8),
    (Shape::new(256, 128), 2),
];

/// A rejected shape is part of the layout: its message is what the user sees.
fn or_error(text: Result<String, FormatError>) -> String {
    text.unwrap_or_else(|error| format!("error: {error}\n"))
}

fn gathers(recipe: AnyRecipe, full: Shape, world: usize) -> Result<String, FormatError> {
    let cuts = RowCuts::new(full.rows, world, recipe.row_quantum(Usage::BOTH))?;
    let mut text = String::new();
    for reshard in [true, false] {
        let plans = PhasePlans::new(&recipe, full, &cuts, reshard)?;
        let phases = Phase::ALL.map(|phase| (phase.name(), plans.phase(phase)));
        text += &format!(
            "reshard after forward: {reshard}\n{}\n",
            gather_table(&phases)
        );
    }
    Ok(text)
}

#[test]
fn buffers() {
    for recipe in AnyRecipe::all() {
        let tables = SHAPES.map(|shape| or_error(buffers_table(&recipe, shape, Usage::BOTH)));
        insta::assert_snapshot!(format!("buffers_{}", recipe.name()), tables.join("\n"));
    }
}

#[test]
fn gather_plans() {
    for recipe in AnyRecipe::all() {
        let tables = GATHERS.map(|(full, world)| or_error(gathers(recipe, full, world)));
        insta::assert_snapshot!(format!("gather_{}", recipe.name()), tables.join("\n"));
    }
}

/// Scales of 40 x 6 blocks of 1x32: two tiles, both partly padding.
#[test]
fn swizzle() {
    let axes = [Axis::Rows, Axis::Cols];
    let pad = PaddedForm::TILES_128X4;
    let block = [1, 32];
    let spec = BufferSpec::block_scale(
        Usage::ROWWISE,
        Code::E8M0,
        axes,
        block,
        pad,
        Origin::Quantized,
    );
    let shape = Shape::new(40, 6 * 32);
    let maps = Form::ALL.map(|form| {
        let layout = ScaleLayout::new(&spec, shape, Orientation::Rowwise, form);
        layout_map(&layout.expect("block scales have every form"))
    });
    insta::assert_snapshot!("swizzle_40x6", maps.join("\n"));
}

/// A 2-D scale is stored once per tile; the operand forms repeat it along the outer axis.
#[test]
fn repeated_2d_scales() {
    let axes = [Axis::Rows, Axis::Cols];
    let pad = PaddedForm::TILES_128X4;
    let block = [16, 16];
    let spec =
        BufferSpec::block_scale(Usage::BOTH, Code::E4M3, axes, block, pad, Origin::Quantized);
    let shape = Shape::new(32, 48);
    let mut text = String::new();
    for orientation in Orientation::ALL {
        for form in Form::ALL {
            let layout = ScaleLayout::new(&spec, shape, orientation, form);
            let layout = layout.expect("block scales have every form");
            let [outer, inner] = layout.entries();
            text += &format!("{orientation} {}: {outer}x{inner} entries", form.name());
            text += &format!(" in {} bytes\n", layout.bytes());
        }
    }
    insta::assert_snapshot!("repeated_2d_scales", text);
}
