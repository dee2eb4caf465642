//! `--to` of `lowp export`, and the table of its help text.

use crate::columns::Columns;
use crate::one_of::Named;
use lowp_file::export::{ExportTarget, stored_name};
use lowp_format::{AnyRecipe, Recipe};

pub(super) const TARGETS: &[Named<ExportTarget>] = &[
    ("fp32", "Decoded to F32", ExportTarget::Fp32),
    (
        "bf16",
        "Decoded and rounded once to BF16, to nearest, ties to even",
        ExportTarget::Bf16,
    ),
    (
        "compressed-tensors",
        "Read by vLLM, SGLang and transformers",
        ExportTarget::CompressedTensors,
    ),
    (
        "modelopt",
        "NVIDIA's ModelOpt: TensorRT-LLM, vLLM and SGLang read it",
        ExportTarget::Modelopt,
    ),
    (
        "deepseek",
        "The files of DeepSeek-V3: scales of 128x128 blocks",
        ExportTarget::Deepseek,
    ),
    (
        "te",
        "Buffers with the names of TransformerEngine, and padded scales; lowp reads it directly",
        ExportTarget::Te,
    ),
];

pub(super) fn table() -> String {
    let with_forms = [
        ExportTarget::CompressedTensors,
        ExportTarget::Modelopt,
        ExportTarget::Deepseek,
    ];
    let heads: Vec<&str> = with_forms.iter().map(|target| target.name()).collect();
    let mut columns = Columns::new(&[&["recipe"], &heads[..]].concat(), &[0, 1, 2, 3]);
    for recipe in AnyRecipe::all() {
        let cells = with_forms
            .iter()
            .map(|target| stored_name(*target, &recipe).unwrap_or("-").to_owned());
        columns.own_words([recipe.name().to_owned()].into_iter().chain(cells));
    }
    columns.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_file::export::targets;

    #[test]
    fn the_targets_of_a_recipe_are_those_of_the_table() {
        let table = table();
        for recipe in AnyRecipe::all() {
            let mut lines = table.lines();
            let line = lines.find(|line| line.split_whitespace().next() == Some(recipe.name()));
            let forms = line.expect("a line").matches(" -").count();
            assert_eq!(targets(&recipe).len(), 6 - forms, "{line:?}");
        }
    }
}
