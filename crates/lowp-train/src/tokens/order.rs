//! [`Order`]: a random order of numbers that any of them can be asked for, so that a run resumes without a list.

use lowp_format::Philox;

/// Rounds of the Feistel network.
const ROUNDS: u64 = 4;

/// A permutation of the numbers below `len`.
#[derive(Clone, Debug)]
pub(super) struct Order {
    len: u64,
    /// Bits of each half of a number.
    bits: u32,
    random: Philox,
}

impl Order {
    /// The order of epoch `epoch` of source `source` in a run with this seed; `len` is at least 1.
    pub(super) fn new(len: u64, seed: u64, source: u64, epoch: u64) -> Self {
        let bits = u64::BITS - (len.max(2) - 1).leading_zeros();
        Self {
            len: len.max(1),
            bits: bits.div_ceil(2),
            // Bits 63 and 62 keep it apart from every other use of the seed.
            random: Philox::new(seed, (3 << 62) ^ (source << 40) ^ epoch),
        }
    }

    /// The number at place `at`, which is below the length.
    pub(super) fn get(&self, at: u64) -> u64 {
        let mut number = at;
        loop {
            number = self.mixed(number);
            // The network permutes a power of 4; numbers beyond the length are mixed until they are not.
            if number < self.len {
                return number;
            }
        }
    }

    fn mixed(&self, number: u64) -> u64 {
        let size = 1 << self.bits;
        let (mut left, mut right) = (number >> self.bits, number & (size - 1));
        for round in 0..ROUNDS {
            let mask = self.random.below(round << self.bits | right, size);
            (left, right) = (right, left ^ mask);
        }
        left << self.bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_there_once() {
        for len in (1..70).chain([255, 256, 257, 1000]) {
            for epoch in 0..2 {
                let order = Order::new(len, 7, 0, epoch);
                let mut numbers: Vec<u64> = (0..len).map(|at| order.get(at)).collect();
                numbers.sort_unstable();
                assert_eq!(numbers, (0..len).collect::<Vec<_>>(), "{len}");
            }
        }
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own() {
        let order = |seed, source, epoch| {
            let order = Order::new(1000, seed, source, epoch);
            (0..1000).map(|at| order.get(at)).collect::<Vec<_>>()
        };
        let [a, b, c, d] = [
            order(1, 0, 0),
            order(1, 0, 1),
            order(2, 0, 0),
            order(1, 1, 0),
        ];
        for (one, other) in [(&a, &b), (&a, &c), (&b, &c), (&a, &d), (&b, &d)] {
            let same = one.iter().zip(other).filter(|(x, y)| x == y).count();
            assert!(same < 20, "{same}");
        }
    }
}
