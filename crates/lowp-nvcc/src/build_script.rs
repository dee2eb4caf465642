//! What build scripts do with kernels: they find those that `cargo xtask cuda` compiled, or compile them, and embed them.

use std::env;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::{ARCHITECTURES, Manifest, Nvcc, Result, Sources, Unit, compile, write};

/// The folder with the compiled kernels of `sources`, for a build script whose `OUT_DIR` is `out`: `shared`, below the
/// target folder, where `cargo xtask cuda` has put them and they are up to date, else one below `out` that is filled here. Tells cargo
/// when to ask again.
///
/// # Errors
/// There is no compiler, with what to do, or the compiler's messages.
pub fn compiled(out: &Path, sources: Sources<'_>, shared: &str) -> Result<PathBuf> {
    let units = Unit::all(sources)?;
    if let Some((folder, manifest)) = up_to_date(out, shared, &units) {
        if manifest.archs.len() < ARCHITECTURES.len() {
            let archs = manifest.archs.join(" and ");
            println!("cargo::warning=the CUDA kernels are compiled for {archs} only");
        }
        return Ok(folder);
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
    compile(&nvcc, sources, ARCHITECTURES, &folder)?;
    Ok(folder)
}

/// The folder `shared` of the target folder, if it has what `units` are now. Tells cargo to ask again when that changes.
fn up_to_date(out: &Path, shared: &str, units: &[Unit]) -> Option<(PathBuf, Manifest)> {
    let folder = target_folder(out)?.join(shared);
    let manifest = Manifest::load(&folder)?;
    let path = folder.join("manifest.txt");
    println!("cargo::rerun-if-changed={}", path.display());
    let all = units.iter().all(|unit| manifest.has(unit));
    all.then_some((folder, manifest))
}

/// The target folder of the build whose script has the `OUT_DIR` `out`, and nothing further up, where other projects may have kernels of
/// other sources. Cargo's folders are `target/PROFILE/build/...` or, with `--target TRIPLE`, `target/TRIPLE/PROFILE/build/...`.
pub fn target_folder(out: &Path) -> Option<PathBuf> {
    target_folder_of(out, &env::var("TARGET").unwrap_or_default())
}

fn target_folder_of(out: &Path, triple: &str) -> Option<PathBuf> {
    let named = |folder: &Path, name: &str| folder.file_name().is_some_and(|found| found == name);
    let build = out.ancestors().find(|folder| named(folder, "build"))?;
    let above = build.parent()?.parent()?;
    match named(above, triple) {
        true => above.parent().map(Path::to_path_buf),
        false => Some(above.to_path_buf()),
    }
}

/// Writes `kernels.rs` below `out`: a Rust expression, the table of `(name, &Aligned(image))` of the fat binaries that [`compiled`] finds,
/// which the crate includes. It is empty with `LOWP_CUDA_KERNELS=none`.
///
/// # Errors
/// As [`compiled`]; another value of the variable.
pub fn embed(out: &Path, sources: Sources<'_>, shared: &str) -> Result<()> {
    let mut rows = String::new();
    match env::var("LOWP_CUDA_KERNELS").as_deref() {
        Ok("none") => {}
        Ok("") | Err(_) => {
            let folder = compiled(out, sources, shared)?;
            for unit in Unit::all(sources)? {
                let (name, path) = (&unit.name, folder.join(unit.file()));
                if !path.is_file() {
                    let path = path.display();
                    return Err(format!("{path} is missing; run `cargo xtask cuda`"));
                }
                let row = writeln!(rows, "    ({name:?}, &Aligned(*include_bytes!({path:?}))),");
                row.map_err(|e| e.to_string())?;
            }
        }
        Ok(other) => {
            return Err(format!(
                "LOWP_CUDA_KERNELS={other} has no meaning; unset it, or set it to `none`"
            ));
        }
    }
    write(&out.join("kernels.rs"), format!("&[{rows}]").as_bytes())
}

/// [`embed`] for a crate with feature `cuda` that depends on lowp-kernels: of its folder `cuda`, which may include the headers of those
/// kernels. Nothing without the feature.
///
/// # Errors
/// As [`embed`]; variables that cargo sets are not set.
pub fn embed_beside_kernels(shared: &str) -> Result<()> {
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    rerun_if_changed();
    let folder = |name: &str| {
        let folder = env::var_os(name).ok_or_else(|| format!("{name} is not set"));
        folder.map(PathBuf::from)
    };
    let headers = folder("DEP_LOWP_KERNELS_INCLUDE")?;
    println!("cargo::rerun-if-changed={}", headers.display());
    let cuda = folder("CARGO_MANIFEST_DIR")?.join("cuda");
    let sources = Sources {
        cuda: &cuda,
        headers: &[&headers],
    };
    embed(&folder("OUT_DIR")?, sources, shared)
}

/// Tells cargo what a build script that embeds kernels depends on.
pub fn rerun_if_changed() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=cuda");
    for name in ["LOWP_CUDA_KERNELS", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
}

/// How a build script ends: cargo gets an error line by line.
pub fn end(done: Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            for line in why.lines() {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TRIPLE: &str = "x86_64-unknown-linux-gnu";

    #[test]
    fn the_target_folder_is_where_cargo_builds_and_no_further_up() {
        for (out, expected) in [
            (
                "/home/me/lowp/target/debug/build/lowp-1f/out",
                "/home/me/lowp/target",
            ),
            ("/t/release/build/lowp-1f/out", "/t"),
            // As cargo lays them out with a folder for each package.
            ("/t/debug/build/lowp/1f/out", "/t"),
            ("/t/x86_64-unknown-linux-gnu/debug/build/lowp-1f/out", "/t"),
            // A project that is itself in a folder of that name.
            (
                "/src/build/lowp/target/debug/build/lowp-1f/out",
                "/src/build/lowp/target",
            ),
        ] {
            let found = target_folder_of(Path::new(out), TRIPLE);
            assert_eq!(found.as_deref(), Some(Path::new(expected)), "{out}");
        }
        for out in ["/", "/out", "/build/out", "out"] {
            assert_eq!(target_folder_of(Path::new(out), TRIPLE), None, "{out}");
        }
    }

    /// Kernels that another project left further up, and lowp's own.
    #[test]
    fn kernels_of_others_are_not_taken() {
        let root = env::temp_dir().join(format!("lowp-nvcc-{}", std::process::id()));
        let (cuda, shared) = (root.join("sources"), "cuda-kernels");
        let out = root.join("mine/target/debug/build/lowp-1f/out");
        for folder in [&cuda, &out] {
            fs::create_dir_all(folder).unwrap();
        }
        write(&cuda.join("one.cu"), b"__global__ void one() {}").unwrap();
        let sources = Sources {
            cuda: &cuda,
            headers: &[],
        };
        let units = Unit::all(sources).unwrap();
        let manifest = |digest: &str| Manifest {
            compiler: "13.0".to_owned(),
            archs: vec!["sm_80".to_owned()],
            units: vec![("one".to_owned(), digest.to_owned())],
        };
        let leave = |folder: &Path, manifest: &Manifest| {
            fs::create_dir_all(folder).unwrap();
            let text = manifest.to_string();
            write(&folder.join("manifest.txt"), text.as_bytes()).unwrap();
        };
        let own = root.join("mine/target").join(shared);
        let good = manifest(&units[0].digest);
        // Where the search went before: beside the project, in it, and below its target folder.
        for stranger in ["", "mine", "mine/target/debug", "mine/target/debug/build"] {
            let folder = root.join(stranger).join(shared);
            leave(&folder, &good);
            assert_eq!(up_to_date(&out, shared, &units), None, "{stranger}");
            leave(&folder, &manifest("0"));
            leave(&own, &good);
            let found = up_to_date(&out, shared, &units);
            assert_eq!(found, Some((own.clone(), good.clone())), "{stranger}");
            fs::remove_dir_all(&own).unwrap();
        }
        // Nor are those of older sources.
        leave(&own, &manifest("0"));
        assert_eq!(up_to_date(&out, shared, &units), None);
        fs::remove_dir_all(&root).unwrap();
    }
}
