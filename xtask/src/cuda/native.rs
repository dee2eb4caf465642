//! `--arch native`: the architecture of the GPUs of this machine, as NVIDIA's driver names it.

use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use lowp_nvcc::Arch;

use crate::command::answer;

pub(super) fn arch() -> Result<Arch> {
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-gpu=compute_cap", "--format=csv,noheader"]);
    let text = answer(command).context(
        "`--arch native` asks nvidia-smi for the GPUs of this machine; name an architecture, such as `--arch sm_100`",
    )?;
    of(&String::from_utf8_lossy(&text))
}

/// The architecture of GPUs with these compute capabilities, a line each.
fn of(capabilities: &str) -> Result<Arch> {
    let arch = |line: &str| {
        let (major, minor) = line.trim().split_once('.')?;
        Arch::of_capability((major.parse().ok()?, minor.parse().ok()?))
    };
    let none = |line: &str| {
        let line = line.trim();
        anyhow!(
            "no kernels are of the family of compute capability {line}; `--arch sm_80` has PTX for it, up to 11, and `--arch sm_120` from 12 on"
        )
    };
    let archs = capabilities
        .lines()
        .map(|line| arch(line).ok_or_else(|| none(line)));
    let archs = archs.collect::<Result<Vec<_>>>()?;
    let first = *archs.first().context("nvidia-smi names no GPU")?;
    ensure!(
        archs.iter().all(|arch| *arch == first),
        "the GPUs of this machine are of several architectures; name them with `--arch`"
    );
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_architecture_is_that_of_all_gpus() {
        assert_eq!(of("10.3\n10.3\n").unwrap().name, "sm_100");
        assert_eq!(of("9.0\n").unwrap().name, "sm_90");
        for (text, why) in [
            ("9.0\n10.0\n", "several"),
            ("11.0\n", "sm_80"),
            ("", "no GPU"),
        ] {
            let error = of(text).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
