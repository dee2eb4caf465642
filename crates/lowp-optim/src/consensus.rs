//! [`Consensus`]: values that all ranks must have in common, checked on a sum that a step takes
//! anyway.

use crate::OptimError;

/// Named values as bits. They travel as two halves of 32 bits, whose sums over ranks are exact in
/// binary64; ranks that all have the same value see its multiple.
#[derive(Clone, Debug, Default)]
pub(crate) struct Consensus {
    entries: Vec<(&'static str, u64)>,
}

impl Consensus {
    pub(crate) fn add(&mut self, what: &'static str, bits: u64) {
        self.entries.push((what, bits));
    }

    /// What this rank brings to the sum.
    pub(crate) fn halves(&self) -> impl Iterator<Item = f64> + '_ {
        let halves =
            |&(_, bits): &(_, u64)| [f64::from((bits >> 32) as u32), f64::from(bits as u32)];
        self.entries.iter().flat_map(halves)
    }

    /// Compares with the sum over `world` ranks. If any value differs, at least two ranks find
    /// out; a rank whose value happens to be the mean hears of it from them.
    pub(crate) fn check(&self, sums: &[f64], world: usize, rank: usize) -> Result<(), OptimError> {
        let own: Vec<f64> = self.halves().collect();
        for ((what, _), (own, sums)) in self
            .entries
            .iter()
            .zip(own.chunks_exact(2).zip(sums.chunks_exact(2)))
        {
            if own
                .iter()
                .zip(sums)
                .any(|(x, sum)| x * world as f64 != *sum)
            {
                return Err(OptimError::Disagree { what, rank, world });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bits: [u64; 2]) -> Consensus {
        let mut consensus = Consensus::default();
        consensus.add("one", bits[0]);
        consensus.add("two", bits[1]);
        consensus
    }

    fn sum(ranks: &[Consensus]) -> Vec<f64> {
        let mut sums = vec![0.0; 4];
        for rank in ranks {
            sums.iter_mut()
                .zip(rank.halves())
                .for_each(|(s, x)| *s += x);
        }
        sums
    }

    #[test]
    fn equal_values_pass_whatever_their_bits() {
        let ranks = vec![of([u64::MAX, f64::NAN.to_bits()]); 5];
        for rank in &ranks {
            rank.check(&sum(&ranks), 5, 0).expect("equal values");
        }
    }

    #[test]
    fn a_different_value_is_named() {
        let ranks = [of([1, 7 << 40]), of([1, 7 << 40]), of([1, 8 << 40])];
        for rank in &ranks {
            let error = rank.check(&sum(&ranks), 3, 1).expect_err("they differ");
            assert!(error.to_string().contains("two"), "{error}");
        }
    }
}
