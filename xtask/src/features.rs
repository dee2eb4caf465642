//! Which cargo features clippy and the documentation are built with.

use anyhow::Result;

use crate::command::workspace_root;
use crate::tree::Tree;

/// Features that do not build on a machine without a GPU, as `package/feature`.
///
/// Keep this empty if you can: code behind a feature listed here is checked by nobody.
const NEED_A_GPU: &[&str] = &[];

/// The cargo arguments that enable every feature which builds without a GPU.
pub(crate) fn feature_args() -> Result<Vec<String>> {
    Ok(args(&Tree::load(&workspace_root()?)?, NEED_A_GPU))
}

fn args(tree: &Tree, excluded: &[&str]) -> Vec<String> {
    if excluded.is_empty() {
        return vec!["--all-features".into()];
    }
    // Cargo can enable all features or the named ones, not all but some. So name them.
    let names: Vec<String> = tree
        .with_extension("toml")
        .filter(|file| file.name() == "Cargo.toml")
        .flat_map(|file| package_features(&file.text))
        .filter(|name| !excluded.contains(&name.as_str()))
        .collect();
    vec!["--features".into(), names.join(",")]
}

/// The features a manifest defines, as `package/feature`.
fn package_features(manifest: &str) -> Vec<String> {
    let (mut section, mut package, mut features) = ("", "", Vec::new());
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            section = line;
        } else if let Some((key, value)) = line.split_once('=') {
            match (section, key.trim()) {
                ("[package]", "name") => package = value.trim().trim_matches('"'),
                ("[features]", key) if !key.starts_with('#') => features.push(key.to_owned()),
                _ => {}
            }
        }
    }
    features
        .iter()
        .map(|feature| format!("{package}/{feature}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNELS: &str =
        "[package]\nname = \"lowp-kernels\"\n[features]\n# off\ncuda = []\nsimd = []\n";

    #[test]
    fn nothing_excluded_means_all() {
        assert_eq!(args(&Tree::of(&[]), &[]), ["--all-features"]);
    }

    #[test]
    fn an_excluded_feature_is_left_out() {
        let tree = Tree::of(&[("crates/lowp-kernels/Cargo.toml", KERNELS)]);
        assert_eq!(
            args(&tree, &["lowp-kernels/cuda"]),
            ["--features", "lowp-kernels/simd"]
        );
    }
}
