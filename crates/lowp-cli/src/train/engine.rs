//! The seam between the training loop and the way weights are stored, gathered and updated.

use anyhow::Result;
use candle_core::Var;
use candle_core::backprop::GradStore;
use lowp_candle::Linear;

/// One rank's weights, optimizer and communication. All calls are collective: every rank makes them in the same order.
pub(crate) trait Engine {
    /// The model's linear layers over this rank's weights, in the order of `GptConfig::linears`; called once.
    fn linears(&mut self) -> Result<Vec<Box<dyn Linear>>>;

    /// Ends a step: reduces the gradients over the ranks, clips, updates and casts all parameters. Gradients of the
    /// linear layers have gone to their weights already; those of `vars` are in `gradients`, and `vars` get their new
    /// values.
    fn finish_step(&mut self, step: usize, vars: &[Var], gradients: &GradStore) -> Result<()>;

    /// Sum of one number over the ranks, the same on each.
    fn sum(&mut self, value: f64) -> Result<f64>;

    /// What was stored and sent, summed over the ranks; called after the last step.
    fn accounting(&mut self) -> Result<Accounting>;
}

/// Bytes of the linear layers' weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Accounting {
    /// Bytes of weight gathers that crossed between ranks in one step, all ranks together, as counted.
    pub(crate) wire_bytes_per_step: u64,
    /// The same from the gather plan's formula.
    pub(crate) wire_bytes_formula: u64,
    /// Bytes of weights that stay allocated between steps, all ranks together.
    pub(crate) resident_weight_bytes: u64,
}
