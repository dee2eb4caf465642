//! Embeds the compiled kernel of this crate (feature `cuda`), as lowp-kernels embeds its own.

use std::process::ExitCode;

/// Where `cargo xtask cuda` puts it, below the target folder.
const KERNELS: &str = "cuda-kernels/nccl";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    lowp_nvcc::end(lowp_nvcc::embed_beside_kernels(KERNELS))
}
