//! What `--recipe` takes: the recipes, from their own answers, and the modifiers.

use super::variant::{MODIFIERS, Variant};
use crate::columns::Columns;
use crate::usage::UsageError;
use anyhow::Result;
use lowp_format::{AnyRecipe, Part, PhasePlans, Recipe, Role, RowCuts, ScaleSource, Shape, Usage};

/// The weight and the ranks that the bytes are told for.
const SHAPE: Shape = Shape::new(4096, 4096);
const WORLD: usize = 8;

/// A table of recipes, then the modifiers.
///
/// # Errors
/// A recipe that cannot take the example shape.
pub(crate) fn render() -> Result<String> {
    let mut recipes = Columns::new(
        &["recipe", "elements", "scales", "from", "stored", "sent"],
        &[0, 1, 2, 3],
    );
    for recipe in AnyRecipe::all() {
        let cuts = RowCuts::new(SHAPE.rows, WORLD, recipe.row_quantum(Usage::BOTH))
            .map_err(UsageError::from)?;
        let sent = PhasePlans::new(&recipe, SHAPE, &cuts, true)?.wire_bytes();
        let stored = recipe.stored(Usage::BOTH);
        let stored: usize = stored.iter().map(|spec| spec.bytes(SHAPE)).sum();
        let per_weight = |bytes: usize| format!("{:.3}", bytes as f64 / SHAPE.elements() as f64);
        recipes.row([
            recipe.name().to_owned(),
            recipe.kernel().element.to_string(),
            scales(&recipe),
            source(recipe.scale_source()).to_owned(),
            per_weight(stored),
            per_weight(sent),
        ]);
    }
    let mut modifiers = Columns::new(&["modifier", "what it does", "of"], &[0, 1, 2]);
    for (name, what) in MODIFIERS {
        modifiers.row([format!("+{name}"), what.to_owned(), takers(name)]);
    }
    Ok(format!(
        "{}Bytes per weight of a {SHAPE} weight over {WORLD} ranks, all together; sent in one step that gathers for\n\
         forward and again for backward. `lowp plan` tells them for any weight.\n\n\
         {}A modified recipe is NAME+MODIFIER+MODIFIER; most are controls that should train worse.\n",
        recipes.render(),
        modifiers.render()
    ))
}

/// The names alone, for the help text.
pub(crate) fn names() -> String {
    let modifiers: Vec<_> = MODIFIERS
        .iter()
        .map(|(name, _)| format!("+{name}"))
        .collect();
    format!(
        "Recipes: {}\nModifiers: {}\n`lowp train --list` tells what each is.\n",
        AnyRecipe::names().join(", "),
        modifiers.join(", ")
    )
}

/// `E8M0 per 1x32 and 32x1`: the scale buffers.
fn scales(recipe: &AnyRecipe) -> String {
    let mut scales: Vec<(String, String)> = Vec::new();
    for spec in recipe.buffers(Usage::BOTH) {
        let extent = match spec.key.part {
            Part::Data => continue,
            Part::BlockScale => spec.block().map(|n| n.to_string()).join("x"),
            Part::DecodeScale | Part::TensorAmax => "tensor".to_owned(),
        };
        let code = spec.code.to_string();
        match scales.iter_mut().find(|(known, _)| *known == code) {
            Some((_, extents)) if extents.split(" and ").any(|known| known == extent) => {}
            Some((_, extents)) => *extents += &format!(" and {extent}"),
            None => scales.push((code, extent)),
        }
    }
    let text: Vec<_> = scales
        .iter()
        .map(|(code, extents)| format!("{code} per {extents}"))
        .collect();
    if text.is_empty() {
        "-".to_owned()
    } else {
        text.join(", ")
    }
}

fn source(source: ScaleSource) -> &'static str {
    match source {
        ScaleSource::None => "-",
        ScaleSource::History { .. } => "amaxes of earlier steps",
        ScaleSource::TensorAmax { .. } => "tensor amax",
        ScaleSource::BlockAmax => "block amaxes",
        ScaleSource::TensorAndBlockAmax => "tensor and block amaxes",
    }
}

/// The recipes that a modifier changes.
fn takers(modifier: &str) -> String {
    let all = AnyRecipe::low_precision();
    let takers: Vec<&str> = all
        .iter()
        .filter(|recipe| changes(recipe, modifier))
        .map(Recipe::name)
        .collect();
    if takers.len() == all.len() {
        "all below 16 bits".to_owned()
    } else {
        takers.join(", ")
    }
}

/// Whether `recipe` takes the modifier and answers anything differently then.
fn changes(recipe: &AnyRecipe, modifier: &str) -> bool {
    let Ok(variant) = format!("{}+{modifier}", recipe.name()).parse::<Variant>() else {
        return false;
    };
    let [rowwise, both] = [Usage::ROWWISE, Usage::BOTH];
    let operand = |role| variant.operand(role) != recipe.operand(role);
    variant.kernel() != recipe.kernel()
        || variant.options() != recipe.options()
        || variant.buffers(rowwise) != recipe.buffers(rowwise)
        || variant.buffers(both) != recipe.buffers(both)
        || operand(Role::Activation)
        || operand(Role::Gradient)
}
