//! The linear layer whose weight is fetched for each use, and the two traits it is built on.

use crate::custom_op::{output, values, with_values};
use crate::{MatRef, product};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use lowp_format::{Orientation, Phase, Role};
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Where a layer's weight comes from and where its gradient goes.
///
/// A sharded parameter gathers in [`with_weight`](Self::with_weight) and reduces and scatters in
/// [`sink_gradient`](Self::sink_gradient). All ranks run the layers in the same order, so an implementation may
/// communicate in both.
pub trait WeightSource: fmt::Debug + Send + Sync {
    /// Rows (output features) and columns (input features) of the full weight.
    fn shape(&self) -> (usize, usize);

    /// Makes the full weight available, decoded, row-major, calls `use_weight` with it once, and gives it back.
    ///
    /// # Errors
    /// What gathering, decoding or `use_weight` reports.
    fn with_weight(
        &self,
        phase: Phase,
        use_weight: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()>;

    /// Says that the layer runs forward again, and then backward: what is gathered for the first may stay for the other.
    ///
    /// # Errors
    /// What gathering reports.
    fn run_again(&self) -> Result<()> {
        Ok(())
    }

    /// Takes this rank's contribution to the gradient of the full weight, row-major.
    ///
    /// # Errors
    /// What the reduction over the ranks reports.
    fn sink_gradient(&self, gradient: Vec<f32>) -> Result<()>;
}

/// Quantizes an operand as the recipe says and returns what the product reads: the decoded values.
pub trait OperandCast: fmt::Debug + Send + Sync {
    /// `role` is that of the operand, `orientation` the one in which the product reads it. `data` is
    /// row-major `[tokens, features]`, or for a weight `[outputs, inputs]`, as its source decoded it;
    /// the result has the same shape.
    ///
    /// # Errors
    /// A shape that the recipe cannot take.
    fn cast<'a>(
        &self,
        role: Role,
        orientation: Orientation,
        data: &'a [f32],
        tokens: usize,
        features: usize,
    ) -> Result<Cow<'a, [f32]>>;
}

/// Leaves operands as they are: the f32 baseline.
#[derive(Clone, Copy, Debug)]
pub struct Exact;

impl OperandCast for Exact {
    fn cast<'a>(
        &self,
        _role: Role,
        _orientation: Orientation,
        data: &'a [f32],
        _tokens: usize,
        _features: usize,
    ) -> Result<Cow<'a, [f32]>> {
        Ok(Cow::Borrowed(data))
    }
}

/// A linear layer `[tokens, in] -> [tokens, out]` without bias.
pub trait Linear: fmt::Debug + Send + Sync {
    /// `x W^T`, differentiable by candle with respect to `x`.
    ///
    /// # Errors
    /// A shape mismatch, or what the weight's source reports.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;

    /// [`WeightSource::run_again`] of its weight.
    ///
    /// # Errors
    /// What the weight's source reports.
    fn run_again(&self) -> Result<()> {
        Ok(())
    }
}

/// A linear layer over a [`WeightSource`], with its operands cast by an [`OperandCast`].
#[derive(Clone, Debug)]
pub struct QuantLinear {
    weight: Arc<dyn WeightSource>,
    cast: Arc<dyn OperandCast>,
    threads: usize,
}

impl QuantLinear {
    /// A layer with exact operands; each product runs on at most `threads` threads.
    pub fn new(weight: Arc<dyn WeightSource>, threads: usize) -> Self {
        Self::with_cast(weight, Arc::new(Exact), threads)
    }

    /// A layer whose operands are cast by `cast`.
    pub fn with_cast(
        weight: Arc<dyn WeightSource>,
        cast: Arc<dyn OperandCast>,
        threads: usize,
    ) -> Self {
        Self {
            weight,
            cast,
            threads,
        }
    }
}

impl Linear for QuantLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.apply_op1(self.clone())
    }

    fn run_again(&self) -> Result<()> {
        self.weight.run_again()
    }
}

impl CustomOp1 for QuantLinear {
    fn name(&self) -> &'static str {
        "quant_linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, cols) = self.weight.shape();
        let (tokens, features) = layout.shape().dims2()?;
        if features != cols {
            candle_core::bail!(
                "quant_linear: input {tokens}x{features} with a {rows}x{cols} weight"
            );
        }
        let x = values(storage, layout, self.name())?;
        let x = self
            .cast
            .cast(Role::Activation, Orientation::Rowwise, x, tokens, cols)?;
        let mut y = Vec::new();
        self.weight.with_weight(Phase::Forward, &mut |w| {
            let w = self
                .cast
                .cast(Role::Weight, Orientation::Rowwise, w, rows, cols)?;
            let x = MatRef::new(&x, tokens, cols);
            y = product(x, MatRef::new(&w, rows, cols).t(), self.threads);
            Ok(())
        })?;
        Ok(output(y, (tokens, rows)))
    }

    fn bwd(&self, arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let name = self.name();
        let (rows, cols) = self.weight.shape();
        let tokens = arg.dim(0)?;
        let mut dx = Vec::new();
        let dw = with_values([arg, grad], name, |[x, g]| {
            let dy = self
                .cast
                .cast(Role::Gradient, Orientation::Rowwise, g, tokens, rows)?;
            self.weight.with_weight(Phase::Backward, &mut |w| {
                let w = self
                    .cast
                    .cast(Role::Weight, Orientation::Columnwise, w, rows, cols)?;
                let dy = MatRef::new(&dy, tokens, rows);
                dx = product(dy, MatRef::new(&w, rows, cols), self.threads);
                Ok(())
            })?;
            drop(dy);
            let along = Orientation::Columnwise;
            let dy = self.cast.cast(Role::Gradient, along, g, tokens, rows)?;
            let x = self.cast.cast(Role::Activation, along, x, tokens, cols)?;
            let dy = MatRef::new(&dy, tokens, rows);
            Ok(product(dy.t(), MatRef::new(&x, tokens, cols), self.threads))
        })?;
        self.weight.sink_gradient(dw)?;
        Tensor::from_vec(dx, arg.shape(), arg.device()).map(Some)
    }
}
