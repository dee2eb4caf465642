//! `cargo xtask cuda`: compiles the CUDA kernels for every architecture, where lowp-kernels finds
//! them, and reports what each kernel needs of a multiprocessor.

mod conversions;
mod cudnn;
mod external;
mod kernel_code;
mod native;
mod resources;
mod toolkit;

use std::path::Path;
use std::process::Command;

use anyhow::{Result, anyhow, bail, ensure};
use clap::Args;

use crate::command::{target_dir, workspace_root};
use crate::cross::Platform;
use lowp_nvcc::{ARCHITECTURES, Arch, Manifest, Sources};
use resources::Resources;

#[path = "../../../crates/lowp-kernels/build/headers.rs"]
mod headers;

const SOURCES: &str = "crates/lowp-kernels/cuda";
/// What their kernels need of a multiprocessor, from the workspace root.
const TABLE: &str = "crates/lowp-kernels/resources.txt";
/// Those of other crates, and the folder of what is made of them below that of the first.
const OTHERS: [[&str; 2]; 2] = [
    ["crates/lowp-transformer/cuda", "transformer"],
    ["crates/lowp-nccl/cuda", "nccl"],
];

/// What a test run compiles on a clean checkout: one target without FP4 instructions, and one with them. `cargo xtask ci` has all.
const TESTED: [&str; 2] = ["sm_90", "sm_100"];

/// What to compile.
#[derive(Debug, Default, Args)]
#[group(id = "cuda")]
pub(crate) struct Options {
    /// Only for these architectures, such as `sm_90`, or `native`, that of the GPUs of this machine; for all if none is named.
    #[arg(long, value_delimiter = ',')]
    arch: Vec<String>,

    /// Print registers, spills and shared memory of every kernel, write the rows of these architectures to
    /// crates/lowp-kernels/resources.txt, and fail if a kernel spills or converts without the instruction that its target has.
    #[arg(long)]
    stats: bool,

    /// Compare the table with the file instead of writing it.
    #[arg(skip)]
    compare: bool,

    /// Also compile what calls cuDNN, for attention in `lowp train --device cuda`. Fetches its headers the first time.
    #[arg(long)]
    cudnn: bool,

    #[command(flatten)]
    pub(crate) platform: Platform,

    /// Also check that a crate elsewhere builds with the last commit of lowp-kernels by git, where
    /// it finds nothing but nvcc. Takes minutes.
    #[arg(long)]
    check_external: bool,
}

impl Options {
    /// The architectures that were compiled last, or those of [`TESTED`], with the table.
    pub(crate) fn checked() -> Result<Self> {
        let last = Manifest::load(&target_dir()?.join("cuda-kernels"));
        let tested = TESTED.map(str::to_owned).into();
        Ok(Self {
            arch: last.map_or(tested, |last| last.archs),
            stats: true,
            compare: true,
            ..Self::default()
        })
    }

    fn archs(&self) -> Result<Vec<Arch>> {
        if self.arch.is_empty() {
            return Ok(ARCHITECTURES.to_vec());
        }
        let known = |name: &String| {
            if name == "native" {
                return native::arch();
            }
            let found = ARCHITECTURES.iter().find(|arch| arch.name == *name);
            let names = ARCHITECTURES.iter().map(|arch| arch.name);
            let names = names.collect::<Vec<_>>().join(", ");
            let found = found.copied();
            found.ok_or_else(|| anyhow!("no kernels for {name}; there are {names}"))
        };
        self.arch.iter().map(known).collect()
    }
}

