//! `cargo xtask cuda --cudnn`: compiles what calls cuDNN (crates/lowp-transformer/cudnn) into a static library, where the build script of
//! lowp-transformer finds it. Only headers are needed here: cuDNN itself is found when the program runs.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::command::{remove, run, target_dir, workspace_root};
use crate::cross::Platform;

/// cuDNN, of which the headers are kept, and the headers of its C++ interface. What they compile to runs with cuDNN 9.
const WHEELS: &[&str] = &[
    "nvidia-cudnn-cu13==9.28.1.4",
    "nvidia-cudnn-frontend==1.15.0",
];

const PLATFORMS: [&str; 3] = [
    "manylinux_2_27_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux2014_x86_64",
];

/// Unpacks the headers of the wheels of one folder into another.
const UNPACK: &str = "\
import glob, sys, zipfile
for wheel in glob.glob(sys.argv[1] + '/*.whl'):
    with zipfile.ZipFile(wheel) as files:
        files.extractall(sys.argv[2], [n for n in files.namelist() if n.endswith(('.h', '.hpp')) and 'include/' in n])
";

/// Compiles the library for a platform, with the headers of CUDA in `cuda`.
pub(super) fn build(cuda: &Path, platform: Platform) -> Result<()> {
    let target = target_dir()?;
    let headers = target.join("cudnn-headers");
    if !headers.is_dir() {
        install(&headers)?;
    }
    // As cargo has it: `target` for machines like this one, `target/TRIPLE` for others.
    let folder = target.join(platform.cross().unwrap_or_default());
    let folder = folder.join("cudnn");
    std::fs::create_dir_all(&folder)?;
    let source = workspace_root()?.join("crates/lowp-transformer/cudnn/sdpa.cpp");
    let object = folder.join("sdpa.o");
    let compiler = platform.cross().map_or("c++", |_| "g++");
    let mut compile = platform.tool(compiler);
    compile
        .args(["-std=c++17", "-O2", "-fPIC", "-w", "-c"])
        .args([
            "-DNV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING",
            "-DNV_CUDNN_FRONTEND_SKIP_JSON_LIB",
        ])
        .arg("-I")
        .arg(headers.join("include"))
        .arg("-I")
        .arg(headers.join("nvidia/cudnn/include"))
        .arg("-I")
        .arg(cuda)
        .arg("-o")
        .arg(&object)
        .arg(&source);
    run(compile).context("cannot compile what calls cuDNN; it needs a C++ compiler (`c++`, and Debian's g++-aarch64-linux-gnu for Arm)")?;
    let library = folder.join("libsdpa.a");
    if library.exists() {
        std::fs::remove_file(&library)?;
    }
    let mut archive = platform.tool("ar");
    archive.arg("rcs").arg(&library).arg(&object);
    run(archive)?;
    // What it was made of, and the file that the build script watches.
    std::fs::copy(&source, folder.join("sdpa.cpp"))?;
    let manifest = target.join("cuda-kernels/transformer/manifest.txt");
    std::fs::write(&manifest, std::fs::read(&manifest)?)?;
    eprintln!("attention by cuDNN: {}", library.display());
    Ok(())
}

/// Fetches the wheels, keeps their headers in `folder`, and deletes the rest.
fn install(folder: &Path) -> Result<()> {
    eprintln!("fetching the headers of cuDNN (500 MB, of which 5 MB are kept)");
    let wheels = folder.with_extension("wheels");
    let partial = folder.with_extension("partial");
    remove(&wheels)?;
    remove(&partial)?;
    let mut download = Command::new("python3");
    download
        .args(["-m", "pip", "download", "--quiet", "--no-deps"])
        .args(["--disable-pip-version-check", "--only-binary", ":all:"])
        .args(["--python-version", "3.12", "--implementation", "cp"]);
    for platform in PLATFORMS {
        download.args(["--platform", platform]);
    }
    download.arg("--dest").arg(&wheels).args(WHEELS);
    run(download).context("cannot fetch cuDNN's headers; make `python3 -m pip` work")?;
    let mut unpack = Command::new("python3");
    unpack.args(["-c", UNPACK]).arg(&wheels).arg(&partial);
    run(unpack)?;
    std::fs::remove_dir_all(&wheels)?;
    std::fs::rename(&partial, folder)?;
    Ok(())
}
