//! Layers that have one amax, because engines run them as one: by their names, or as `--amax-group` says.

use crate::globs;
use crate::usage::UsageError;
use lowp_file::export::run_as_one;

/// The option that says which.
pub(crate) const OPTION: &str = "--amax-group";

/// What it takes for the layers of [`run_as_one`], and for none. No pattern is one of these: a pattern of groups has braces.
const AUTO: &str = "auto";
const NONE: &str = "none";

/// Whether patterns were given, which must find something.
pub(crate) fn are_patterns(texts: &[String]) -> bool {
    !matches!(texts, [] | [_] if texts.iter().all(|text| text == AUTO || text == NONE))
}

/// The groups of `names`, as numbers of these, that the `texts` of the option ask for; `names_are` says what there is.
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