pub(crate) fn cuda(options: &Options) -> Result<()> {
    let archs = options.archs()?;
    let nvcc = toolkit::nvcc()?;
    eprintln!("nvcc {} ({})", nvcc.version, nvcc.program.display());
    let sources = workspace_root()?.join(SOURCES);
    headers::write_headers(&sources).map_err(|why| anyhow!("{why}"))?;
    let own = Sources {
        cuda: &sources,
        headers: &[],
    };
    let folder = target_dir()?.join("cuda-kernels");
    let start = std::time::Instant::now();
    let mut compiled =
        lowp_nvcc::compile(&nvcc, own, &archs, &folder).map_err(|why| anyhow!("{why}"))?;
    let headers = sources.join("include");
    let headers: [&Path; 1] = [&headers];
    let root = workspace_root()?;
    let others = OTHERS.map(|[cuda, below]| (root.join(cuda), folder.join(below)));
    let mut all = vec![(own, folder.as_path())];
    for (cuda, below) in &others {
        let sources = Sources {
            cuda,
            headers: &headers,
        };
        let those = lowp_nvcc::compile(&nvcc, sources, &archs, below);
        compiled.extend(those.map_err(|why| anyhow!("{why}"))?);
        all.push((sources, below));
    }
    let names: Vec<_> = archs.iter().map(|arch| arch.name).collect();
    if compiled.is_empty() {
        eprintln!("the kernels are up to date for {}", names.join(", "));
    } else {
        eprintln!(
            "compiled {} for {} in {:.0} s",
            compiled.join(", "),
            names.join(", "),
            start.elapsed().as_secs_f64()
        );
    }
    if options.stats {
        conversions::check(&nvcc, &sources, &archs)?;
        if archs.iter().any(Arch::is_family) {
            let units = lowp_nvcc::Unit::all(own).map_err(|why| anyhow!("{why}"))?;
            let files: Vec<_> = units.iter().map(lowp_nvcc::Unit::file).collect();
            kernel_code::check(&toolkit::readers(&nvcc)?, &folder, &files, &archs)?;
        }
        let table = stats(&all)?;
        let table = format!("nvcc {}\n{table}", nvcc.version);
        let (path, targets) = (workspace_root()?.join(TABLE), targets(&archs));
        let known = std::fs::read_to_string(&path)?;
        if options.compare {
            let current = is_current(&known, &table, &targets);
            let remedy = format!("`cargo xtask cuda --stats --arch {}`", names.join(","));
            ensure!(current, "{TABLE} is of other kernels; {remedy} writes it");
        } else {
            std::fs::write(path, merged(&known, &table, &targets))?;
        }
    }
    if options.cudnn {
        cudnn::build(&toolkit::headers(&nvcc), options.platform)?;
    }
    if options.check_external {
        external::check(&nvcc)?;
    }
    Ok(())
}

/// Whether the kernels can be compiled without installing anything.
pub(crate) fn ready() -> bool {
    toolkit::present().is_some()
}

/// For checks and documentation, which run nothing: they build without the kernels, and so also
/// without nvcc.
pub(crate) fn without_kernels(command: &mut Command) {
    command.env("LOWP_CUDA_KERNELS", "none");
}

/// The table of all kernels of sources, with the folder that they were compiled into. Prints it, and fails if a kernel spills.
fn stats(sources: &[(Sources<'_>, &Path)]) -> Result<Resources> {
    let mut table = Resources::default();
    for &(sources, folder) in sources {
        let mut logs = String::new();
        for unit in lowp_nvcc::Unit::all(sources).map_err(|why| anyhow!("{why}"))? {
            let log = std::fs::read_to_string(folder.join(unit.log()))?;
            table.add(&unit.name, &log);
            logs += &log;
        }
        ensure!(
            logs.contains(resources::KERNEL),
            "the compiler reported no kernel in {}",
            folder.display()
        );
    }
    println!("{table}");
    let spilling = table.spilling();
    if !spilling.is_empty() {
        bail!(
            "kernels keep registers in memory: {}; give them fewer values at a time or a larger \
             register budget",
            spilling.join(", ")
        );
    }
    Ok(table)
}

/// The targets of `archs` as rows name them: of code, where sources are of `compute_100f` and their code of `sm_100f`.
fn targets(archs: &[Arch]) -> Vec<String> {
    let code = |target: &str| target.replacen("compute_", "sm_", 1);
    archs.iter().flat_map(Arch::targets).map(code).collect()
}

/// The rows of a table of `targets`, or of all others.
fn rows_of<'a>(table: &'a str, targets: &[String], others: bool) -> Vec<&'a str> {
    let of = |row: &str| row.split_whitespace().nth(1).unwrap_or_default().to_owned();
    let rows = table.lines().skip(2);
    rows.filter(|row| targets.contains(&of(row)) != others)
        .collect()
}

