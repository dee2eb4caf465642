//! Dependencies between the crates point one way.

use super::violation::Violation;
use crate::packages::{Kind, Package};
use crate::tree::Tree;

/// From the meaning of bytes up to the command. A crate may use those before it.
const ORDER: &[&str] = &[
    "lowp-format",
    "lowp-nvcc",
    "lowp-kernels",
    "lowp-golden",
    "lowp-conformance",
    "lowp-gemm",
    "lowp-comm",
    "lowp-shard",
    "lowp-checkpoint",
    "lowp-file",
    "lowp-nccl",
    "lowp-optim",
    "lowp-fsdp",
    "lowp-train",
    "lowp-transformer",
    "lowp-candle",
    "lowp-python",
    "lowp-cli",
];

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    tree.packages
        .iter()
        .filter(|package| package.manifest.starts_with("crates/"))
        .flat_map(check_package)
        .collect()
}

fn check_package(package: &Package) -> Vec<Violation> {
    let Package { name, manifest, .. } = package;
    let order = ORDER.join(" <- ");
    let Some(level) = level(name) else {
        let message = format!("`{name}` has no place in the order {order}");
        return vec![Violation::new(manifest, 1, message)];
    };
    // Those of tests and benches are free: they are not built into the crate.
    let built_in = |kind: Option<Kind>| kind != Some(Kind::Dev);
    package
        .dependencies
        .iter()
        .filter(|other| other.name.starts_with("lowp-") && built_in(other.kind))
        .filter(|other| self::level(&other.name).is_none_or(|other| other >= level))
        .map(|other| {
            let message = format!(
                "`{name}` may not depend on `{}`: the order is {order}",
                other.name
            );
            Violation::new(manifest, 1, message)
        })
        .collect()
}

fn level(name: &str) -> Option<usize> {
    ORDER.iter().position(|&known| known == name)
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;
    use crate::packages::Dependency;

    const MANIFEST: &str = "crates/lowp-kernels/Cargo.toml";

    fn found(name: &str, manifest: &str, dependency: &str, kind: Option<Kind>) -> Vec<String> {
        let dependency = Dependency {
            name: dependency.into(),
            kind,
        };
        let packages = vec![Package {
            name: name.into(),
            manifest: manifest.into(),
            dependencies: vec![dependency],
            publish: None,
        }];
        places(&check(&Tree {
            packages,
            ..Tree::default()
        }))
    }

    #[test]
    fn down_is_allowed_and_up_is_not() {
        for (dependency, allowed) in [
            ("lowp-format", true),
            ("half", true),
            ("lowp-shard", false),
            ("lowp-kernels", false),
            ("lowp-tests", false),
        ] {
            let expected: &[&str] = if allowed {
                &[]
            } else {
                &["crates/lowp-kernels/Cargo.toml:1"]
            };
            for kind in [None, Some(Kind::Build)] {
                let found = found("lowp-kernels", MANIFEST, dependency, kind);
                assert_eq!(found, expected, "{dependency}");
            }
        }
    }

    #[test]
    fn tests_may_use_any_crate() {
        let dev = Some(Kind::Dev);
        assert!(
            found(
                "lowp-format",
                "crates/lowp-format/Cargo.toml",
                "lowp-cli",
                dev
            )
            .is_empty()
        );
        assert!(found("lowp-tests", "tests/Cargo.toml", "lowp-cli", None).is_empty());
    }

    #[test]
    fn a_crate_without_a_place_is_caught() {
        let manifest = "crates/lowp-extra/Cargo.toml";
        let found = found("lowp-extra", manifest, "half", None);
        assert_eq!(found, ["crates/lowp-extra/Cargo.toml:1"]);
    }
}
