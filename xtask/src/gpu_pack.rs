//! `cargo xtask gpu-pack`: the GPU tests and the bench as programs, with a script that runs them on a
//! machine that has a GPU and no Rust.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use crate::command::{build_program, remove, run, target_dir, workspace_root};
use crate::cross::Platform;
use crate::cuda;

/// What to pack.
#[derive(Debug, Default, Args)]
#[group(id = "gpu-pack")]
pub(crate) struct Options {
    #[command(flatten)]
    cuda: cuda::Options,

    /// Only the tests, without `lowp` and its peers.
    #[arg(long, conflicts_with = "bench_only")]
    tests_only: bool,

    /// Only `lowp` and its peers, without the tests.
    #[arg(long)]
    bench_only: bool,

    /// Leave out TransformerEngine and torchao, which are downloaded once (280 MB).
    #[arg(long)]
    no_fetch: bool,
}

/// What runs there.
const SCRIPT: &str = include_str!("gpu_pack/run.sh");

/// Builds the programs and copies them, stripped, to target/gpu-pack.
pub(crate) fn gpu_pack(options: &Options) -> Result<()> {
    let platform = options.cuda.platform;
    cuda::cuda(&options.cuda)?;
    let folder = target_dir()?.join("gpu-pack");
    remove(&folder)?;
    fs::create_dir_all(&folder)?;

    if !options.bench_only {
        tests(platform, &folder)?;
    }
    if !options.tests_only {
        let lowp = ["build", "--release", "--package", "lowp-cli"];
        let lowp = platform.cargo(&[&lowp[..], &["--features", "lowp-cli/cuda"]].concat())?;
        pack(platform, &build_program(lowp)?, &folder.join("lowp"))?;
        let fetched = if options.no_fetch {
            None
        } else {
            Some(fetch()?)
        };
        peers(&workspace_root()?, fetched.as_deref(), &folder)?;
    }
    let script = folder.join("run.sh");
    fs::write(&script, SCRIPT)?;
    executable(&script)?;
    let bytes = size(&folder)?;
    eprintln!(
        "{}: {:.1} MB; run `./run.sh OUT` in it, on the machine with the GPU",
        folder.display(),
        bytes as f64 / 1e6
    );
    Ok(())
}

/// Builds the test programs and copies them to `folder`.
fn tests(platform: Platform, folder: &Path) -> Result<()> {
    let programs: [(&str, &str, &[&str], &str); 7] = [
        ("lowp-conformance", "nccl", &["--lib"], "kernel-tests"),
        ("lowp-gemm", "cuda", &["--test", "all"], "gemm-tests"),
        ("lowp-shard", "cuda", &["--test", "all"], "shard-tests"),
        ("lowp-optim", "cuda", &["--test", "all"], "optim-tests"),
        ("lowp-transformer", "cuda", &["--lib"], "transformer-tests"),
        ("lowp-nccl", "cuda", &["--test", "all"], "nccl-tests"),
        (
            "lowp-nccl",
            "cuda",
            &["--test", "failures"],
            "nccl-failures",
        ),
    ];
    for (package, feature, target, name) in programs {
        let args = [
            "test",
            "--no-run",
            "--package",
            package,
            "--features",
            feature,
        ];
        let program = build_program(platform.cargo(&[&args[..], target].concat())?)?;
        pack(platform, &program, &folder.join(name))?;
    }
    golden(&folder.join("golden"))?;
    // The processes that the last of them starts.
    let rank = ["build", "--package", "lowp-nccl", "--features", "cuda"];
    let rank = platform.cargo(&[&rank[..], &["--example", "rank_loop"]].concat())?;
    pack(platform, &build_program(rank)?, &folder.join("rank_loop"))
}

/// What is packed of `benches`, and where.
const PEERS: &[(&str, &str)] = &[
    ("peers/table.py", "peers/table.py"),
    ("peers/bars.py", "peers/bars.py"),
    ("peers/pairs.py", "peers/pairs.py"),
    ("peers/peers.py", "peers/peers.py"),
    ("peers/all_to_all.py", "peers/all_to_all.py"),
    ("peers/fsdp2_gather.py", "peers/fsdp2_gather.py"),
    ("peers/fsdp2_host.py", "peers/fsdp2_host.py"),
    ("peers/torch_gpt.py", "peers/torch_gpt.py"),
    ("peers/te/te_bench.py", "peers/te/te_bench.py"),
    ("peers/te/capi.py", "peers/te/capi.py"),
    ("bars/h200.toml", "h200.toml"),
];
/// What is packed of the peers that are fetched.
const FETCHED: &[&str] = &[
    "torchao.whl",
    "te/libtransformer_engine.so.xz",
    "te/te_loop.so",
];

