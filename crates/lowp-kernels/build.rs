//! Embeds the compiled CUDA kernels (feature `cuda`): those of `cargo xtask cuda` if they are up to
//! date, else the kernels are compiled here with the nvcc of `CUDA_HOME` or `PATH`.
//!
//! With `LOWP_CUDA_KERNELS=none` nothing is embedded, for checks and documentation on a machine
//! without nvcc. `Cuda::new` then fails and says so.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[path = "build/headers.rs"]
mod headers;

use lowp_nvcc::{Result, Sources};

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/headers.rs");
    println!("cargo::rerun-if-changed=src/cuda/table");
    // For kernels of other crates that include these headers.
    if let Some(root) = env::var_os("CARGO_MANIFEST_DIR") {
        let include = Path::new(&root).join("cuda/include");
        println!("cargo::metadata=include={}", include.display());
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    lowp_nvcc::rerun_if_changed();
    lowp_nvcc::end(embed())
}

/// Writes `kernels.rs`: the table of modules that `src/cuda/module.rs` includes.
fn embed() -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let root = env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?;
    let cuda = Path::new(&root).join("cuda");
    headers::check_headers(&cuda)?;
    let sources = Sources {
        cuda: &cuda,
        headers: &[],
    };
    lowp_nvcc::embed(&out, sources, "cuda-kernels")
}
