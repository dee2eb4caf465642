//! `lowp bench`: what every operation costs on a device, next to a plain copy, by `lowp_kernels::bench`; between ranks by
//! `lowp_fsdp::bench`.

mod report;

use crate::device::Device;
use crate::files::{check_writable, write_atomically};
use crate::one_of::{Named, one_of};
use crate::output;
use crate::usage::input_error;
#[cfg(feature = "cuda")]
use anyhow::Context;
use anyhow::Result;
#[cfg(feature = "cuda")]
use lowp_comm::{CommError, run_comms};
#[cfg(feature = "cuda")]
use lowp_fsdp::bench::{Size, measure, offloaded_bytes};
#[cfg(feature = "cuda")]
use lowp_kernels::bench;
#[cfg(feature = "cuda")]
use lowp_nccl::{NcclComm, NcclOptions, Sums};
use serde::Serialize;
use std::fmt::Display;
use std::path::PathBuf;
#[cfg(feature = "cuda")]
use std::time::Duration;

/// Measure every operation on a device, compared with a plain copy
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp bench --device cuda
  lowp bench --device cuda --filter adamw --json adamw.json
  lowp bench --device cuda --ranks 2
  lowp bench --device cuda --ranks 2 --filter gradients --sums rank-order
  lowp bench --device cuda --ranks 1 --offload-optimizer

One row per operation, recipe and shape. `share` is the rate of the compulsory bytes (every input
read once, every output written once, per pass) divided by the rate of a device-to-device copy,
measured in the same run. `host us` is the time of one call on the calling thread. The CPU
kernels are measured by `cargo xtask bench`.

With --ranks the rows are gathers, reduce-scatters and optimizer steps of 1 billion parameters over
that many GPUs, over NCCL: received bytes per second, divided by the rate of one all-gather of the
same bytes, or of a copy. On one GPU the rows are the copies that gathers make there. With
--offload-optimizer they are steps over masters and moments on the host: bytes read and written over
PCIe per second, divided by the rate of copies of as many bytes in both directions at once.
`lowp plan --bandwidth FILE` reads the file of --json.")]
pub(crate) struct Args {
    /// The device: `cuda` or `cuda:N`
    #[arg(long, value_name = "DEVICE")]
    device: Device,

    /// Measure gathers, reduce-scatters and optimizer steps over N GPUs, beginning with the device
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: Option<u32>,

    /// What adds gradients (with --ranks) [default: peers]
    #[arg(long, value_name = "NAME", value_parser = one_of(SUMS))]
    sums: Option<&'static str>,

    /// Minimum number of thread blocks that NCCL uses to move data; 0 lets NCCL choose (with --ranks) [default: 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=64))]
    min_ctas: Option<u32>,

    /// Measure only optimizer steps, with masters and states in page-locked memory of the host, next to copies of the same bytes over PCIe in
    /// both directions at once (with --ranks)
    #[arg(long)]
    offload_optimizer: bool,

    /// Measure only rows whose operation, recipe or shape contains TEXT
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,

    /// Timed runs per row; the median is reported
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Divide both sides of every shape by N, for a quick run
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    shrink: u32,