/// Downloads TransformerEngine and torchao, unless they are there, and returns their folder.
fn fetch() -> Result<PathBuf> {
    let folder = target_dir()?.join("peers");
    let mut command = Command::new("python3");
    command
        .arg(workspace_root()?.join("benches/peers/fetch.py"))
        .arg(&folder);
    run(command)
        .context("TransformerEngine and torchao are missing; leave them out with --no-fetch")?;
    Ok(folder)
}

/// Copies what measures the peers, and the bars, from the workspace at `root`.
fn peers(root: &Path, fetched: Option<&Path>, folder: &Path) -> Result<()> {
    let ours = PEERS
        .iter()
        .map(|&(from, to)| (root.join("benches").join(from), to));
    let theirs = fetched
        .into_iter()
        .flat_map(|from| FETCHED.iter().map(|&name| (from.join(name), name)));
    for (from, to) in ours.chain(theirs) {
        let to = folder.join(to);
        fs::create_dir_all(to.parent().unwrap_or(folder))?;
        fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    Ok(())
}

/// Copies the golden vectors, which the tests read.
fn golden(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let from = workspace_root()?.join("tests/golden");
    for entry in fs::read_dir(&from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        if let (Some("safetensors"), Some(name)) =
            (path.extension().and_then(|e| e.to_str()), path.file_name())
        {
            fs::copy(&path, folder.join(name))
                .with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let data = entry.metadata()?;
        bytes += if data.is_dir() {
            size(&entry.path())?
        } else {
            data.len()
        };
    }
    Ok(bytes)
}

/// Copies a program without its symbols.
fn pack(platform: Platform, program: &Path, to: &Path) -> Result<()> {
    fs::copy(program, to).with_context(|| format!("cannot copy {}", program.display()))?;
    executable(to)?;
    // Smaller, where there is `strip`; the program runs either way.
    let _ = platform.tool("strip").arg(to).status();
    Ok(())
}

#[cfg(unix)]
fn executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(
        path,
        fs::Permissions::from_mode(0o755),
    )?)
}

#[cfg(not(unix))]
fn executable(_: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_finds_what_is_packed() {
        let folder = std::env::temp_dir().join(format!("lowp-xtask-pack-{}", std::process::id()));
        let fetched = folder.join("fetched");
        fs::create_dir_all(fetched.join("te")).unwrap();
        for name in FETCHED {
            fs::write(fetched.join(name), "12345").unwrap();
        }
        let pack = folder.join("pack");
        let root = workspace_root().unwrap();
        peers(&root, Some(&fetched), &pack).unwrap();
        let sitting = SCRIPT.split("\npeers)\n").nth(1).unwrap();
        let sitting = sitting.split(";;").next().unwrap();
        let named: Vec<&str> = sitting
            .split("$here/")
            .skip(1)
            .filter_map(|rest| rest.split(['"', '}']).next())
            .collect();
        assert_eq!(
            named,
            ["peers/table.py", "lowp", "te", "torchao.whl", "h200.toml"]
        );
        for name in named.iter().filter(|&&name| name != "lowp") {
            assert!(pack.join(name).exists(), "{name}");
        }
        // What the table calls and imports, and nothing that is only for fetching.
        let all = fs::read_dir(root.join("benches/peers")).unwrap();
        let scripts = all.filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        for script in scripts.filter(|name| name.ends_with(".py") && name != "fetch.py") {
            assert!(pack.join("peers").join(&script).exists(), "{script}");
        }
        let with = size(&pack).unwrap();
        fs::remove_dir_all(&pack).unwrap();
        peers(&root, None, &pack).unwrap();
        assert_eq!(with - size(&pack).unwrap(), 5 * FETCHED.len() as u64);
        fs::remove_dir_all(&folder).unwrap();
    }
}
