//! What a step did, as the host hears of it.

use std::sync::Arc;

use lowp_comm::{CallLog, Communicator, or_abort};
use lowp_kernels::{Backend, Pending, StepRecord};

use crate::OptimError;
use crate::present::Present;

/// Euclidean norm and count of non-finite values of all gradients of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradNorm {
    /// The norm over the shards, after `grad_scale` and before clipping; not finite if a gradient of this
    /// replica is not. Squares are exact and sums are taken in binary64: on each rank in parameter order,
    /// then in rank order.
    pub norm: f64,
    /// Non-finite gradient values of all ranks; one that every replica holds counts in each.
    pub non_finite: u64,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Whether parameters were updated; false where a gradient of any rank was not finite, or
    /// would leave the range of f32 when scaled.
    pub applied: bool,
    /// Global norm and non-finite count.
    pub grad: GradNorm,
    /// What gradients were multiplied by to clip their norm; 1 where they were not clipped.
    pub clip: f32,
    /// Steps that were applied so far, this one included.
    pub steps: u64,
    /// Steps that were skipped so far, this one included.
    pub skipped: u64,
}

/// The report of a step that the device may still work on ([`crate::Optimizer::step`]).
#[derive(Debug)]
#[must_use = "a step that was skipped, or that ranks disagree on, says so in its report"]
pub struct PendingStep<B: Backend> {
    arrival: Arrival<B>,
}

#[derive(Debug)]
enum Arrival<B: Backend> {
    Here(StepReport),
    OnItsWay {
        bytes: Pending<u8>,
        world: Arc<dyn Communicator<B>>,
        shards: usize,
        compared: Compared,
    },
}

impl<B: Backend> PendingStep<B> {
    pub(crate) fn here(report: StepReport) -> Self {
        let arrival = Arrival::Here(report);
        Self { arrival }
    }

    pub(crate) fn on_its_way(
        bytes: Pending<u8>,
        world: Arc<dyn Communicator<B>>,
        shards: usize,
        compared: Compared,
    ) -> Self {
        let arrival = Arrival::OnItsWay {
            bytes,
            world,
            shards,
            compared,
        };
        Self { arrival }
    }

    /// Waits until the step is done. Where ranks did other things before it ([`Optimizer::compare`](crate::Optimizer::compare)) they tell
    /// each other which, so every rank waits for it.
    ///
    /// # Errors
    /// Ranks that did not do the same step or the same before it, a rank that failed, or the device failed.
    pub fn wait(self) -> Result<StepReport, OptimError> {
        match self.arrival {
            Arrival::Here(report) => Ok(report),
            Arrival::OnItsWay {
                bytes,
                world,
                shards,
                compared,
            } => {
                let report = read(bytes)?;
                // Collectives that were ended left what was there before.
                world.control().failure().map_or(Ok(()), Err)?;
                compared.name_difference(&report, &*world, shards)?;
                let size = world.world_size();
                let checked = of_device(
                    &report,
                    "the step: its number, its options, the hyperparameters of a group or the gradients that were sent",
                    shards,
                    size,
                );
                or_abort(&*world, checked)
            }
        }
    }
}

/// The report that the device wrote.
pub(crate) fn read(bytes: Pending<u8>) -> Result<StepRecord, OptimError> {
    let mut report = [0; StepRecord::BYTES];
    report.copy_from_slice(&bytes.wait()?);
    Ok(StepRecord::from_bytes(&report))
}

/// What a step compared over the ranks beside its options.
#[derive(Clone, Debug, Default)]
pub(crate) struct Compared {
    /// What was done before.
    pub(crate) done: Arc<[CallLog]>,
    /// The parameters that have a gradient.
    pub(crate) present: Arc<Present>,
}

impl Compared {
    /// Where a report says that ranks differ: says in what, if it is one of these.
    pub(crate) fn name_difference<B: Backend>(
        &self,
        report: &StepRecord,
        world: &dyn Communicator<B>,
        shards: usize,
    ) -> Result<(), OptimError> {
        if report.consensus.or(report.within).is_none() {
            return Ok(());
        }
        let compared = self.done.iter();
        let mut compared = compared.map(|done| done.compare(world.control(), shards));
        let compared = compared
            .try_for_each(|compared| compared.map_err(OptimError::from))
            .and_then(|()| self.present.compare(world.control()));
        match compared {
            Err(found) if found.is_difference() => Err(found),
            // A rank that does not wait for its report: what the report says is the cause.
            _ => Ok(()),
        }
    }
}

/// The report of a step that all of `world` ranks did alike; `options` is what they may differ in.
pub(crate) fn of_device(
    report: &StepRecord,
    options: &'static str,
    shards: usize,
    world: usize,
) -> Result<StepReport, OptimError> {
    let replica = |replica| (replica * shards, "the gradient norm of their replica");
    let within = report.within.map(|rank| (rank, "the gathers of a step"));
    let differs = report.consensus.map(|rank| (rank, options)).or(within);
    if let Some((rank, what)) = differs.or_else(|| report.replicas.map(replica)) {
        return Err(OptimError::Disagree { what, rank, world });
    }
    Ok(StepReport {
        applied: report.applied,
        grad: GradNorm {
            norm: report.norm,
            non_finite: report.non_finite,
        },
        clip: report.clip,
        steps: report.steps,
        skipped: report.skipped,
    })
}
