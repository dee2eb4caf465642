//! The JSON form of the plan of one weight.

use super::args::Weight;
use crate::{output, reshard};
use anyhow::Result;
use lowp_format::{
    BufferSpec, Form, GatherPlan, GatherStep, Orientation, Origin, Phase, PieceLayout, Recipe,
    ScaleLayout, Shape, Usage,
};
use serde::Serialize;
use serde_json::Value;

#[derive(Serialize)]
struct Document<'a> {
    recipe: &'a str,
    shape: [usize; 2],
    world: usize,
    usage: &'static str,
    /// Absent where there is one phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    reshard_after_forward: Option<Value>,
    /// Rows of each rank.
    rows: Vec<usize>,
    buffers: Vec<Buffer>,
    /// Bytes that the shards of one copy of the weight take, a replicated scale counted once.
    stored_bytes: usize,
    /// Bytes that each rank stores, its own copy of a replicated scale included.
    rank_stored_bytes: Vec<usize>,
    phases: Vec<PhaseRecord>,
    wire_bytes: usize,
    wire_bytes_per_weight: f64,
}

#[derive(Serialize)]
struct Buffer {
    name: String,
    code: &'static str,
    /// `quantized`, `replicated`, or the buffer that this one is derived from.
    origin: String,
    entries: [usize; 2],
    bytes: usize,
    row_quantum: usize,
    forms: Vec<Forms>,
}

/// Layouts for interchange, which depend on the orientation that the buffer is used for.
#[derive(Serialize)]
struct Forms {
    used: &'static str,
    padded: [usize; 2],
    padded_bytes: usize,
    swizzled_bytes: Option<usize>,
}

#[derive(Serialize)]
struct PhaseRecord {
    phase: &'static str,
    steps: Vec<Step>,
    wire_bytes: usize,
    wire_bytes_per_weight: f64,
}

#[derive(Serialize)]
struct Step {
    step: &'static str,
    buffer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    transport: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    /// Bytes that each rank sends.
    rank_bytes: Vec<usize>,
    wire_bytes: usize,
    kept: bool,
}

/// The whole document as text.
pub(super) fn render(
    recipe: &impl Recipe,
    weight: Weight<'_>,
    plans: &[(Phase, GatherPlan)],
) -> Result<String> {
    let Weight { shape, usage, .. } = weight;
    let buffers = recipe.buffers(usage);
    let wire_bytes = plans.iter().map(|(_, plan)| plan.wire_bytes()).sum();
    let rows: Vec<usize> = plans
        .first()
        .map(|(_, plan)| plan.cuts.ranges().map(|r| r.len()).collect())
        .unwrap_or_default();
    let stored = recipe.stored(usage);
    let stored = |shape: Shape| stored.iter().map(|spec| spec.bytes(shape)).sum();
    let document = Document {
        recipe: weight.recipe,
        shape: [shape.rows, shape.cols],
        world: weight.world,
        usage: usage.label(),
        reshard_after_forward: (usage == Usage::BOTH)
            .then(|| reshard::value(weight.reshard.unwrap_or_default())),
        buffers: buffers
            .iter()
            .map(|spec| buffer(spec, shape, usage))
            .collect::<Result<_>>()?,
        stored_bytes: stored(shape),
        rank_stored_bytes: rows
            .iter()
            .map(|&rows| stored(shape.with_rows(rows)))
            .collect(),
        rows,
        phases: plans
            .iter()
            .map(|(phase, plan)| phase_record(*phase, plan))
            .collect(),
        wire_bytes,
        wire_bytes_per_weight: wire_bytes as f64 / shape.elements() as f64,
    };
    output::json(&document)
}

fn buffer(spec: &BufferSpec, shape: Shape, usage: Usage) -> Result<Buffer> {
    let forms = |orientation: Orientation| {
        let layout = |form| ScaleLayout::new(spec, shape, orientation, form);
        let padded = layout(Form::Padded)?;
        Ok(Forms {
            used: orientation.usage().label(),
            padded: padded.padded(),
            padded_bytes: padded.bytes(),
            swizzled_bytes: layout(Form::Swizzled).ok().map(|swizzled| swizzled.bytes()),
        })
    };
    Ok(Buffer {
        name: spec.key.to_string(),
        code: spec.code.name(),
        origin: match spec.origin {
            Origin::Quantized => "quantized".to_owned(),
            Origin::Replicated => "replicated".to_owned(),
            Origin::TransposeOf(from) => from.to_string(),
        },
        entries: spec.entries(shape),
        bytes: spec.bytes(shape),
        row_quantum: spec.row_quantum(),
        forms: (spec.key.usage & usage)
            .orientations()
            .map(forms)
            .collect::<Result<_>>()?,
    })
}

fn phase_record(phase: Phase, plan: &GatherPlan) -> PhaseRecord {
    PhaseRecord {
        phase: phase.name(),
        steps: plan.steps.iter().map(step).collect(),
        wire_bytes: plan.wire_bytes(),
        wire_bytes_per_weight: plan.wire_bytes() as f64 / plan.full.elements() as f64,
    }
}

fn step(step: &GatherStep) -> Step {
    let (name, transport, from, rank_bytes, kept) = match step {
        GatherStep::Concat {
            layout,
            pieces,
            keep,
            ..
        } => {
            let transport = match layout {
                PieceLayout::Rows => "rows",
                PieceLayout::Interleave => "interleave",
                PieceLayout::Transpose => "transpose",
                PieceLayout::TilesBelow | PieceLayout::TilesBeside => "tiles",
            };
            ("gather", Some(transport), None, pieces.clone(), *keep)
        }
        GatherStep::Derive { from, .. } => {
            ("derive", None, Some(from.to_string()), Vec::new(), true)
        }
        GatherStep::Replicated { .. } => ("replicated", None, None, Vec::new(), true),
    };
    Step {
        step: name,
        buffer: step.spec().key.to_string(),
        transport,
        from,
        rank_bytes,
        wire_bytes: step.wire_bytes(),
        kept,
    }
}
