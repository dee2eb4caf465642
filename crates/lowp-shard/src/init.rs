//! Deferred initialisation: a rank materialises only its own rows, and they are the rows that an
//! unsharded initialisation has.

use std::ops::Range;

use lowp_format::Philox;
use rayon::prelude::*;

/// A distribution of initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Every value is this constant.
    Constant(f32),
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
}

impl Init {
    /// Values of `rows` of a matrix of `cols` columns, row-major.
    ///
    /// The value of an element depends on `seed`, `parameter` and its index in the full matrix
    /// only, so any sharding gives the same bits. `parameter` separates the parameters of a model.
    pub fn rows(self, seed: u64, parameter: u64, rows: Range<usize>, cols: usize) -> Vec<f32> {
        let elements = rows.start * cols..rows.end * cols;
        match self {
            Init::Constant(value) => vec![value; elements.len()],
            Init::Normal(std) => {
                let random = Philox::new(seed, parameter);
                let value = |i: usize| random.normal(i as u64) * std;
                elements.into_par_iter().map(value).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_do_not_depend_on_the_cut() {
        let whole = Init::Normal(0.02).rows(7, 3, 0..10, 6);
        let parts = [0..4, 4..4, 4..9, 9..10].map(|r| Init::Normal(0.02).rows(7, 3, r, 6));
        assert_eq!(whole, parts.concat());
        assert_ne!(whole, Init::Normal(0.02).rows(7, 4, 0..10, 6));
    }

    #[test]
    fn normal_has_the_moments_it_names() {
        let values = Init::Normal(2.0).rows(1, 0, 0..100, 100);
        let mean = values.iter().sum::<f32>() / 1e4;
        let var = values.iter().map(|v| v * v).sum::<f32>() / 1e4;
        assert!(
            mean.abs() < 0.06 && (var - 4.0).abs() < 0.25,
            "mean {mean}, variance {var}"
        );
    }
}
