//! The memory of a machine: what this process can get of it at most.

use std::fs;
use std::path::{Path, PathBuf};

const CGROUPS: &str = "/sys/fs/cgroup";

/// Bytes of memory that this process can get at most, swap included, where the system tells.
pub fn memory() -> Option<u128> {
    limits().chain(with_swap(&meminfo())).min()
}

/// Bytes that this process can lock in memory at most: what is available now without swap, but for a twentieth that is left to everything else.
pub fn lockable() -> Option<u128> {
    let available = line(&meminfo(), "MemAvailable:");
    let most = limits().chain(available).min();
    most.map(|bytes| bytes - bytes / 20)
}

fn meminfo() -> String {
    fs::read_to_string("/proc/meminfo").unwrap_or_default()
}

fn with_swap(meminfo: &str) -> Option<u128> {
    let memory = line(meminfo, "MemTotal:")?;
    Some(memory + line(meminfo, "SwapTotal:").unwrap_or(0))
}

/// A line of `/proc/meminfo` says, for example, `MemTotal:  24114852 kB`.
fn line(meminfo: &str, key: &str) -> Option<u128> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
    let kilobytes: u128 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

/// The limits of the control groups of this process.
fn limits() -> impl Iterator<Item = u128> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let files = limit_files(&own).into_iter();
    files.filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok())
}

/// Where the limits are of the groups that `/proc/self/cgroup` names, and of all groups above them: version 2 has one line `0::/path`, version 1
/// has one for each controller, such as `4:memory:/path`. In a container the path may be that of its host, and the mount its own.
fn limit_files(groups: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for group in groups.lines() {
        let mut parts = group.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let root = Path::new(CGROUPS);
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let path = Path::new(path.trim_start_matches('/'));
        files.extend(path.ancestors().map(|group| root.join(group).join(file)));
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_of_the_group_and_all_above() {
        let files = |groups: &str| {
            let files = limit_files(groups);
            let files = files.iter().map(|file| file.to_string_lossy().into_owned());
            files.collect::<Vec<_>>()
        };
        assert_eq!(
            files("0::/slurm/job_7\n"),
            [
                "/sys/fs/cgroup/slurm/job_7/memory.max",
                "/sys/fs/cgroup/slurm/memory.max",
                "/sys/fs/cgroup/memory.max"
            ]
        );
        assert_eq!(
            files("5:cpu,cpuacct:/a\n4:memory:/a\n"),
            [
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes"
            ]
        );
        assert_eq!(files("0::/\n"), ["/sys/fs/cgroup/memory.max"]);
        assert_eq!(files("no group"), [""; 0]);
    }

    #[test]
    fn lines_have_kilobytes() {
        let text = "MemTotal:       24114852 kB\nMemAvailable:    100 kB\nSwapTotal:  1024 kB\nHugePages_Total:  0\n";
        assert_eq!(with_swap(text), Some((24_114_852 + 1024) * 1024));
        assert_eq!(with_swap(""), None);
        assert_eq!(line(text, "MemAvailable:"), Some(102_400));
        assert_eq!(line(text, "HugePages_Total:"), None);
    }

    #[test]
    fn less_can_be_locked_than_there_is() {
        if cfg!(target_os = "linux") {
            let [all, lockable] = [memory(), lockable()].map(|bytes| bytes.expect("bytes"));
            assert!(1 << 26 < all && 0 < lockable && lockable < all);
        }
    }
}
