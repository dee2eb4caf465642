//! Initial values as a function of the global element, so that a rank can make only the ones it owns.

use crate::philox::{halves, philox4x32};
use std::ops::Range;

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Every element the same.
    Constant(f32),
    /// Normal with mean zero and this standard deviation.
    Normal(f32),
}

impl Init {
    /// The values of the elements `range` of parameter number `parameter`.
    pub fn values(self, seed: u64, parameter: u32, range: Range<usize>) -> Vec<f32> {
        match self {
            Self::Constant(value) => vec![value; range.len()],
            Self::Normal(std) => range
                .map(|i| std * normal(seed, parameter, i as u64))
                .collect(),
        }
    }
}

/// A standard normal value for element `index` of parameter `parameter`: Box-Muller in f64 over Philox words.
pub fn normal(seed: u64, parameter: u32, index: u64) -> f32 {
    // The last counter word keeps initialisation apart from every other use of the seed.
    const INIT: u32 = 0x1817_0000;
    let [lo, hi] = halves(index);
    let r = philox4x32(seed, [lo, hi, parameter, INIT]);
    let unit = |word: u32| (f64::from(word) + 0.5) * 2f64.powi(-32);
    let radius = (-2.0 * unit(r[0]).ln()).sqrt();
    let angle = 2.0 * std::f64::consts::PI * unit(r[1]);
    #[allow(clippy::cast_possible_truncation)] // one rounding to f32 is the point
    let value = (radius * angle.cos()) as f32;
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_equal_the_whole() {
        let init = Init::Normal(0.02);
        let whole = init.values(3, 4, 0..1000);
        assert_eq!(init.values(3, 4, 317..655), whole[317..655]);
        let mean: f32 = whole.iter().sum::<f32>() / 1000.0;
        let std = (whole.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 1000.0).sqrt();
        assert!(
            mean.abs() < 0.002 && (std - 0.02).abs() < 0.002,
            "{mean} {std}"
        );
    }
}
