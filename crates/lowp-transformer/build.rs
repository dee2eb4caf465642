//! Embeds the compiled kernels of this crate (feature `cuda`): those of `cargo xtask cuda` if they are up to date, else they are compiled
//! here with the nvcc of `CUDA_HOME` or `PATH`. As in lowp-kernels, `LOWP_CUDA_KERNELS=none` embeds nothing.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

#[path = "../lowp-kernels/build/kernels.rs"]
#[allow(dead_code, reason = "lowp-kernels and xtask use the rest")]
mod kernels;

use kernels::{ARCHITECTURES, Manifest, Nvcc, Result, Unit};

/// Where `cargo xtask cuda` puts them, below the folder of those of lowp-kernels.
const FOLDER: &str = "cuda-kernels/transformer";

/// Where it puts what calls cuDNN.
const CUDNN: &str = "cudnn";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(lowp_cudnn)");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    for name in ["LOWP_CUDA_KERNELS", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=cuda");
    match embed() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            for line in why.lines() {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}

fn embed() -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let root = env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?;
    let cuda = Path::new(&root).join("cuda");
    let mut rows = String::new();
    if env::var("LOWP_CUDA_KERNELS").as_deref() != Ok("none") {
        link_cudnn(&out);
        let folder = compiled(&out, &cuda)?;
        for unit in Unit::all(&cuda)? {
            let path = folder.join(unit.file());
            rows += &format!("({:?}, &Aligned(*include_bytes!({path:?}))),\n", unit.name);
        }
    }
    let path = out.join("kernels.rs");
    fs::write(&path, format!("&[{rows}]")).map_err(|e| format!("{}: {e}", path.display()))
}

/// Links what calls cuDNN, where `cargo xtask cuda --cudnn` compiled it. cuDNN itself is found when the program runs.
fn link_cudnn(out: &Path) {
    let mut folders = out.ancestors().map(|folder| folder.join(CUDNN));
    if let Some(folder) = folders.find(|folder| folder.join("libsdpa.a").is_file()) {
        println!(
            "cargo::rerun-if-changed={}",
            folder.join("libsdpa.a").display()
        );
        println!("cargo::rustc-link-search=native={}", folder.display());
        println!("cargo::rustc-link-lib=static=sdpa");
        println!("cargo::rustc-link-lib=dylib=stdc++");
        println!("cargo::rustc-cfg=lowp_cudnn");
    }
}

/// The folder with up-to-date kernels.
fn compiled(out: &Path, cuda: &Path) -> Result<PathBuf> {
    let units = Unit::all(cuda)?;
    let shared = out.ancestors().map(|folder| folder.join(FOLDER));
    let found = shared
        .filter_map(|folder| Manifest::load(&folder).map(|manifest| (folder, manifest)))
        .next();
    if let Some((folder, manifest)) = found {
        println!(
            "cargo::rerun-if-changed={}",
            folder.join("manifest.txt").display()
        );
        if units.iter().all(|unit| manifest.has(unit)) {
            return Ok(folder);
        }
    }
    let Some(nvcc) = Nvcc::find()? else {
        return Err(
            "the kernels of lowp-transformer are not compiled, or older than their sources, and there is no nvcc in CUDA_HOME or PATH\n\
             run `cargo xtask cuda`, which installs NVIDIA's compiler below target/, or install nvcc of CUDA 13"
                .to_owned(),
        );
    };
    let folder = out.join("cuda-kernels");
    kernels::compile(&nvcc, cuda, ARCHITECTURES, &folder)?;
    Ok(folder)
}
