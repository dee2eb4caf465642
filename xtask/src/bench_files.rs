//! `cargo xtask bench-files`: how long the file commands take in memory-backed files, as multiples of `cp` of what they read, and what memory
//! they hold of one large tensor. A bar that is missed fails the command.

mod input;
mod process;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use self::process::{Spent, run, watch};
use crate::bench::median;
use crate::command::{build_program, cargo};

/// What is measured, and where.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// GiB of bf16 in the 64 tensors of the input. The folder must have room for four times as much.
    #[arg(long, default_value_t = 4)]
    gib: usize,
    /// Runs of every command, which alternate with those of the others. Medians are printed.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// One core: `cp` and the commands run under `taskset -c 0`.
    #[arg(long)]
    one_core: bool,
    /// Only memory: one tensor of this many GiB.
    #[arg(long, value_name = "GIB")]
    memory: Option<usize>,
    /// A file system in memory.
    #[arg(long, default_value = "/dev/shm")]
    folder: PathBuf,
    /// Another lowp program, which takes its turn beside the one of this checkout.
    #[arg(long, value_name = "PROGRAM")]
    against: Option<PathBuf>,
    /// Only rows whose name contains this text.
    filter: Option<String>,
}

/// A command that is measured.
struct Row {
    name: &'static str,
    /// Its arguments, of which `IN` is the input, `Q` the quantized input and `OUT` a file to write.
    line: &'static str,
    /// Recipe and usage of the quantized input.
    quantized: [&'static str; 2],
    /// The most multiples of `cp` that it may take on two cores.
    bar: Option<f64>,
}

const MXFP8: [&str; 2] = ["mxfp8", "both"];
const FP8: [&str; 2] = ["fp8-current", "both"];
const NVFP4: [&str; 2] = ["nvfp4-2d", "both"];

const ROWS: [Row; 9] = [
    Row {
        name: "quantize mxfp8",
        line: "quantize IN -o OUT --recipe mxfp8",
        quantized: MXFP8,
        bar: Some(1.6),
    },
    Row {
        name: "quantize fp8-current",
        line: "quantize IN -o OUT --recipe fp8-current",
        quantized: FP8,
        bar: Some(2.2),
    },
    Row {
        name: "quantize nvfp4-2d",
        line: "quantize IN -o OUT --recipe nvfp4-2d",
        quantized: NVFP4,
        bar: Some(2.2),
    },
    Row {
        name: "dequantize mxfp8",
        line: "dequantize Q -o OUT",
        quantized: MXFP8,
        bar: Some(3.0),
    },
    // Writes four times the bytes that it reads, and the copy of so many is beyond the bar.
    Row {
        name: "dequantize mxfp8, rowwise only",
        line: "dequantize Q -o OUT",
        quantized: ["mxfp8", "rowwise"],
        bar: None,
    },
    Row {
        name: "verify --source mxfp8",
        line: "verify Q --source IN",
        quantized: MXFP8,
        bar: Some(2.0),
    },
    Row {
        name: "verify --source fp8-current",
        line: "verify Q --source IN",
        quantized: FP8,
        bar: Some(2.0),
    },
    Row {
        name: "verify --source nvfp4-2d",
        line: "verify Q --source IN",
        quantized: NVFP4,
        bar: Some(2.0),
    },
    Row {
        name: "verify two files mxfp8",
        line: "verify Q Q",
        quantized: MXFP8,
        bar: Some(2.0),
    },
];

/// What one core may take of a bar.
const ONE_CORE: f64 = 1.6;
/// Most bytes beside the mapped input, whatever the tensor.
const MEMORY: u64 = 256_000_000;

/// A folder that goes away with its value.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // If files are left, the next run finds no room and says so.
        drop(fs::remove_dir_all(&self.0));
    }
}

