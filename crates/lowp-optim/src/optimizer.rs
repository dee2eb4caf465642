//! [`Optimizer`]: one optimizer step over all parameters of a rank.

use std::fmt::Write as _;
use std::sync::Arc;

use lowp_comm::{CallLog, Communicator, Mesh, Traffic, digest, or_abort};
use lowp_format::codec::remainder::split;
use lowp_kernels::{Backend, KernelError, Rule, StepCounts};
use lowp_shard::{CastPlan, FlatGather, ScaleBook};

use crate::muon::Muon;
use crate::param::Param;
use crate::planned_sets::PlannedSets;
use crate::report::{Compared, PendingStep, StepReport, of_device, read};
use crate::work::StepWork;
use crate::{Group, OptimError, ParamId, StepOptions};

/// Groups of parameters, each with its rule and hyperparameters, that mix recipes and plain parameters, with their scales and the ranks
/// that hold the other rows. Made by [`OptimizerBuilder`](crate::OptimizerBuilder).
#[derive(Debug)]
pub struct Optimizer<B: Backend> {
    /// The step as one call, from the second one on, where the communicator allows it. It is dropped first: libraries
    /// wait for graphs of their collectives before a communicator ends.
    pub(crate) graph: Option<StepGraph<B>>,
    /// Work over gradients at other addresses. It may have graphs, too.
    pub(crate) planned: PlannedSets<B>,
    pub(crate) id: u64,
    pub(crate) backend: B,
    /// Bytes of masters and states in page-locked memory of the host.
    pub(crate) host_bytes: usize,
    pub(crate) world: Arc<dyn Communicator<B>>,
    pub(crate) mesh: Mesh,
    pub(crate) book: Arc<ScaleBook<B>>,
    pub(crate) groups: Vec<Group>,
    pub(crate) params: Vec<Param<B>>,
    pub(crate) cast_plan: CastPlan<B>,
    pub(crate) work: StepWork<B>,
    /// Steps so far, applied or not.
    pub(crate) number: u64,
    /// Bytes of full weights that graphs sent, less those that their captures counted.
    pub(crate) launched: u64,
    /// What the next step compares, and what the last one did.
    pub(crate) done: Vec<CallLog>,
    pub(crate) compared: Compared,
}

/// A captured step.
#[derive(Debug)]
pub(crate) struct StepGraph<B: Backend> {
    graph: B::Graph,
    /// Whether the step takes the norm.
    measures: bool,
    /// Bytes of full weights that a launch sends.
    sent: u64,
    /// What a launch sends in all.
    traffic: Traffic,
    launches: u64,
}

impl<B: Backend> Optimizer<B> {
    /// Casts the masters for the first time, with scales from the values themselves.
    /// [`OptimizerBuilder::build`](crate::OptimizerBuilder::build) does it; again it is needed where masters were
    /// replaced.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// A rank failed or called something else.
    pub fn calibrate(&self) -> Result<(), OptimError> {
        self.cast_plan.calibrate(&self.book, &*self.world)?;
        self.work.gather()
    }

    /// Has the next step compare what this rank has `done` over the ranks, in the gather that every step makes anyway: gradients
    /// that it sent, weights that it gathered. Where ranks did different things no rank applies the step, and its report is an error
    /// that names the first in which they differ. Costs the time of a hash.
    pub fn compare(&mut self, done: CallLog) {
        self.done.push(done);
    }

    /// Replaces the hyperparameters of group `index` from the next step on; the same on every rank.
    ///
    /// # Errors
    /// No such group, values out of range, or another rule, which is planned.
    pub fn set_group(&mut self, index: usize, group: Group) -> Result<(), OptimError> {
        let groups = self.groups.len();
        let Some(old) = self.groups.get_mut(index) else {
            let name = "the new hyperparameters".to_owned();
            return Err(OptimError::NoGroup {
                name,
                group: index,
                groups,
            });
        };
        group.check(index)?;
        if old.rule != group.rule {
            return Err(OptimError::GroupRule {
                group: index,
                planned: old.rule.name(),
                given: group.rule.name(),
            });
        }
        *old = group;
        Ok(())
    }

