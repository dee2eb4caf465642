//! [`RecipeWords`]: a recipe in words, from its own answers.

use std::fmt;

use crate::{AnyRecipe, BufferSpec, Extent, Part, Recipe, Role, ScaleRule, Usage, elements_of};

/// What a recipe says of weights. As text it is one line: `F32, no scales` or
/// `E4M3, scales E8M0 per 1x32 and 32x1, from block amaxes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecipeWords {
    /// The codes of elements.
    pub elements: String,
    /// The codes of scales, and what each belongs to.
    pub scales: Option<String>,
    /// What the scales follow from.
    pub source: Option<String>,
}

impl RecipeWords {
    /// What `recipe` says.
    pub fn of(recipe: &AnyRecipe) -> Self {
        Self {
            elements: elements_of(recipe),
            scales: scales(recipe),
            source: source(recipe),
        }
    }
}

impl fmt::Display for RecipeWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.elements)?;
        match &self.scales {
            Some(scales) => write!(f, ", scales {scales}")?,
            None => f.write_str(", no scales")?,
        }
        match &self.source {
            Some(source) => write!(f, ", from {source}"),
            None => Ok(()),
        }
    }
}

/// `E8M0 per 1x32 and 32x1`: the scale buffers.
fn scales(recipe: &AnyRecipe) -> Option<String> {
    let mut scales: Vec<(String, String)> = Vec::new();
    for spec in recipe.buffers(Usage::BOTH) {
        let extent = match spec.key.part {
            Part::Data => continue,
            Part::BlockScale => spec.block().map(|n| n.to_string()).join("x"),
            Part::DecodeScale | Part::Amax => match spec.block() {
                [BufferSpec::WHOLE, BufferSpec::WHOLE] => "tensor".to_owned(),
                [_, BufferSpec::WHOLE] => "row".to_owned(),
                _ => "column".to_owned(),
            },
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
    (!text.is_empty()).then(|| text.join(", "))
}

/// `tensor and block amaxes`: what the scales follow from.
fn source(recipe: &AnyRecipe) -> Option<String> {
    let kernels = recipe.quantizers(Role::Weight).kernels();
    let rules = kernels.map(|key| key.scale);
    if rules.iter().any(ScaleRule::is_delayed) {
        return Some("amaxes of earlier steps".to_owned());
    }
    let has = |extent| {
        let of = |rule: &ScaleRule| matches!(rule.outer(), Some((found, _)) if found == extent);
        rules.iter().any(of)
    };
    let sources = [
        (has(Extent::Tensor), "tensor"),
        (has(Extent::Line), "line"),
        (kernels.iter().any(|key| key.block.is_some()), "block"),
    ];
    let sources = sources.into_iter().filter(|(is, _)| *is);
    let sources: Vec<&str> = sources.map(|(_, what)| what).collect();
    match sources[..] {
        [] => None,
        ["tensor"] => Some("tensor amax".to_owned()),
        _ => Some(format!("{} amaxes", sources.join(" and "))),
    }
}