/// `made`, with the rows that `known` has of other targets. Rows of another compiler are not kept.
fn merged(known: &str, made: &str, targets: &[String]) -> String {
    let heading: Vec<_> = made.lines().take(2).collect();
    let mut rows = rows_of(made, targets, false);
    if known.lines().next() == made.lines().next() {
        rows.extend(rows_of(known, targets, true));
    }
    rows.sort_unstable();
    [heading, rows].concat().join("\n") + "\n"
}

/// Whether `made` has the rows that `known` has of `targets`, or comes from another compiler.
fn is_current(known: &str, made: &str, targets: &[String]) -> bool {
    let rows = |table| -> Vec<Vec<&str>> {
        let rows = rows_of(table, targets, false).into_iter();
        let mut rows: Vec<_> = rows.map(|row| row.split_whitespace().collect()).collect();
        rows.sort_unstable();
        rows
    };
    known.lines().next() != made.lines().next() || rows(known) == rows(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_of_the_kernels_is_what_the_table_says() {
        let sources = workspace_root().unwrap().join(SOURCES);
        assert_eq!(headers::check_headers(&sources), Ok(()));
    }

    #[test]
    fn a_table_of_other_kernels_is_caught_unless_another_compiler_made_it() {
        let table =
            |nvcc, rows: &[&str]| format!("nvcc {nvcc}\nkernel arch\n{}\n", rows.join("\n"));
        let current =
            |a: &String, b: &String| is_current(a, b, &["sm_90", "sm_100f"].map(str::to_owned));
        let known = table(1, &["a sm_100f 8", "a  sm_80 7", "a  sm_90  6"]);
        assert!(current(&known, &table(1, &["a sm_100f 8", "a sm_90 6"])));
        assert!(current(
            &known,
            &table(1, &["a sm_100f 8", "a sm_80 9", "a sm_90 6"])
        ));
        assert!(!current(&known, &table(1, &["a sm_100f 8", "a sm_90 7"])));
        assert!(!current(&known, &table(1, &["a sm_90 6"])));
        assert!(current(&known, &table(2, &["a sm_90 9"])));
    }

    #[test]
    fn rows_of_other_targets_stay_unless_another_compiler_made_them() {
        let of = |nvcc, rows: &str| format!("nvcc {nvcc}\nkernel arch\n{rows}\n");
        let targets = ["sm_90".to_owned()];
        let known = of(1, "a sm_80 1\na sm_90 2\nb sm_80 3");
        let made = of(1, "a sm_90 4\nc sm_90 5");
        let rows = "a sm_80 1\na sm_90 4\nb sm_80 3\nc sm_90 5";
        assert_eq!(merged(&known, &made, &targets), of(1, rows));
        assert_eq!(merged(&of(2, "a sm_80 1"), &made, &targets), made);
    }

    #[test]
    fn another_header_is_caught() {
        let folder = std::env::temp_dir().join(format!("lowp-header-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("include/lowp")).unwrap();
        let checked = || headers::check_headers(&folder);
        assert!(checked().is_err_and(|why| why.contains("run `cargo xtask cuda`")));
        headers::write_headers(&folder).unwrap();
        assert_eq!(checked(), Ok(()));
        let header = folder.join("include/lowp/jobs.cuh");
        let text = std::fs::read_to_string(&header).unwrap();
        std::fs::write(&header, text.replace("uint64_t rows;", "uint32_t rows;")).unwrap();
        assert!(checked().is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
