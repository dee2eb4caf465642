//! [`Recomputed`]: blocks of which only the input is saved; backward runs them forward again.

use super::block::Block;
use crate::Linear;
use crate::custom_op::{output, with_values};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, Var, bail};
use std::sync::{Arc, Mutex, PoisonError};

/// The gradients of one backward pass: those of variables inside of blocks, which candle does not see.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recomputed(Arc<Mutex<Vec<(Var, Tensor)>>>);

impl Recomputed {
    /// What `block` makes of `x`, with a backward pass that begins with another forward pass.
    ///
    /// # Errors
    /// What a linear layer reports.
    pub(crate) fn forward(
        &self,
        block: &Arc<dyn Block>,
        x: &Tensor,
        first: Option<&Arc<[u32]>>,
    ) -> Result<Tensor> {
        // What forward saves ends with this result.
        let result = block.forward(&x.detach(), first)?.detach();
        x.apply_op1(Again {
            block: Arc::clone(block),
            first: first.cloned(),
            result: Mutex::new(Some(result)),
            gradients: self.clone(),
        })
    }

    /// Moves the gradients to `store`.
    ///
    /// # Errors
    /// Two of one variable that cannot be added.
    pub(crate) fn add_gradients(&self, store: &mut GradStore) -> Result<()> {
        let mut gradients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (var, gradient) in gradients.drain(..) {
            let sum = match store.get(&var) {
                Some(other) => (other + &gradient)?,
                None => gradient,
            };
            store.insert(&var, sum);
        }
        Ok(())
    }
}

/// A block that has run already.
#[derive(Debug)]
struct Again {
    block: Arc<dyn Block>,
    first: Option<Arc<[u32]>>,
    /// Until it is taken as this operation's result.
    result: Mutex<Option<Tensor>>,
    gradients: Recomputed,
}

impl CustomOp1 for Again {
    fn name(&self) -> &'static str {
        "recomputed_block"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let result = self
            .result
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(result) = result else {
            bail!("{}: its result was taken", self.name());
        };
        let values = with_values([&result], self.name(), |[values]| Ok(values.to_vec()))?;
        Ok(output(values, result.shape()))
    }

    fn bwd(&self, arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let mut linears = self.block.linears().into_iter();
        linears.try_for_each(Linear::run_again)?;
        let x = Var::from_tensor(&arg.detach())?;
        let y = self.block.forward(&x, self.first.as_ref())?;
        let mut store = y.apply_op1(GradientOf(grad.clone()))?.backward()?;
        let mut gradients = self
            .gradients
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for var in self.block.vars() {
            gradients.extend(store.remove(var).map(|gradient| (var.clone(), gradient)));
        }
        Ok(store.remove(&x))
    }
}

/// A scalar whose gradient is given: where a backward pass over a part of a model begins.
#[derive(Debug)]
struct GradientOf(Tensor);

impl CustomOp1 for GradientOf {
    fn name(&self) -> &'static str {
        "gradient_of"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok(output(vec![0.0], ()))
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, _grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}
