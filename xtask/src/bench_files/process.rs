//! Programs that are timed and watched.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::command::display;

#[derive(Clone, Copy, Debug)]
pub(super) struct Spent {
    pub(super) seconds: f64,
    /// Of all cores, in the hundredths that the system counts.
    pub(super) cpu: f64,
}

/// The most memory that a process had at a time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peak {
    /// `RssAnon`.
    pub(super) anonymous: u64,
    /// `RssShmem` and `RssFile`: maps of files. Outputs are written and not mapped, so these are inputs, and the program.
    pub(super) mapped: u64,
    pub(super) seconds: f64,
}

/// Runs `program` to its end, on the first core alone where `one_core` says so.
pub(super) fn run(program: &Path, args: &[String], one_core: bool) -> Result<Spent> {
    let before = cpu_of_children()?;
    let (child, start) = start(program, args, one_core)?;
    let seconds = end(child, start)?;
    Ok(Spent {
        seconds,
        cpu: cpu_of_children()? - before,
    })
}

/// Runs `program` and looks at its memory every two milliseconds.
pub(super) fn watch(program: &Path, args: &[String]) -> Result<Peak> {
    let ((mut child, line), start) = start(program, args, false)?;
    let status = format!("/proc/{}/status", child.id());
    let mut peak = Peak::default();
    while child.try_wait()?.is_none() {
        // The process may have ended meanwhile.
        let text = fs::read_to_string(&status).unwrap_or_default();
        let bytes = |key: &str| field(&text, key).unwrap_or(0) * 1024;
        peak.anonymous = peak.anonymous.max(bytes("RssAnon:"));
        peak.mapped = peak.mapped.max(bytes("RssShmem:") + bytes("RssFile:"));
        thread::sleep(Duration::from_millis(2));
    }
    peak.seconds = end((child, line), start)?;
    Ok(peak)
}

fn start(program: &Path, args: &[String], one_core: bool) -> Result<((Child, String), Instant)> {
    let mut command = match one_core {
        true => {
            let mut command = Command::new("taskset");
            command.args(["-c", "0"]).arg(program);
            command
        }
        false => Command::new(program),
    };
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let line = display(&command);
    let start = Instant::now();
    let child = command
        .spawn()
        .with_context(|| format!("cannot start `{line}`"))?;
    Ok(((child, line), start))
}

fn end((mut child, line): (Child, String), start: Instant) -> Result<f64> {
    let status = child.wait()?;
    let seconds = start.elapsed().as_secs_f64();
    ensure!(status.success(), "`{line}` failed ({status})");
    Ok(seconds)
}

/// CPU seconds of the processes that this one waited for: fields 16 and 17 of /proc/self/stat.
fn cpu_of_children() -> Result<f64> {
    let text = fs::read_to_string("/proc/self/stat").context("reading /proc/self/stat")?;
    children(&text).context("/proc/self/stat has other fields")
}

fn children(stat: &str) -> Option<f64> {
    // The name, in parentheses, may hold spaces; it is the second field.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(13);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / 100.0)
}

/// The number after `key` in the text of /proc/PID/status.
fn field(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found() {
        let stat = "12 (a b) S 1 2 3 4 5 6 7 8 9 10 11 12 150 50 20 0";
        assert_eq!(children(stat), Some(2.0));
        assert_eq!(children("12"), None);
        let status = "Name:\tlowp\nRssAnon:\t    1234 kB\nRssFile:\t 5 kB\n";
        assert_eq!(field(status, "RssAnon:"), Some(1234));
        assert_eq!(field(status, "RssShmem:"), None);
    }
}
