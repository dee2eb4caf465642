//! The GPUs of ranks that are threads of this process, and NCCL between them.

use crate::usage::input_error;
use anyhow::{Result, anyhow};
use lowp_comm::{CommError, Control, threads};
use lowp_kernels::{Backend, Cuda};
use lowp_nccl::{NcclComm, NcclOptions};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// `ranks` GPUs from number `first` on, as many as `option` asked for.
pub(crate) fn open(option: &str, first: usize, ranks: usize) -> Result<Vec<Cuda>> {
    let found = Cuda::count()?;
    if first + ranks > found && found > 0 {
        let remedy = match found.saturating_sub(first) {
            0 => "give --device cuda:N with a smaller N".to_owned(),
            rest => format!("give {option} {rest} or less"),
        };
        return Err(input_error(format!(
            "{option} {ranks} from cuda:{first} on: this machine has {found} GPUs; {remedy}"
        )));
    }
    (first..first + ranks).map(crate::device::open).collect()
}

/// Their communicators, each on a stream of its own. A rank that waits longer than `limit` for another fails.
pub(crate) fn join(
    devices: &[Cuda],
    limit: Duration,
    options: NcclOptions,
) -> Result<Vec<NcclComm>> {
    let controls = threads(devices.len(), limit);
    let join =
        |(cuda, control): (&Cuda, Arc<dyn Control>)| NcclComm::new(control, &cuda.fork()?, options);
    let comms: Result<Vec<NcclComm>, CommError> = thread::scope(|scope| {
        let start = |rank| scope.spawn(move || join(rank));
        let joining: Vec<_> = devices.iter().zip(controls).map(start).collect();
        let joined = joining.into_iter().map(|rank| rank.join());
        let lost = |_| CommError::Failed {
            rank: 0,
            message: "a thread that joins NCCL panicked".to_owned(),
        };
        joined.map(|rank| rank.map_err(lost)?).collect()
    });
    comms.map_err(|error| anyhow!("{error}"))
}
