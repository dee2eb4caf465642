//! `--device`: where arithmetic runs.

use crate::usage::input_error;
use anyhow::Result;
use lowp_kernels::{Backend, Cpu};
use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Cpu,
    Cuda(usize),
}

impl Device {
    /// What it is, without its number.
    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda(_) => "cuda",
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok();
        match text.split_once(':') {
            None if text == "cpu" => Some(Self::Cpu),
            None if text == "cuda" => Some(Self::Cuda(0)),
            Some(("cuda", ordinal)) => number(ordinal).map(Self::Cuda),
            _ => None,
        }
        .ok_or_else(|| "devices are `cpu`, `cuda` and `cuda:N`".to_owned())
    }
}

pub(crate) trait OnDevice {
    fn run<B: Backend>(self, backend: &B) -> Result<()>;
}

impl Device {
    /// Runs `task` on this device, and nowhere else.
    pub(crate) fn run<T: OnDevice>(self, task: T) -> Result<()> {
        match self {
            Self::Cpu => task.run(&Cpu),
            #[cfg(feature = "cuda")]
            Self::Cuda(ordinal) => task.run(&open(ordinal)?),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda(_) => without_cuda(),
        }
    }
}

#[cfg(feature = "cuda")]
pub(crate) fn open(ordinal: usize) -> Result<lowp_kernels::Cuda> {
    lowp_kernels::Cuda::new(ordinal).map_err(|error| input_error(error.to_string()))
}

/// A program without the CUDA backend says so; it never runs on the CPU instead.
#[cfg(not(feature = "cuda"))]
pub(crate) fn without_cuda<T>() -> Result<T> {
    Err(input_error(
        "this lowp was built without CUDA; build it with `cargo xtask cuda && cargo build --release --features cuda`",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        for (text, device) in [
            ("cpu", Some(Device::Cpu)),
            ("cuda", Some(Device::Cuda(0))),
            ("cuda:3", Some(Device::Cuda(3))),
            ("cuda:", None),
            ("gpu", None),
        ] {
            assert_eq!(text.parse().ok(), device, "{text}");
        }
    }
}
