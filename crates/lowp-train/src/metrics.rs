//! [`Metrics`]: what is known of a step when it is done.

use serde::Serialize;

/// A step; the field names are the keys of a log.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Metrics {
    /// Steps that are done.
    pub step: usize,
    /// Loss of the step's batch before its update.
    pub loss: f64,
    /// Learning rate of the step, by the schedule.
    pub lr: f64,
    /// Norm of all gradients, before clipping.
    pub grad_norm: f64,
    /// Whether gradients were not finite, so that nothing was updated.
    pub skipped: bool,
    /// Tokens of all steps that are done.
    pub tokens: u64,
    /// The tokens as a number of passes over the training splits of all sources; `None` for text.
    pub epoch: Option<f64>,
    /// Wall time of the step.
    pub seconds: f64,
    /// Tokens that all ranks together train in a second.
    pub tokens_per_second: f64,
    /// Floating-point operations of all ranks in a second, by [`Model::flops_per_token`](crate::Model::flops_per_token).
    pub flops_per_second: f64,
    /// `flops_per_second` as a share of what the devices could do, where their peak is known.
    pub mfu: Option<f64>,
    /// The share of the time in which rank 0 waited for its data.
    pub data_wait: f64,
    /// The most bytes of rank 0's device so far, where something measures it.
    pub device_bytes: Option<u64>,
    /// Bytes of memory that the process of rank 0 has, on Linux.
    pub host_bytes: Option<u64>,
}

/// Bytes of memory that this process has.
pub(crate) fn host_bytes() -> Option<u64> {
    status("VmRSS:")
}

/// A number of bytes in the status of this process.
fn status(key: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// A step with made-up numbers.
#[cfg(test)]
pub(crate) fn made_up(step: usize) -> Metrics {
    Metrics {
        step,
        loss: 2.5,
        lr: 1e-3,
        grad_norm: 1.5,
        skipped: false,
        tokens: 512 * step as u64,
        epoch: Some(0.25),
        seconds: 0.5,
        tokens_per_second: 1024.0,
        flops_per_second: 1e9,
        mfu: None,
        data_wait: 0.0,
        device_bytes: None,
        host_bytes: Some(1 << 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_is_read() {
        let bytes = host_bytes();
        assert!(!cfg!(target_os = "linux") || bytes.is_some_and(|bytes| bytes > 1 << 20));
        assert_eq!(status("no such key"), None);
    }
}
