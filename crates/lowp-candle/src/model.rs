//! What candle runs of a [`ShardedModel`]: its linear layers ([`layers`]), and its variables ([`CandleVars`]).

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Error, Tensor, Var};
use lowp_comm::or_abort;
use lowp_format::{Orientation, Phase, Recipe, Role};
use lowp_fsdp::{ModelError, RecipeOperands, ShardedModel, ShardedWeight};
use lowp_kernels::Backend;
use lowp_optim::{PendingStep, StepOptions, StepReport};

use crate::error::CandleError;
use crate::linear::{Linear, OperandCast, QuantLinear, WeightSource};

/// The linear layers over this rank's weights; each product runs on at most `threads` threads.
pub fn layers<B: Backend, R: Recipe>(
    model: &ShardedModel<B, R>,
    threads: usize,
) -> Vec<Box<dyn Linear>> {
    let layer = |(weight, operands): (&Arc<ShardedWeight<B, R>>, &Arc<RecipeOperands<B>>)| {
        let layer = QuantLinear::with_cast(Arc::clone(weight) as _, operands.clone(), threads);
        Box::new(layer) as Box<dyn Linear>
    };
    model.weights().zip(model.operands()).map(layer).collect()
}

/// The parameters of a [`ShardedModel`] that stay in f32 and are used throughout, as candle variables.
#[derive(Clone, Debug)]
pub struct CandleVars {
    vars: Vec<Var>,
    /// The number of the spec of each.
    numbers: Vec<usize>,
}

impl CandleVars {
    /// The variables of `model`, which was built with [`lowp_fsdp::VarPlace::Host`]. Collective.
    ///
    /// # Errors
    /// Variables on the backend, no room, or a rank that failed.
    pub fn new<B: Backend, R: Recipe>(model: &mut ShardedModel<B, R>) -> Result<Self, CandleError> {
        let stays = |number: &usize| model.transient_var(*number).is_none();
        let numbers: Vec<usize> = (0..model.var_shapes().len()).filter(stays).collect();
        let shapes: Vec<&[usize]> = model.var_shapes().map(|(_, shape)| shape).collect();
        let zeros = |number: &usize| {
            let shape = shapes[*number];
            let zeros = vec![0f32; shape.iter().product()];
            Ok(Var::from_vec(zeros, shape, &Device::Cpu)?)
        };
        let vars: Result<_, CandleError> = numbers.iter().map(zeros).collect();
        let vars = or_abort(&*model.mesh().world, vars)?;
        let vars = Self { vars, numbers };
        vars.refresh(model)?;
        Ok(vars)
    }

    /// The variables, in the order of their specs.
    pub fn vars(&self) -> &[Var] {
        &self.vars
    }

    /// Finishes a micro-batch: reduces the gradients of the variables that its backward pass left
    /// in `store`, adding to what arrived before in this step; those of the linear layers went
    /// their way during the pass. Collective.
    ///
    /// # Errors
    /// A variable without a gradient, or a rank that failed. The micro-batch stays unfinished.
    pub fn add_gradients<B: Backend, R: Recipe>(
        &self,
        model: &mut ShardedModel<B, R>,
        store: &GradStore,
    ) -> Result<(), CandleError> {
        let sent = self.send(model, store);
        or_abort(&*model.mesh().world, sent)?;
        Ok(model.finish_micro_batch()?)
    }

    fn send<B: Backend, R: Recipe>(
        &self,
        model: &ShardedModel<B, R>,
        store: &GradStore,
    ) -> Result<(), CandleError> {
        for (var, &index) in self.vars.iter().zip(&self.numbers) {
            let Some(grad) = store.get(var) else {
                let name = model.var_shapes().nth(index);
                let name = name.map_or_else(String::new, |(name, _)| name.to_owned());
                return Err(CandleError::NoGradient { name });
            };
            let values = grad.flatten_all()?.to_vec1::<f32>()?;
            model.add_var_gradient(index, &values)?;
        }
        Ok(())
    }

    /// The same as [`CandleVars::finish_step`], with a report that is read later ([`ShardedModel::start_step`]).
    ///
    /// # Errors
    /// As there.
    pub fn start_step<B: Backend, R: Recipe>(
        &self,
        model: &mut ShardedModel<B, R>,
        options: &StepOptions,
    ) -> Result<PendingStep<B>, CandleError> {
        let report = model.start_step(options)?;
        self.refresh(model)?;
        Ok(report)
    }

    /// Ends a step ([`ShardedModel::finish_step`]) and gives the variables their new values. Collective.
    ///
    /// # Errors
    /// A parameter without a gradient, a micro-batch that was not finished, or a rank that failed.
    pub fn finish_step<B: Backend, R: Recipe>(
        &self,
        model: &mut ShardedModel<B, R>,
        options: &StepOptions,
    ) -> Result<StepReport, CandleError> {
        let report = model.finish_step(options)?;
        self.refresh(model)?;
        Ok(report)
    }

    fn refresh<B: Backend, R: Recipe>(
        &self,
        model: &mut ShardedModel<B, R>,
    ) -> Result<(), CandleError> {
        model.read_vars(|index, values| {
            let Ok(at) = self.numbers.binary_search(&index) else {
                let why =
                    format!("variable {index} is gathered for each use and has no values here");
                return Err(Error::Msg(why).into());
            };
            let var = &self.vars[at];
            Ok(var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?)
        })
    }
}

impl<B: Backend, R: Recipe> WeightSource for ShardedWeight<B, R> {
    fn shape(&self) -> (usize, usize) {
        let shape = self.full_shape();
        (shape.rows, shape.cols)
    }

    fn with_weight(
        &self,
        phase: Phase,
        use_weight: &mut dyn FnMut(&[f32]) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        let used = self.with_values(phase, |values| -> Result<(), CandleError> {
            Ok(use_weight(values)?)
        });
        Ok(used?)
    }

    fn run_again(&self) -> candle_core::Result<()> {
        self.gather_again().map_err(Error::wrap)
    }

    fn sink_gradient(&self, gradient: Vec<f32>) -> candle_core::Result<()> {
        self.add_gradient(&gradient).map_err(Error::wrap)
    }
}

impl<B: Backend> OperandCast for RecipeOperands<B> {
    fn cast<'a>(
        &self,
        role: Role,
        orientation: Orientation,
        data: &'a [f32],
        tokens: usize,
        features: usize,
    ) -> candle_core::Result<Cow<'a, [f32]>> {
        let cast: Result<_, ModelError> = self.cast(role, orientation, data, tokens, features);
        cast.map_err(Error::wrap)
    }
}
