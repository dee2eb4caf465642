//! [`ParamState`]: what the optimizer keeps of a parameter between steps, in and out.

use lowp_format::StateCode;
use lowp_kernels::{
    Backend, FloatDtype, Master, Pending, Source, State, StateName, StepCounts, bf16, decoded,
    joined,
};
use lowp_shard::ScaleSlot;

use crate::memory::{check_count, check_length};
use crate::param::Param;
use crate::records::Sharing;
use crate::{OptimError, Optimizer, ParamId};

/// The master and the states of this rank's elements of a parameter, widened to f32, which is exact.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParamState {
    /// Master values of this rank's elements, in the order of the matrix.
    pub master: Vec<f32>,
    /// The states of its rule ([`Rule::states`](lowp_kernels::Rule::states)), each as long as the master.
    pub states: Vec<Vec<f32>>,
}

/// [`ParamState`] on its way from a device.
#[derive(Debug)]
pub struct PendingState {
    /// Master values of this rank's elements, in their dtype.
    pub master: PendingValues,
    /// The states of its rule, in their order.
    pub states: Vec<PendingValues>,
}

/// Values on their way from a device.
#[derive(Debug)]
pub struct PendingValues {
    bytes: Pending<u8>,
    len: usize,
    dtype: FloatDtype,
    stored: Stored,
}

/// How values were read.
#[derive(Debug)]
enum Stored {
    /// As the values that arrive.
    Values,
    /// As codes of fp8 with their scales.
    Fp8(StateCode),
    /// As parameters in bf16, beside these remainders.
    Remainders(Pending<u8>),
}

impl PendingValues {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What they arrive as: the dtype that they are stored as, bf16 of fp8, which has all of its values, or f32 of two halves.
    pub fn dtype(&self) -> FloatDtype {
        self.dtype
    }

    /// The values, little endian. Waits for them.
    ///
    /// # Errors
    /// The backend failed.
    pub fn wait(self) -> Result<Vec<u8>, OptimError> {
        let bytes = self.bytes.wait()?;
        Ok(match self.stored {
            Stored::Values => bytes,
            Stored::Fp8(code) => {
                let values = decoded(&bytes, code).into_iter();
                let halves = values.flat_map(|x| bf16::from_f32(x).to_le_bytes());
                halves.collect()
            }
            Stored::Remainders(remainders) => {
                let remainders = remainders.wait()?;
                let mut values = vec![0; 2 * bytes.len()];
                let to = values.as_chunks_mut::<4>().0;
                for (to, x) in to.iter_mut().zip(joined(&bytes, &remainders)) {
                    *to = x.to_le_bytes();
                }
                values
            }
        })
    }
}

impl<B: Backend> Optimizer<B> {
    /// Starts to copy the state of this rank's rows, or of its flat slice, to the host in the order of `stream`, a
    /// stream that follows the last step and that the next one follows.
    ///
    /// # Errors
    /// An id of another optimizer, or the backend failed.
    pub fn start_state(&self, id: ParamId, stream: &B) -> Result<PendingState, OptimError> {
        let param = &self.params[self.index(id)?];
        let start = |values: &Source<B>| -> Result<PendingValues, OptimError> {
            let len = values.len(stream);
            let bytes = match values {
                Source::F32(buffer) => stream.start_read_bytes(buffer, 0..len)?,
                Source::Bf16(buffer) => stream.start_read_bytes(buffer, 0..len)?,
            };
            Ok(PendingValues {
                bytes,
                len,
                dtype: values.dtype(),
                stored: Stored::Values,
            })
        };
        let master = match &param.master {
            Master::Values(values) => start(values)?,
            Master::Bf16Plus16 {
                parameter,
                remainder,
            } => {
                let all = 0..2 * param.len;
                let remainders = stream.start_read_bytes::<u8>(remainder, all.clone())?;
                PendingValues {
                    bytes: stream.start_read_bytes::<u8>(parameter, all)?,
                    len: param.len,
                    dtype: FloatDtype::F32,
                    stored: Stored::Remainders(remainders),
                }
            }
        };
        let names = param.rule.states().iter().zip(&param.states);
        let states = names.map(|(name, state)| match state {
            State::Values(values) => start(values),
            State::Fp8(bytes) => Ok(PendingValues {
                bytes: stream.start_read_bytes(bytes, 0..stream.len::<u8>(bytes))?,
                len: param.len,
                dtype: state.dtype().float(),
                stored: Stored::Fp8(name.code()),
            }),
        });
        Ok(PendingState {
            master,
            states: states.collect::<Result<_, _>>()?,
        })
    }

    /// The state of this rank's rows, or of its flat slice. A parameter that is added with its master, and gets its states by
    /// [`Optimizer::set_states`], goes on as this one.
    ///
    /// # Errors
    /// An id of another optimizer, or the backend failed.
    pub fn state(&self, id: ParamId) -> Result<ParamState, OptimError> {
        Ok(ParamState {
            master: self.master(id)?,
            states: self.states(id)?,
        })
    }

