//! The GPUs of ranks that are threads of this process.

use crate::usage::input_error;
use anyhow::Result;
use lowp_kernels::Cuda;

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
