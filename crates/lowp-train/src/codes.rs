//! [`LayerCodes`]: the shares of a layer's codes that are zero or of the largest magnitude.

use lowp_comm::Control;
use lowp_fsdp::{CodeCounts, LinearSpec};
use lowp_kernels::Backend;
use serde::Serialize;

use crate::error::TrainError;
use crate::network::Sharded;

/// Shares of the codes of one layer's weight, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerCodes<'a> {
    /// The layer's name.
    pub layer: &'a str,
    /// Share of codes of the largest magnitude.
    pub saturated: f64,
    /// Share of codes of zero.
    pub zero: f64,
}

/// Those of all layers whose weights are in codes below 16 bits. Collective.
pub(crate) fn shares<'a, B: Backend>(
    sharded: &Sharded<B>,
    linears: &'a [LinearSpec],
    control: &dyn Control,
) -> Result<Vec<LayerCodes<'a>>, TrainError> {
    let mut counts = Vec::new();
    for weight in sharded.weights() {
        let CodeCounts {
            codes,
            saturated,
            zero,
        } = weight.count_codes()?;
        counts.extend([codes, saturated, zero].map(|count| count as f64));
    }
    control.sum(&mut counts)?;
    let layers = linears.iter().zip(counts.as_chunks::<3>().0);
    let layers = layers.filter(|(_, [codes, ..])| *codes > 0.0);
    Ok(layers
        .map(|(linear, [codes, saturated, zero])| LayerCodes {
            layer: &linear.name,
            saturated: saturated / codes,
            zero: zero / codes,
        })
        .collect())
}