    /// Applies one step to the parameters that have a gradient: norm, update, amax, agreement, cast, and the gather
    /// of full weights whose masters are flat slices. Every rank must call it.
    ///
    /// The gradient norm is taken over the shards of a replica; replicas must have equal gradients,
    /// which is checked by their norm. A non-finite gradient on any rank skips the update on all ranks
    /// and is counted: masters, states, codes and their scales stay, and scales of other tensors
    /// in the book advance. Afterwards no gradient is ready, and gathered weights are stale.
    ///
    /// Two collectives, whatever the number of parameters: a gather of the sums of squares, and the
    /// maximum of all amaxes; a third one where there are flat slices, their gather; and, with rules of
    /// matrices, those in which matrices travel ([`lowp_comm::Collective::Owned`]). Norm, clipping factor, skip and bias corrections are made on the device.
    /// Where collectives are work of its stream ([`Communicator::is_enqueued`]) the host waits for
    /// nothing, and from the second step on gives the whole step as one graph; what became of it
    /// arrives later. Elsewhere the report is there when the call returns.
    ///
    /// # Errors
    /// A parameter that has no gradient and was not left out ([`Optimizer::leave_out`]), options out of range, options or
    /// parameters that are left out not the same on all ranks, or a rank that failed. Every rank gets an error: in this call or in the wait for its report, or
    /// in its next collective call if the failure was after the last collective of the step, in a
    /// rank's second pass. A rank of its own may try again after mistakes in the arguments; after a
    /// failure of the backend its parameters may be half updated.
    pub fn step(&mut self, options: &StepOptions) -> Result<PendingStep<B>, OptimError> {
        let done = self.try_step(options);
        or_abort(&*self.world, done)
    }

    fn try_step(&mut self, options: &StepOptions) -> Result<PendingStep<B>, OptimError> {
        self.prepare(options)?;
        self.agree()?;
        let enqueued = self.world.is_enqueued();
        match &mut self.graph {
            Some(step) => {
                // Collectives of a world that has failed end without moving anything.
                self.world.control().failure().map_or(Ok(()), Err)?;
                self.backend.launch(&step.graph)?;
                // The capture counted the first launch.
                if step.launches > 0 {
                    self.world.count(step.traffic);
                }
                step.launches += 1;
                self.launched = self.launched.wrapping_add(step.sent);
                self.world
                    .expect(self.backend.record()?, "the optimizer step");
            }
            None => {
                self.enqueue()?;
                if enqueued {
                    let before = self.flat_sent_bytes();
                    let traffic = self.world.traffic();
                    let captured = self.backend.capture(|| self.work.enqueue());
                    let sent = self.flat_sent_bytes() - before;
                    let traffic = self.world.traffic().since(traffic);
                    // The capture counted what it did not send.
                    self.launched = self.launched.wrapping_sub(sent);
                    self.graph = match captured {
                        Ok(graph) => Some(StepGraph {
                            graph,
                            measures: self.work.measures(),
                            sent,
                            traffic,
                            launches: 0,
                        }),
                        // Nothing of a lost capture has run. The next step captures again.
                        Err(OptimError::Kernel(KernelError::CaptureLost)) => None,
                        Err(error) => return Err(error),
                    };
                }
            }
        }
        if enqueued {
            return self.outcome();
        }
        self.finish(options).map(PendingStep::here)
    }

    /// The part of a step that the host does: checks that every gradient is there, gives the device the
    /// options, and says that the rows change. [`Optimizer::agree`] and [`Optimizer::enqueue`], or a graph that captured
    /// the latter, follow, then [`Optimizer::outcome`]; [`Optimizer::step`] is all of them.
    ///
    /// # Errors
    /// A parameter without a gradient, or options out of range: of this rank alone.
    pub fn prepare(&mut self, options: &StepOptions) -> Result<(), OptimError> {
        let done = std::mem::take(&mut self.done);
        options.check()?;
        self.check_ready()?;
        self.follow_left_out()?;
        // One that was captured with other passes does not serve.
        let serves = |step: &StepGraph<B>| step.measures == options.measures();
        self.graph = self.graph.take().filter(serves);
        self.work
            .set(options, self.number + 1, &self.groups, &done)?;
        self.compared = Compared {
            done: done.into(),
            present: Arc::clone(self.work.present()),
        };
        // Before the first write, so that no gather takes the old rows for current.
        self.params.iter().for_each(|p| p.item.begin_write());
        self.number += 1;
        self.clear_grads();
        Ok(())
    }

