//! Embeds the compiled CUDA kernels (feature `cuda`): those of `cargo xtask cuda` if they are up to
//! date, else the kernels are compiled here with the nvcc of `CUDA_HOME` or `PATH`.
//!
//! With `LOWP_CUDA_KERNELS=none` nothing is embedded, for checks and documentation on a machine
//! without nvcc. `Cuda::new` then fails and says so.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

#[path = "build/kernels.rs"]
mod kernels;

use kernels::{ARCHITECTURES, Manifest, Nvcc, Result, Unit};

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/kernels.rs");
    println!("cargo::rerun-if-changed=src/cuda/table");
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

/// Writes `kernels.rs`: the table of modules that `src/cuda/module.rs` includes.
fn embed() -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let root = env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?;
    let cuda = Path::new(&root).join("cuda");
    let table = match env::var("LOWP_CUDA_KERNELS").as_deref() {
        Ok("none") => String::new(),
        Ok("") | Err(_) => {
            let folder = compiled(&out, &cuda)?;
            rows(&Unit::all(&cuda)?, &folder)?
        }
        Ok(other) => {
            return Err(format!(
                "LOWP_CUDA_KERNELS={other} has no meaning; unset it, or set it to `none`"
            ));
        }
    };
    let path = out.join("kernels.rs");
    fs::write(&path, format!("&[{table}]")).map_err(|e| format!("{}: {e}", path.display()))
}

/// The folder with up-to-date kernels: that of `cargo xtask cuda`, or one that is filled here.
fn compiled(out: &Path, cuda: &Path) -> Result<PathBuf> {
    kernels::check_headers(cuda)?;
    let units = Unit::all(cuda)?;
    // Of the workspace's target folder, where there is one: crates elsewhere have none.
    let shared = out.ancestors().map(|folder| folder.join("cuda-kernels"));
    if let Some((folder, manifest)) = shared
        .filter_map(|folder| Manifest::load(&folder).map(|manifest| (folder, manifest)))
        .next()
    {
        println!(
            "cargo::rerun-if-changed={}",
            folder.join("manifest.txt").display()
        );
        if units.iter().all(|unit| manifest.has(unit)) {
            if manifest.archs.len() < ARCHITECTURES.len() {
                let archs = manifest.archs.join(" and ");
                println!("cargo::warning=the CUDA kernels are compiled for {archs} only");
            }
            return Ok(folder);
        }
    }
    let Some(nvcc) = Nvcc::find()? else {
        return Err(
            "the CUDA kernels are not compiled, or older than their sources, and there is no nvcc in \
             CUDA_HOME or PATH\nin the workspace of lowp run `cargo xtask cuda`: it installs NVIDIA's \
             compiler below target/ and compiles them\nelsewhere install nvcc of CUDA 13 and have it in \
             PATH, or set CUDA_HOME to its folder"
                .to_owned(),
        );
    };
    let folder = out.join("cuda-kernels");
    kernels::compile(&nvcc, cuda, ARCHITECTURES, &folder)?;
    Ok(folder)
}

/// One row per unit: its name and its fat binary.
fn rows(units: &[Unit], folder: &Path) -> Result<String> {
    let mut rows = String::new();
    for unit in units {
        let path = folder.join(unit.file());
        if !path.is_file() {
            return Err(format!(
                "{} is missing; run `cargo xtask cuda`",
                path.display()
            ));
        }
        let name = &unit.name;
        writeln!(
            rows,
            "    Unit {{ name: {name:?}, image: &Aligned(*include_bytes!({path:?})) }},"
        )
        .map_err(|e| e.to_string())?;
    }
    Ok(rows)
}
