//! [`FusedLayers`]: weights that engines run as one, and whether one scale serves them all.

use super::weight::Weight;
use crate::error::Result;
use std::collections::BTreeMap;

/// The last parts of the names of layers that vLLM and SGLang run as one where their names are the same before it.
static TOGETHER: &[&[&str]] = &[
    // Llama, Mistral, Qwen, DeepSeek, and their experts.
    &["q_proj", "k_proj", "v_proj"],
    &["gate_proj", "up_proj"],
    // The experts of Mixtral, and Llama in Meta's names.
    &["w1", "w3"],
    &["wq", "wk", "wv"],
    // Latent attention.
    &["q_a_proj", "kv_a_proj_with_mqa"],
    // Linear attention of Qwen3.5.
    &["in_proj_qkv", "in_proj_z"],
    &["in_proj_b", "in_proj_a"],
    // BERT.
    &["query", "key", "value"],
];

/// The layers among `names` that engines run as one, as numbers of these.
pub fn run_as_one(names: &[&str]) -> Vec<Vec<usize>> {
    let mut found: BTreeMap<(&str, usize), Vec<usize>> = BTreeMap::new();
    for (number, name) in names.iter().enumerate() {
        let layer = name.strip_suffix(".weight").unwrap_or(name);
        let (before, last) = layer.rsplit_once('.').unwrap_or(("", layer));
        if let Some(kind) = TOGETHER.iter().position(|kind| kind.contains(&last)) {
            found.entry((before, kind)).or_default().push(number);
        }
    }
    let mut groups: Vec<Vec<usize>> = found.into_values().collect();
    groups.retain(|group| group.len() > 1);
    groups.sort_unstable();
    groups
}

/// Layers that engines run as one and that have a scale of the tensor each: their names and these scales, not all of them the same.
#[derive(Clone, Debug, PartialEq)]
pub struct FusedLayers<'a> {
    /// The names and the scales.
    pub scales: Vec<(&'a str, f32)>,
}

impl FusedLayers<'_> {
    /// The largest of the scales over the least, of those above 0.
    pub fn spread(&self) -> f32 {
        let magnitudes = || {
            let scales = self.scales.iter().map(|(_, scale)| *scale);
            scales.filter(|scale| *scale > 0.0)
        };
        let [least, largest] =
            [f32::min, f32::max].map(|of| magnitudes().reduce(of).unwrap_or(1.0));
        largest / least
    }
}

/// Those of `weights`, where their target stores a scale of the tensor.
pub(super) fn find<'w>(weights: &'w [Weight<'_>]) -> Result<Vec<FusedLayers<'w>>> {
    let scaled: Vec<&Weight<'_>> = weights
        .iter()
        .filter(|w| w.scale_of_tensor().is_some())
        .collect();
    let names: Vec<&str> = scaled.iter().map(|w| &*w.tensor.name).collect();
    let mut found = Vec::new();
    for group in run_as_one(&names) {
        let mut scales = Vec::new();
        for member in group {
            scales.push((names[member], scaled[member].stored_scale()?));
        }
        let first = scales[0].1.to_bits();
        if scales.iter().any(|(_, scale)| scale.to_bits() != first) {
            found.push(FusedLayers { scales });
        }
    }
    Ok(found)
}
