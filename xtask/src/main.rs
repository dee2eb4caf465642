//! `cargo xtask`: the build and test commands of the workspace. `cargo xtask --help` lists them.

mod arm;
mod bench;
mod bench_files;
mod ci;
mod command;
mod compare;
mod cross;
mod cuda;
mod environment;
mod gpu_pack;
mod licences;
mod miri;
mod mutants;
mod package;
mod packages;
mod plots;
mod python;
mod snapshots;
mod stages;
mod suite;
mod tidy;
mod tree;
mod wheel;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Build and test commands of the lowp workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Format check, tidy, packages, clippy, tests, doctests, unreferenced snapshots, files from Python.
    Test(suite::Options),
    /// Everything that must hold before a merge: lock file, the whole of `test`, every crate built from its
    /// archive, documentation without warnings.
    Ci,
    /// Compile the CUDA kernels. Installs NVIDIA's compiler below target/ if there is none.
    Cuda(cuda::Options),
    /// Put the GPU tests and the bench into target/gpu-pack, for a machine without Rust.
    GpuPack(gpu_pack::Options),
    /// Break lowp-format, lowp-comm, lowp-shard and lowp-optim in small ways, and count what the tests see.
    Mutants(mutants::Options),
    /// Run tests under Miri, which finds undefined behaviour. Needs a nightly toolchain with it.
    Miri(miri::Options),
    /// Build for 64-bit Arm, and run tests there in an emulator. Needs a cross compiler and QEMU.
    Arm(arm::Options),
    /// Package every crate as cargo would publish it.
    Package {
        /// Also build each crate from its archive alone. Takes minutes the first time.
        #[arg(long)]
        build: bool,
    },
    /// Check the invariants of the source tree.
    Tidy,
    /// Build the Python package as a wheel in target/wheels: with CUDA kernels where they were built, or nvcc is there.
    Wheel(wheel::Options),
    /// Run the benchmarks of every crate; a bar that is missed fails.
    Bench {
        /// Compare with the benchmark program of another checkout: the two alternate, row by row. Give both the
        /// same benches/cpu.rs.
        #[arg(long, value_name = "PROGRAM")]
        against: Option<std::path::PathBuf>,
        /// Passed to the benchmarks: a name filter, or options such as `--save-baseline NAME`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Draw the plots of docs/results.md from docs/results.toml.
    Plots,
    /// Time the file commands in memory-backed files, as multiples of `cp`; a bar that is missed fails.
    BenchFiles(bench_files::Options),
    /// Compare an older lowp program with this one: bytes of files, JSON, losses, resumed checkpoints. A difference
    /// without a reason in xtask/compare.toml fails.
    Compare(compare::Options),
}

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Test(options) => suite::test(&options),
        Task::Ci => ci::ci(),
        Task::Cuda(options) => cuda::cuda(&options),
        Task::GpuPack(options) => gpu_pack::gpu_pack(&options),
        Task::Mutants(options) => mutants::mutants(&options),
        Task::Miri(options) => miri::miri(&options),
        Task::Arm(options) => arm::arm(&options),
        Task::Package { build } => package::package(build),
        Task::Tidy => tidy::tidy(),
        Task::Wheel(options) => wheel::wheel(&options),
        Task::Plots => plots::plots(),
        Task::BenchFiles(options) => bench_files::bench_files(&options),
        Task::Compare(options) => compare::compare(&options),
        Task::Bench { against, args } => bench::bench(&args, against.as_deref()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
