//! Amax histories: one warp each.

use lowp_format::{AmaxAlgorithm, delayed_numerator};

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{HISTORY_THREADS, History};
use super::job::Job;
use crate::HistoryJob;

pub(crate) fn job(job: &HistoryJob<Cuda>) -> History {
    History {
        observed: job.observed.at(job.index),
        scale: job.scales.at(job.index),
        history: job.history.pointer(),
        window: job.history.len() as u64,
        numerator: delayed_numerator(job.element, job.margin),
        most_recent: u8::from(job.algorithm == AmaxAlgorithm::MostRecent),
        ..History::default()
    }
}

impl Job for History {
    const KERNELS: &'static [Kernel] = &[Kernel {
        threads: HISTORY_THREADS as u32,
        ..Kernel::new("lowp_history")
    }];
    fn lay_out(&mut self) {}
    fn tiles(&self) -> u64 {
        1
    }
}