    /// Replaces the states of this rank's rows, or of its flat slice: those of its rule, in their order. Those that are kept in bf16 or
    /// fp8 are rounded to nearest, which changes none that came from the same dtype. Returns how many states have a value that was rounded.
    ///
    /// # Errors
    /// An id of another optimizer, another number of states, values of another length, an `exp_avg_sq` below zero or not finite, or the backend failed. Nothing is
    /// replaced then, unless the backend failed.
    pub fn set_states(&mut self, id: ParamId, states: &[Vec<f32>]) -> Result<usize, OptimError> {
        let param = &self.params[self.index(id)?];
        check_count(&param.name, param.rule, states.len())?;
        for (state, values) in param.rule.states().iter().zip(states) {
            check_length(&param.name, state.name(), values.len(), param.len)?;
            let fits = |x: &f32| *x >= 0.0 && x.is_finite();
            let squares = *state == StateName::ExpAvgSq;
            if let Some(index) = values.iter().position(|x| squares && !fits(x)) {
                return Err(OptimError::SecondMoment {
                    name: param.name.clone(),
                    index,
                    value: values[index],
                });
            }
        }
        let names = param.rule.states().iter().zip(&param.states);
        let mut rounded = 0;
        for ((&name, state), values) in names.zip(states) {
            rounded += usize::from(state.upload(&self.backend, name, values)?);
        }
        Ok(rounded)
    }

    /// Sets the step counts to `counts`, as if all those steps had updated every parameter: bias corrections follow those that were applied.
    ///
    /// # Errors
    /// As [`Optimizer::set_steps`].
    pub fn set_counts(&mut self, counts: StepCounts) -> Result<(), OptimError> {
        self.set_steps(counts, &vec![counts.applied; self.len()])
    }

    /// Sets the step counts: `counts` of the optimizer, and `steps` of each parameter ([`Optimizer::steps`]).
    ///
    /// # Errors
    /// Another number of parameters, step counts that part parameters of a captured graph ([`Optimizer::pin_grads`]), or the backend failed.
    pub fn set_steps(&mut self, counts: StepCounts, steps: &[u64]) -> Result<(), OptimError> {
        if steps.len() != self.len() {
            return Err(OptimError::StepCounts {
                needed: self.len(),
                found: steps.len(),
            });
        }
        match self.work.records().first_conflict(counts, steps) {
            None => self.work.records().write(counts, steps)?,
            Some(param) if self.planned.is_pinned() => {
                let name = self.params[param].name.clone();
                return Err(OptimError::Captured { name });
            }
            Some(_) => self.share_counts(counts, steps)?,
        }
        self.number = counts.applied.saturating_add(counts.skipped);
        Ok(())
    }

    /// Has parameters of equal step counts share a record, and sets the counts. Plans of before no longer serve.
    fn share_counts(&mut self, counts: StepCounts, steps: &[u64]) -> Result<(), OptimError> {
        let sharing = Sharing::of_equal(counts, steps).split(&self.work.present().which);
        let plans = self.plan(&self.planned_grads(), Some(&sharing))?;
        self.work.records_mut().share(sharing, counts, steps)?;
        self.work.swap(plans);
        self.planned.clear();
        self.graph = None;
        Ok(())
    }

    /// Goes on after the steps of `of`, with its delayed scales. Parameters and recipes are the same.
    pub(crate) fn go_on(&mut self, of: &Self) -> Result<(), OptimError> {
        self.set_steps(of.counts()?, &of.steps()?)?;
        // Steps that ranks disagreed on are in none of the counts.
        self.number = of.number;
        for (own, other) in self.params.iter().zip(&of.params) {
            let slots = own.item.slots.into_iter().zip(other.item.slots);
            for (own, other) in slots.filter_map(|(own, other)| own.zip(other)) {
                if let Some(state) = of.book.delayed_state(other)? {
                    self.book.set_delayed_state(own, &state)?;
                }
            }
        }
        Ok(())
    }

    /// The entries of the scale book that a parameter is cast by, by orientation.
    ///
    /// # Errors
    /// An id of another optimizer.
    pub fn slots(&self, id: ParamId) -> Result<[Option<ScaleSlot>; 2], OptimError> {
        Ok(self.params[self.index(id)?].item.slots)
    }

    /// Bytes of masters and states of this rank that are page-locked memory of the host ([`OptimizerBuilder::offload`](crate::OptimizerBuilder::offload)): none on a CPU.
    pub fn host_bytes(&self) -> usize {
        self.host_bytes
    }

    /// Bytes of masters, states and gradients of this rank, wherever they are.
    pub fn state_bytes(&self) -> usize {
        let each = |param: &Param<B>| {
            let states = param
                .states
                .iter()
                .map(|state| state.dtype().bytes(param.len));
            let each = param.master.dtype().bytes() + param.grad.dtype().bytes();
            param.len * each + states.sum::<usize>()
        };
        self.params.iter().map(each).sum()
    }
}