impl Scratch {
    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

/// Measures, prints the table, and fails where a bar is missed.
pub(crate) fn bench_files(options: &Options) -> Result<()> {
    let own = build_program(cargo(&[
        "build",
        "--release",
        "-p",
        "lowp-cli",
        "--bin",
        "lowp",
    ])?)?;
    let programs: Vec<PathBuf> = [own].into_iter().chain(options.against.clone()).collect();
    let folder = format!("lowp-bench-files-{}", std::process::id());
    let scratch = Scratch(options.folder.join(folder));
    fs::create_dir_all(&scratch.0).with_context(|| format!("making {}", scratch.0.display()))?;
    let filter = options.filter.as_ref();
    let wanted = |row: &&Row| filter.is_none_or(|text| row.name.contains(text));
    let rows: Vec<&Row> = ROWS.iter().filter(wanted).collect();
    ensure!(!rows.is_empty(), "no row matches {:?}", options.filter);
    match options.memory {
        Some(gib) => memory(&scratch, &programs[0], &rows, gib),
        None => times(&scratch, &programs, &rows, options),
    }
}

/// The arguments of a row, whose quantized file lies there afterwards, and the file that it reads.
fn prepare(scratch: &Scratch, program: &Path, row: &Row) -> Result<(Vec<String>, String)> {
    let [input, quantized, out] =
        ["in", "q", "out"].map(|name| scratch.file(&format!("{name}.safetensors")));
    let [recipe, usage] = row.quantized;
    let words: Vec<&str> = row.line.split(' ').collect();
    if words.contains(&"Q") {
        let made = [
            "quantize", &input, "-o", &quantized, "--recipe", recipe, "--usage", usage,
        ];
        run(program, &made.map(str::to_owned), false)?;
    }
    // All of its source in the case of verify.
    let read = if words[0] == "dequantize" {
        &quantized
    } else {
        &input
    };
    let arg = |word: &&str| match *word {
        "IN" => input.clone(),
        "Q" => quantized.clone(),
        "OUT" => out.clone(),
        other => other.to_owned(),
    };
    Ok((words.iter().map(arg).collect(), read.clone()))
}

fn times(scratch: &Scratch, programs: &[PathBuf], rows: &[&Row], options: &Options) -> Result<()> {
    input::write(
        Path::new(&scratch.file("in.safetensors")),
        64,
        options.gib << 24,
    )?;
    println!(
        "| command | of cp | bar | all | seconds | CPU seconds | cp seconds | GB read | GB written |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut missed = Vec::new();
    for row in rows {
        let (command, bar) = (row.name, row.bar);
        let (args, read) = prepare(scratch, &programs[0], row)?;
        let [copy, out] = ["copy", "out.safetensors"].map(|name| scratch.file(name));
        let mut spent: Vec<Vec<Spent>> = vec![Vec::new(); programs.len() + 1];
        let mut written = 0;
        for _ in 0..options.runs {
            let cp = [read.clone(), copy.clone()];
            spent[0].push(run(Path::new("cp"), &cp, options.one_core)?);
            fs::remove_file(&copy)?;
            for (program, spent) in programs.iter().zip(&mut spent[1..]) {
                spent.push(run(program, &args, options.one_core)?);
                if let Ok(file) = fs::metadata(&out) {
                    written = file.len();
                    fs::remove_file(&out)?;
                }
            }
        }
        let gigabytes = |bytes: u64| format!("{:.2}", bytes as f64 / 1e9);
        let [read, written] = [fs::metadata(&read)?.len(), written].map(gigabytes);
        for (number, program) in spent[1..].iter().enumerate() {
            let ratios: Vec<f64> = program
                .iter()
                .zip(&spent[0])
                .map(|(a, cp)| a.seconds / cp.seconds)
                .collect();
            let ratio = median(ratios.clone());
            let bar = bar.map(|bar| bar * if options.one_core { ONE_CORE } else { 1.0 });
            let shown = bar.map_or_else(String::new, |bar| format!("{bar:.2}"));
            let seconds = |of: &[Spent]| median(of.iter().map(|spent| spent.seconds).collect());
            let cpu = median(program.iter().map(|spent| spent.cpu).collect());
            let name = format!("{}{}", command, if number == 0 { "" } else { " (other)" });
            println!(
                "| {name} | {ratio:.2} | {shown} | {} | {:.2} | {cpu:.2} | {:.2} | {read} | {written} |",
                listed(&ratios),
                seconds(program),
                seconds(&spent[0]),
            );
            if number == 0 && bar.is_some_and(|bar| ratio > bar) {
                missed.push(format!("{name}: {ratio:.2}, bar {shown}"));
            }
        }
    }
    result(&missed)
}

fn memory(scratch: &Scratch, program: &Path, rows: &[&Row], gib: usize) -> Result<()> {
    input::write(Path::new(&scratch.file("in.safetensors")), 1, gib << 30)?;
    println!(
        "| command | MB anonymous | MB mapped of files in memory | seconds |\n|---|---|---|---|"
    );
    let mut missed = Vec::new();
    for row in rows {
        let command = row.name;
        let (args, _) = prepare(scratch, program, row)?;
        let peak = watch(program, &args)?;
        drop(fs::remove_file(scratch.file("out.safetensors")));
        let [anonymous, mapped] = [peak.anonymous, peak.mapped].map(|bytes| bytes / 1_000_000);
        println!(
            "| {} | {anonymous} | {mapped} | {:.2} |",
            command, peak.seconds
        );
        if peak.anonymous > MEMORY {
            missed.push(format!("{}: {anonymous} MB", command));
        }
    }
    result(&missed)
}

fn result(missed: &[String]) -> Result<()> {
    if !missed.is_empty() {
        bail!("{} bars are missed. {}", missed.len(), missed.join("; "));
    }
    Ok(())
}

fn listed(values: &[f64]) -> String {
    let values: Vec<String> = values.iter().map(|value| format!("{value:.2}")).collect();
    values.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_one_of_the_values() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn a_missed_bar_fails() {
        assert!(result(&[]).is_ok());
        assert!(result(&["quantize: 3".to_owned()]).is_err());
    }
}
