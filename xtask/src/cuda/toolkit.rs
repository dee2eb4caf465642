//! Where nvcc comes from: `CUDA_HOME`, `PATH`, or NVIDIA's wheels in a private folder below target/.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow};

use crate::command::{remove, run, target_dir};
use lowp_nvcc::Nvcc;

/// The compiler and its headers as Python packages, all of CUDA 13.0.
const WHEELS: &[&str] = &[
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// What reads compiled code. No version of CUDA 13.0 is there; this one reads its code.
const READERS: &[&str] = &[
    "nvidia-cuda-cuobjdump==13.2.51",
    "nvidia-cuda-nvdisasm==13.2.51",
];

/// A compiler that is on this machine.
pub(super) fn present() -> Option<Nvcc> {
    Nvcc::find().ok().flatten().or_else(|| {
        let program = program(&folder().ok()?);
        Nvcc::at(&program).ok()
    })
}

/// The compiler, installed if need be.
pub(super) fn nvcc() -> Result<Nvcc> {
    // A broken CUDA_HOME is an error, not a reason to install another compiler.
    if let Some(nvcc) = Nvcc::find().map_err(|why| anyhow!("{why}"))? {
        return Ok(nvcc);
    }
    let folder = folder()?;
    let program = program(&folder);
    if !program.is_file() {
        eprintln!("no nvcc in CUDA_HOME or PATH; installing NVIDIA's compiler wheels");
        install(&folder, WHEELS)?;
    }
    Nvcc::at(&program).map_err(|why| anyhow!("{why}; delete {} and try again", folder.display()))
}

/// The folder of cuobjdump and nvdisasm: that of the compiler, or one that is filled if need be.
pub(super) fn readers(nvcc: &Nvcc) -> Result<PathBuf> {
    let beside = nvcc.program.parent().unwrap_or(Path::new("."));
    if ["cuobjdump", "nvdisasm"]
        .iter()
        .all(|name| beside.join(name).is_file())
    {
        return Ok(beside.to_path_buf());
    }
    let folder = target_dir()?.join("cuda-readers-13.2");
    let programs = folder.join("nvidia/cu13/bin");
    if !programs.join("cuobjdump").is_file() {
        eprintln!("no cuobjdump beside nvcc; installing NVIDIA's wheels of it");
        install(&folder, READERS)?;
    }
    Ok(programs)
}

/// CUDA's headers beside a compiler.
pub(super) fn headers(nvcc: &Nvcc) -> PathBuf {
    let bin = nvcc.program.parent().unwrap_or(Path::new("."));
    bin.join("../include")
}

fn folder() -> Result<PathBuf> {
    Ok(target_dir()?.join("cuda-toolkit-13.0"))
}

/// Where the wheels put nvcc.
fn program(folder: &Path) -> PathBuf {
    folder.join("nvidia/cu13/bin/nvcc")
}

/// Installs the wheels beside `folder` and moves them there when all is done.
fn install(folder: &Path, wheels: &[&str]) -> Result<()> {
    let partial = folder.with_extension("partial");
    remove(&partial)?;
    let mut command = Command::new("python3");
    command
        .args(["-m", "pip", "install", "--quiet", "--no-deps"])
        .args(["--disable-pip-version-check", "--only-binary", ":all:"])
        .arg("--target")
        .arg(&partial)
        .args(wheels);
    run(command).context(
        "cannot install NVIDIA's compiler tools; set CUDA_HOME to a CUDA 13 toolkit, or make `python3 -m pip` \
         work",
    )?;
    remove(folder)?;
    std::fs::rename(&partial, folder)?;
    Ok(())
}
