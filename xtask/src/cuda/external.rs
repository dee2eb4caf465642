//! `cargo xtask cuda --check-external`: a crate outside the workspace builds with lowp-kernels by git,
//! compiles the kernels itself, and gets the bytes of the CPU on a device, where there is one.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::command::{cargo, run, workspace_root};
use lowp_nvcc::Nvcc;

const PROGRAM: &str = r#"
use lowp_kernels::{AnyRecipe, Backend, Cpu, Cuda, DeviceBuffer, KernelError, Quantized, Shape};

fn cast<B: Backend>(backend: &B) -> Result<(Vec<Vec<u8>>, Vec<f32>), KernelError> {
    let recipe = AnyRecipe::from_name("mxfp8", &Default::default())?;
    let shape = Shape::new(256, 512);
    let values: Vec<f32> = (0..shape.elements()).map(|i| (i % 997) as f32 - 498.5).collect();
    let weight = Quantized::encode(backend, recipe, shape, &values)?;
    let bytes = weight.tensor().buffers().iter().map(|buffer| buffer.storage.to_vec());
    Ok((bytes.collect::<Result<_, _>>()?, weight.decode()?))
}

fn main() -> Result<(), KernelError> {
    let expected = cast(&Cpu)?;
    match Cuda::new(0) {
        Ok(cuda) => assert!(cast(&cuda)? == expected, "the device gave other values"),
        Err(error) => println!("built, and not run on a device: {error}"),
    }
    Ok(())
}
"#;

/// Makes the crate in a folder of its own, and builds and runs it.
pub(super) fn check(nvcc: &Nvcc) -> Result<()> {
    let folder = env::temp_dir().join(format!("lowp-external-{}", std::process::id()));
    let done = build(nvcc, &folder);
    let removed = fs::remove_dir_all(&folder);
    done.and(removed.with_context(|| format!("cannot remove {}", folder.display())))
}

fn build(nvcc: &Nvcc, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("src/main.rs"), PROGRAM)?;
    let root = workspace_root()?;
    let commit = Command::new("git")
        .current_dir(&root)
        .args(["rev-parse", "HEAD"])
        .output()
        .context("cannot start git")?;
    ensure!(commit.status.success(), "git names no commit");
    let commit = String::from_utf8(commit.stdout)?;
    let lowp = format!(
        "git = \"file://{}\", rev = \"{}\"",
        root.display(),
        commit.trim()
    );
    let manifest = format!(
        "[package]\nname = \"external\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
         lowp-kernels = {{ {lowp}, features = [\"cuda\"] }}\n"
    );
    fs::write(folder.join("Cargo.toml"), manifest)?;
    let nvcc = nvcc.program.parent().context("nvcc lies in no folder")?;
    let mut path = vec![nvcc.to_path_buf()];
    path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let mut command = cargo(&["run"])?;
    command
        .current_dir(folder)
        .env("PATH", env::join_paths(path)?)
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .env_remove("CUDA_HOME")
        .env_remove("LOWP_CUDA_KERNELS");
    run(command)
}