    /// Compares over the ranks which parameters have a gradient in the step that was prepared, and who works on which matrix, where others would
    /// wait for matrices that do not come. Without rules of matrices it does nothing. Every rank must call it.
    ///
    /// # Errors
    /// On every rank: a parameter that has a gradient on some ranks, or matrices that ranks planned differently. The step is not taken then.
    pub fn agree(&self) -> Result<(), OptimError> {
        const WHAT: &str = "the matrices of the step";
        let (present, control) = (self.work.present(), self.world.control());
        let muon = self.work.muon().filter(|_| self.mesh.shard > 1);
        let Some(muon) = muon else {
            return Ok(());
        };
        // One number of each rank travels while they agree.
        let number = digest([present.digest(), muon.owners()]);
        match control.differing(WHAT, number, self.world.world_size())? {
            None => Ok(()),
            Some(_) => present.compare(control).and(Err(OptimError::OtherOwners)),
        }
    }

    /// Gives the stream the step that was prepared. In a capture it is a part of the caller's graph, where
    /// collectives are work of the stream, too ([`Communicator::is_enqueued`]).
    ///
    /// # Errors
    /// A rank or the backend failed.
    pub fn enqueue(&self) -> Result<(), OptimError> {
        or_abort(&*self.world, self.work.enqueue())
    }

    /// What became of the last step that the stream was given, as soon as it is done.
    ///
    /// # Errors
    /// The backend failed.
    pub fn outcome(&self) -> Result<PendingStep<B>, OptimError> {
        let (bytes, world) = (self.work.report()?, Arc::clone(&self.world));
        let compared = self.compared.clone();
        Ok(PendingStep::on_its_way(
            bytes,
            world,
            self.mesh.shard,
            compared,
        ))
    }

    /// The report of the last step, where the collectives of a step are done when [`Optimizer::enqueue`] returns
    /// ([`Communicator::is_enqueued`] is false): waits for the step, and where ranks gave other options or
    /// hyperparameters, or did other things before ([`Optimizer::compare`]), its error names the first. Every rank must call it.
    ///
    /// # Errors
    /// As [`PendingStep::wait`].
    pub fn finish(&self, options: &StepOptions) -> Result<StepReport, OptimError> {
        let report = read(self.work.report()?)?;
        let differs = match report.consensus {
            Some(_) => self.work.difference(options, self.number, &self.groups)?,
            None => None,
        };
        let shards = self.mesh.shard;
        if differs.is_none() {
            self.compared
                .name_difference(&report, &*self.world, shards)?;
        }
        let what = differs.unwrap_or("the step");
        of_device(&report, what, shards, self.world.world_size())
    }

    /// The master values of this rank's rows, or of its flat slice, widened to f32.
    ///
    /// # Errors
    /// An id of another optimizer, or the backend failed.
    pub fn master(&self, id: ParamId) -> Result<Vec<f32>, OptimError> {
        Ok(self.params[self.index(id)?]
            .master
            .download(&self.backend)?)
    }

    /// The values that the codes of this rank's rows, or of its flat slice, are of: the masters, or the parameters in bf16 that are a half of
    /// them.
    ///
    /// # Errors
    /// An id of another optimizer, or the backend failed.
    pub fn cast_values(&self, id: ParamId) -> Result<Vec<f32>, OptimError> {
        let mut values = self.master(id)?;
        if self.params[self.index(id)?].master.values().is_none() {
            for value in &mut values {
                *value = split(*value).0.to_f32();
            }
        }
        Ok(values)
    }

    /// The states of this rank's rows, or of its flat slice, widened to f32: those of the rule of its group, in their order
    /// ([`Rule::states`](lowp_kernels::Rule::states)).
    ///
    /// # Errors
    /// An id of another optimizer, or the backend failed.
    pub fn states(&self, id: ParamId) -> Result<Vec<Vec<f32>>, OptimError> {
        let param = &self.params[self.index(id)?];
        let names = param.rule.states().iter().zip(&param.states);
        let states = names.map(|(&name, state)| Ok(state.download(&self.backend, name)?));
        states.collect()
    }