    /// Also write the rows to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Who adds gradients.
const SUMS: &[Named<&str>] = &[
    (
        "peers",
        "The rank that owns a sum, in rank order, from the memory of the other GPUs: the same bits as on the CPU",
        "peers",
    ),
    ("nccl", "NCCL, in an order that NCCL chooses", "nccl"),
    (
        "rank-order",
        "The rank that receives a sum, in rank order: the same bits as on the CPU",
        "rank-order",
    ),
];

pub(crate) fn main(args: &Args) -> Result<()> {
    let ordinal = match args.device {
        Device::Cuda(ordinal) => ordinal,
        Device::Cpu => {
            return Err(input_error(
                "the CPU kernels are measured by `cargo xtask bench`; give --device cuda",
            ));
        }
    };
    if args.ranks.is_none() && (args.sums.is_some() || args.min_ctas.is_some()) {
        return Err(input_error(
            "--sums and --min-ctas configure what moves data between GPUs; add --ranks N, or leave them out",
        ));
    }
    if args.ranks.is_none() && args.offload_optimizer {
        return Err(input_error(
            "--offload-optimizer measures optimizer steps of ranks; add --ranks 1, or leave it out",
        ));
    }
    if let Some(path) = &args.json {
        check_writable("--json", path)?;
    }
    match args.ranks {
        Some(ranks) => tell(&run_ranks(ordinal, ranks as usize, args)?, args),
        None => tell(&run(ordinal, args)?, args),
    }
}

/// Checks that the host has room for masters and moments of all ranks.
#[cfg(feature = "cuda")]
fn check_host(Size { shrink, .. }: Size) -> Result<()> {
    let needed = offloaded_bytes(shrink) as u128;
    match lowp_train::machine::lockable() {
        Some(most) if needed > most => Err(input_error(format!(
            "--offload-optimizer takes {needed} bytes of page-locked memory, but at most {most} can be locked now; give --shrink {}",
            2 * shrink
        ))),
        _ => Ok(()),
    }
}

/// Prints the table of `report`, and writes the report to the file of `--json`.
fn tell(report: &(impl Display + Serialize), args: &Args) -> Result<()> {
    output::print(&report.to_string())?;
    match &args.json {
        Some(path) => write_atomically(path, &output::json(report)?),
        None => Ok(()),
    }
}

#[cfg(feature = "cuda")]
fn run(ordinal: usize, args: &Args) -> Result<report::Report> {
    let cuda = crate::device::open(ordinal)?;
    let shrink = args.shrink as usize;
    let mut report = report::Report {
        device: cuda.name()?,
        copy_gb_per_s: bench::copy_rate(&cuda, shrink)?,
        rows: Vec::new(),
    };
    for case in bench::cases(shrink) {
        let matches = |text: &String| case.names.iter().any(|name| name.contains(text));
        if args.filter.as_ref().is_none_or(matches) {
            output::note(&case.names.join("  "));
            let timing = bench::measure(&cuda, &case, args.runs as usize)?;
            let row = report::Row::new(case.names, &timing, report.copy_gb_per_s);
            report.rows.push(row);
        }
    }
    Ok(report)
}

/// A batch that is not done by then has failed.
#[cfg(feature = "cuda")]
const LIMIT: Duration = Duration::from_secs(60);

/// Measures the devices `first..first + ranks`, each the rank of a thread.
#[cfg(feature = "cuda")]
fn run_ranks(first: usize, ranks: usize, args: &Args) -> Result<report::RanksReport> {
    let size = Size {
        runs: args.runs as usize,
        shrink: args.shrink as usize,
        offload: args.offload_optimizer,
    };
    if size.offload {
        check_host(size)?;
    }
    let default = NcclOptions::default();
    let (sums, name) = match args.sums {
        Some("rank-order") => (Sums::RankOrder, "rank-order"),
        Some("nccl") => (Sums::Nccl, "nccl"),
        _ => (Sums::Peers, "peers"),
    };
    let options = NcclOptions {
        limit: LIMIT,
        sums,
        min_ctas: args.min_ctas.unwrap_or(default.min_ctas),
    };
    let devices = crate::gpus::open("--ranks", first, ranks)?;
    let comms = NcclComm::world_on(&devices, options)?;
    let filter = args.filter.as_deref();
    let results = run_comms(comms, |rank, comm| {
        let measured = measure(&devices[rank], comm, size, filter, &output::note);
        measured.map_err(|error| CommError::Failed {
            rank,
            message: format!("{:#}", anyhow::Error::from(error)),
        })
    });
    let results = results.map_err(|failed| anyhow::anyhow!("{failed}"))?;
    Ok(report::RanksReport {
        device: devices[0].name()?,
        ranks,
        sums: name,
        min_ctas: options.min_ctas,
        measured: results.into_iter().next().context("no ranks")?,
    })
}

#[cfg(not(feature = "cuda"))]
fn run_ranks(_: usize, _: usize, _: &Args) -> Result<report::RanksReport> {
    crate::device::without_cuda()
}

#[cfg(not(feature = "cuda"))]
fn run(_: usize, _: &Args) -> Result<report::Report> {
    crate::device::without_cuda()
}
