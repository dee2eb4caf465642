//! Layers that have one amax, because engines run them as one: by their names, or as `--amax-group` says.

use crate::globs;
use crate::usage::UsageError;
use std::collections::BTreeMap;

/// The option that says which.
pub(crate) const OPTION: &str = "--amax-group";

/// What it takes for the layers of [`TOGETHER`], and for none. No pattern is one of these: a pattern of groups has braces.
const AUTO: &str = "auto";
const NONE: &str = "none";

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

/// Whether patterns were given, which must find something.
pub(crate) fn are_patterns(texts: &[String]) -> bool {
    !matches!(texts, [] | [_] if texts.iter().all(|text| text == AUTO || text == NONE))
}

/// The groups of `names`, as numbers of these, that the `texts` of the option ask for; `names_are` says what there is.
///
/// # Errors
/// As [`globs::groups`].
pub(crate) fn groups(
    texts: &[String],
    names: &[&str],
    names_are: impl Fn() -> String,
) -> Result<Vec<Vec<usize>>, UsageError> {
    if are_patterns(texts) {
        return globs::groups(OPTION, texts, names, names_are);
    }
    match texts.iter().any(|text| text == NONE) {
        true => Ok(Vec::new()),
        false => Ok(run_as_one(names)),
    }
}

/// The layers among `names` that engines run as one, as numbers of these.
pub(crate) fn run_as_one(names: &[&str]) -> Vec<Vec<usize>> {
    let mut found: BTreeMap<(&str, usize), Vec<usize>> = BTreeMap::new();
    for (number, name) in names.iter().enumerate() {
        let layer = name.strip_suffix(globs::WEIGHT).unwrap_or(name);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_one_module_are_a_group() {
        let names = [
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            "model.layers.0.mlp.experts.0.up_proj.weight",
            "model.layers.0.mlp.experts.1.up_proj.weight",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.0.self_attn.o_proj.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.1.mlp.gate_up_proj.weight",
            "model.layers.1.self_attn.q_proj.weight",
            "model.layers.1.block_sparse_moe.experts.3.w1.weight",
            "model.layers.1.block_sparse_moe.experts.3.w2.weight",
            "model.layers.1.block_sparse_moe.experts.3.w3.weight",
            "model.layers.1.self_attn.v_proj",
            "q_proj",
            "v_proj.weight",
        ];
        let expected = [
            vec![0, 1],
            vec![3, 5],
            vec![7, 11],
            vec![8, 10],
            vec![12, 13],
        ];
        let none = || String::new();
        for texts in [&[][..], &["auto"]] {
            let texts: Vec<String> = texts.iter().copied().map(str::to_owned).collect();
            assert_eq!(groups(&texts, &names, none).expect("groups"), expected);
        }
        let texts = ["none".to_owned()];
        assert!(groups(&texts, &names, none).expect("groups").is_empty());
        // Beside others they are patterns.
        for texts in ["auto,none", "auto,*.{q,k}_proj"] {
            assert!(groups(&[texts.to_owned()], &names, none).is_err());
        }
        let texts = ["*.{q,v}_proj".to_owned()];
        assert_eq!(groups(&texts, &names, none).expect("groups"), [[7, 11]]);
    }
}