    /// The rule of the group of a parameter.
    ///
    /// # Errors
    /// An id of another optimizer.
    pub fn rule(&self, id: ParamId) -> Result<Rule, OptimError> {
        Ok(self.params[self.index(id)?].rule)
    }

    /// Number of parameters.
    pub fn len(&self) -> usize {
        self.params.len()
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// How many steps were applied and skipped. Waits for the steps that the device works on.
    ///
    /// # Errors
    /// The backend failed.
    pub fn counts(&self) -> Result<StepCounts, OptimError> {
        self.work.records().counts()
    }

    /// How many steps each parameter was updated in, in the order in which parameters were added: those that were applied while it had a
    /// gradient. Bias corrections follow it. Waits for the steps that the device works on.
    ///
    /// # Errors
    /// The backend failed.
    pub fn steps(&self) -> Result<Vec<u64>, OptimError> {
        self.work.records().steps()
    }

    /// The gather of the weights whose masters are flat slices, where there are any.
    pub fn flat_gather(&self) -> Option<&FlatGather<B>> {
        self.work.flat_gather()
    }

    /// Bytes that this rank sent so far of weights whose masters are flat slices, counted by the communicator; those
    /// of a step that runs as a graph count with every launch.
    pub fn flat_sent_bytes(&self) -> u64 {
        let counted = self.flat_gather().map_or(0, FlatGather::counted_sent_bytes);
        counted.wrapping_add(self.launched)
    }

    /// Bytes of the memory in which this rank makes matrices orthogonal: those of [`MatrixCosts`](crate::MatrixCosts), and what products work in.
    pub fn matrix_bytes(&self) -> usize {
        self.work.muon().map_or(0, Muon::bytes)
    }

    /// The scales of the parameters, and of what else was registered with the builder.
    pub fn scales(&self) -> &Arc<ScaleBook<B>> {
        &self.book
    }

    pub(crate) fn index(&self, id: ParamId) -> Result<usize, OptimError> {
        if id.optimizer == self.id {
            return Ok(id.index);
        }
        let len = self.len();
        Err(OptimError::OtherOptimizer { len })
    }

    fn check_ready(&self) -> Result<(), OptimError> {
        let mut missing = self.params.iter().filter(|p| !p.ready && !p.left_out);
        let Some(first) = missing.next() else {
            return Ok(());
        };
        Err(OptimError::MissingGradient {
            name: first.name.clone(),
            missing: 1 + missing.count(),
            total: self.params.len(),
        })
    }

    /// Everything that ranks must have in common, as text: not the rows, which they share out. `compares_cut` says of which parameters the cut
    /// of a matrix is among it.
    pub(crate) fn describe(&self, compares_cut: impl Fn(usize) -> bool) -> String {
        let mut text = format!("{} parameters", self.params.len());
        for (index, param) in self.params.iter().enumerate() {
            let (name, group, item) = (&param.name, param.group, &param.item);
            // Writing to a String cannot fail.
            let _ = write!(text, "; {name}: group {group}, {} columns", item.shape.cols);
            let _ = write!(text, ", {:?}", item.kernels);
            let _ = write!(text, ", {:?}", item.source_rounding);
            let _ = write!(text, ", {}", param.describe_states());
            if let Some(cut) = param.cut.as_ref().filter(|_| compares_cut(index)) {
                let _ = write!(text, ", a matrix of {}", cut.describe());
            }
        }
        text
    }

    /// The hyperparameters that ranks must have in common, in words.
    pub(crate) fn describe_groups(&self) -> String {
        let lines = self.groups.iter().enumerate().map(|(index, group)| {
            let Group { rule, lr, betas, eps, weight_decay, bias_correction } = group;
            let correction = if *bias_correction { "with" } else { "without" };
            format!(
                "group {index}: {} {correction} bias correction, lr {lr}, betas {} and {}, eps {eps}, weight decay {weight_decay}",
                rule.name(), betas.0, betas.1
            )
        });
        lines.collect::<Vec<_>>().join("; ")
    }
}
