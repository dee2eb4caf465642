//! [`Norm`]: a norm of the residual stream, and the variables of the model on the device.

use half::bf16;
use lowp_format::Recipe;
use lowp_fsdp::ShardedModel;
use lowp_kernels::{Cuda, CudaBuffer, Source};

use super::TransformerError;
use super::linear::Shared;
use super::ops::{Branch, NormBackward, NormParams, Ops};
use crate::places::NormPlaces;

type Values = CudaBuffer<bf16>;
type Done<T = ()> = Result<T, TransformerError>;

/// The variables of a norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormVars {
    /// The number of gamma.
    pub(super) gamma: usize,
    /// Whether it has beta, the next variable.
    pub(super) beta: bool,
    /// What is added to the variance.
    pub(super) eps: f32,
}

/// The residual stream, and what is added to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamInput<'a> {
    pub(super) x: &'a Values,
    pub(super) branch: &'a Values,
}

/// A norm with what backward needs of it.
#[derive(Debug)]
pub(super) struct Norm {
    pub(super) params: NormParams,
    /// The variables that gamma and beta are.
    vars: [usize; 2],
    pub(super) x: Values,
    stats: CudaBuffer<f32>,
}

impl Norm {
    /// The norm of these variables.
    pub(super) fn new<R: Recipe>(
        shared: &Shared,
        model: &ShardedModel<Cuda, R>,
        NormVars { gamma, beta, eps }: NormVars,
        places: &NormPlaces,
    ) -> Done<Self> {
        let values = |var| var_buffer(model, var).cloned();
        Ok(Self {
            params: NormParams {
                gamma: values(gamma)?,
                beta: beta.then(|| values(gamma + 1)).transpose()?,
                eps,
            },
            vars: [gamma, gamma + 1],
            x: shared.arena.values(&places.x)?,
            stats: shared.arena.sums(&places.stats)?,
        })
    }

    /// Keeps `x + branch` and writes its norm; without an input, that of what is kept already.
    pub(super) fn forward(
        &self,
        ops: &Ops,
        size: [usize; 2],
        input: Option<StreamInput<'_>>,
        h: &Values,
    ) -> Done {
        match input {
            Some(StreamInput { x, branch }) => {
                let branch = Branch {
                    values: branch,
                    sum: &self.x,
                };
                ops.norm(size, x, Some(branch), &self.params, h, &self.stats)
            }
            None => ops.norm(size, &self.x, None, &self.params, h, &self.stats),
        }
    }

    /// `dx = residual + the gradient for x`; those of gamma and beta go to their owners.
    pub(super) fn backward<R: Recipe>(
        &self,
        shared: &Shared,
        model: &ShardedModel<Cuda, R>,
        size: [usize; 2],
        dh: &Values,
        residual: Option<&Values>,
        dx: &Values,
    ) -> Done {
        let partial = shared.arena.sums(&shared.places.norm_sums)?;
        let [gamma, beta] = self.vars;
        let dgamma = f32_gradient(model, gamma)?;
        let dbeta = match self.params.beta {
            Some(_) => Some(f32_gradient(model, beta)?),
            None => None,
        };
        let of = NormBackward {
            dh,
            x: &self.x,
            stats: &self.stats,
            residual,
            dx,
            partial: &partial,
            dgamma: &dgamma,
            dbeta: dbeta.as_ref(),
        };
        shared.ops.norm_backward(size, &self.params, of)?;
        model.push_var_gradient(gamma)?;
        if dbeta.is_some() {
            model.push_var_gradient(beta)?;
        }
        Ok(())
    }
}

/// The values of variable `index`.
pub(super) fn var_buffer<R: Recipe>(
    model: &ShardedModel<Cuda, R>,
    index: usize,
) -> Done<&CudaBuffer<f32>> {
    let found = model.var_buffer(index);
    found.ok_or_else(|| {
        TransformerError::Unsupported(match model.transient_var(index) {
            Some(_) => format!(
                "variable {index} is gathered for each use, but is read throughout: give it `VarUse::Throughout`"
            ),
            None => format!(
                "the model has no variable {index} on the device: build it with `VarPlace::Backend`"
            ),
        })
    })
}

/// Memory for the gradient of variable `index`.
pub(super) fn f32_gradient<R: Recipe>(
    model: &ShardedModel<Cuda, R>,
    index: usize,
) -> Done<CudaBuffer<f32>> {
    match model.var_gradient(index)? {
        Source::F32(buffer) => Ok(buffer),
        Source::Bf16(_) => Err(TransformerError::Unsupported(
            "gradients of variables are f32: build the model with `FloatDtype::F32` gradients"
                .to_owned(),
        )),
    }
}
