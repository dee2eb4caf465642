//! Embeds the compiled kernels of this crate (feature `cuda`), as lowp-kernels embeds its own, and links what calls cuDNN where
//! `cargo xtask cuda --cudnn` compiled it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use lowp_nvcc::Result;

/// Where `cargo xtask cuda` puts the kernels, below the target folder.
const KERNELS: &str = "cuda-kernels/transformer";

/// Where it puts what calls cuDNN, below the target folder, or for another platform `TRIPLE` below `target/TRIPLE`.
const CUDNN: &str = "cudnn";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(lowp_cudnn)");
    lowp_nvcc::end(link_and_embed())
}

fn link_and_embed() -> Result<()> {
    if env::var_os("CARGO_FEATURE_CUDA").is_some()
        && env::var("LOWP_CUDA_KERNELS").as_deref() != Ok("none")
    {
        let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
        let root = env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?;
        link_cudnn(&out, Path::new(&root));
    }
    lowp_nvcc::embed_beside_kernels(KERNELS)
}

/// Links `libsdpa.a`, if it was made of what `cudnn/sdpa.cpp` is now. cuDNN itself is found when the program runs.
fn link_cudnn(out: &Path, root: &Path) {
    let source = root.join("cudnn/sdpa.cpp");
    println!("cargo::rerun-if-changed={}", source.display());
    // `cargo xtask cuda` writes the manifest of the kernels again when it has made the library: `embed` has cargo watch it.
    let Some(folder) = lowp_nvcc::target_folder(out) else {
        return;
    };
    let [host, target] = ["HOST", "TARGET"].map(|name| env::var(name).unwrap_or_default());
    let folder = match host == target {
        true => folder.join(CUDNN),
        false => folder.join(target).join(CUDNN),
    };
    if !folder.join("libsdpa.a").is_file() {
        return;
    }
    let [now, then] = [&source, &folder.join("sdpa.cpp")].map(|path| fs::read(path).ok());
    if now.is_none() || now != then {
        println!(
            "cargo::warning=what calls cuDNN is older than its source and is left out; run `cargo xtask cuda --cudnn`"
        );
        return;
    }
    println!("cargo::rustc-link-search=native={}", folder.display());
    println!("cargo::rustc-link-lib=static=sdpa");
    println!("cargo::rustc-link-lib=dylib=stdc++");
    println!("cargo::rustc-cfg=lowp_cudnn");
}
