//! A parameter: what it is made of, and its buffers on the device.

use std::sync::Arc;

use half::bf16;
use lowp_format::ShardTiles;
use lowp_kernels::{
    AmaxJob, Backend, FloatDtype, KernelError, Master, MasterDtype, MomentumJob, Rule, Source,
    State, StateDtype, UpdateJob, UpdateRandom,
};
use lowp_shard::{CastItem, CastRange, ScaleBook, ShardError};

use crate::{MatrixCut, StateDtypes};

/// One parameter as this rank sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Its name, which no other parameter of the optimizer has.
    pub name: String,
    /// Index returned by [`OptimizerBuilder::group`](crate::OptimizerBuilder::group).
    pub group: usize,
    /// Initial master values of this rank's rows, row-major, or of its slice of the flattened matrix
    /// ([`OptimizerBuilder::flat_param`](crate::OptimizerBuilder::flat_param)). Masters in bf16 begin with them rounded to nearest even.
    pub master: Vec<f32>,
    /// The dtype that its gradient is stored in; the update reads it as f32.
    pub grad: FloatDtype,
    /// Storage of the master, and of the states of its rule. A master of 16 bits beside a parameter in bf16 is in f32 where the parameter is not
    /// in bf16 ([`StateDtypes::of_recipe`]).
    pub state: StateDtypes,
    /// Where the values of `master` lie in the matrix.
    pub place: ParamPlace,
}

/// Where consecutive elements of this rank lie in the matrix of a parameter. The elements of a matrix round by random bits of their own, so
/// that no cut changes a bit (docs/numerics.md 23.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParamPlace {
    /// The first of them, in the flattened tall matrix.
    pub start: usize,
    /// The tiles of the matrix, where they are not in the order of its rows.
    pub tiles: Option<ShardTiles>,
}

impl ParamSpec {
    /// A parameter with f32 gradients and states.
    pub fn new(name: impl Into<String>, group: usize, master: Vec<f32>) -> Self {
        Self {
            name: name.into(),
            group,
            master,
            grad: FloatDtype::F32,
            state: StateDtypes::default(),
            place: ParamPlace::default(),
        }
    }
}

/// The name of a parameter in its optimizer. Other optimizers reject it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId {
    pub(crate) optimizer: u64,
    pub(crate) index: usize,
}

/// A registered parameter: its buffers on the device.
#[derive(Debug)]
pub(crate) struct Param<B: Backend> {
    pub(crate) name: String,
    pub(crate) group: usize,
    pub(crate) len: usize,
    pub(crate) master: Master<B>,
    pub(crate) rule: Rule,
    pub(crate) states: Vec<State<B>>,
    /// Which random bits its master and its states round by.
    pub(crate) random: UpdateRandom,
    pub(crate) grad: Source<B>,
    /// Of a rule of matrices: which elements of the matrix each rank has, where it is known.
    pub(crate) cut: Option<Arc<MatrixCut>>,
    /// Of a rule of matrices: what is made orthogonal of this rank's elements, and then the result.
    pub(crate) piece: Option<B::Buffer<bf16>>,
    pub(crate) item: CastItem<B>,
    pub(crate) ready: bool,
    /// Has no gradient in this step, and is left as it is.
    pub(crate) left_out: bool,
}

impl<B: Backend> Param<B> {
    /// Says that it has a gradient in this step.
    pub(crate) fn set_ready(&mut self) {
        (self.ready, self.left_out) = (true, false);
    }

    /// Replaces its master values. Those in halves change the weight, which says so before.
    pub(crate) fn write_master(&self, backend: &B, values: &[f32]) -> Result<(), KernelError> {
        if self.master.values().is_none() {
            self.item.begin_write();
        }
        self.master.upload(backend, values)
    }

    /// Whether an update rounds by random bits: a state is in fp8, or the master in bf16.
    pub(crate) fn is_stochastic(&self) -> bool {
        let fp8 = |state: &State<B>| state.dtype() == StateDtype::Fp8;
        self.master.dtype() == MasterDtype::Bf16 || self.states.iter().any(fp8)
    }

    /// Its master and states with their dtypes, as text.
    pub(crate) fn describe_states(&self) -> String {
        let states = self.rule.states().iter().zip(&self.states);
        let states = states.map(|(name, state)| (name.name(), state.dtype().name()));
        let all = [(StateDtypes::MASTER, self.master.dtype().name())];
        let all = all.into_iter().chain(states);
        let all = all.map(|(name, dtype)| format!("{name}={dtype}"));
        let states = all.collect::<Vec<_>>().join(",");
        match self.is_stochastic() {
            true => format!("{states} by seed {}", self.random.seed),
            false => states,
        }
    }

    /// The pass of a step before the update, over `grad`: the momentum of a rule of matrices.
    pub(crate) fn momentum(&self, grad: &Source<B>, group: usize) -> Option<MomentumJob<B>> {
        match (&self.piece, self.states.first()) {
            (Some(piece), Some(State::Values(Source::F32(momentum)))) => Some(MomentumJob {
                grad: grad.clone(),
                momentum: momentum.clone(),
                out: piece.clone(),
                group,
            }),
            _ => None,
        }
    }

    /// The first pass of a step.
    pub(crate) fn update(&self, book: &ScaleBook<B>) -> Result<UpdateJob<B>, ShardError> {
        // A flat slice is not encoded with the update: it is no matrix.
        let encode = match self.item.needs_agreement() {
            true => None,
            false => self.item.encode_job(book)?,
        };
        Ok(UpdateJob {
            rule: self.rule,
            master: self.master.clone(),
            states: self.states.clone(),
            grad: self.grad.clone(),
            group: self.group,
            random: self.is_stochastic().then_some(self.random),
            source_rounding: self.item.source_rounding,
            amax: self.item.update_amax(book)?,
            encode: encode.map(Box::new),
        })
    }

    /// Whether the masters are a slice of the flattened matrix, or rows that cut blocks.
    pub(crate) fn is_flat(&self) -> bool {
        matches!(self.item.range, CastRange::Flat { .. })
    }

    /// The block amaxes of a flat slice, which the update does not take; it takes that of the tensor.
    pub(crate) fn observe_blocks(
        &self,
        book: &ScaleBook<B>,
    ) -> Result<Option<AmaxJob<B>>, ShardError> {
        let job = self.item.amax_job(book)?;
        let job = job.map(|job| AmaxJob {
            tensor: None,
            ..job
        });
        Ok(job.filter(|job| !job.blocks.is_empty()))
    }
}
