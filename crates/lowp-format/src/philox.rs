//! [`Philox`]: the counter-based random generator of stochastic rounding and initialisation.

/// A counter-based random generator, Philox4x32-10 (Salmon et al., SC 2011). A value depends only on
/// key and counter, so results do not depend on sharding, thread count or device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox {
    key: [u32; 2],
    stream: u64,
}

impl Philox {
    /// A generator for `seed`; `stream` separates independent uses of the same seed.
    pub const fn new(seed: u64, stream: u64) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            stream,
        }
    }

    /// The four words of counter block `block`.
    pub const fn block(&self, block: u64) -> [u32; 4] {
        let [[a], [b], [c], [d]] = self.blocks(block);
        [a, b, c, d]
    }

    /// Those of `N` counter blocks from `first` on: entry `i` of array `w` is word `w` of block `first + i`. Loops over blocks vectorise.
    #[inline(always)]
    pub const fn blocks<const N: usize>(&self, first: u64) -> [[u32; N]; 4] {
        let mut counters = [[0; N]; 4];
        let mut i = 0;
        while i < N {
            let block = first.wrapping_add(i as u64);
            counters[0][i] = block as u32;
            counters[1][i] = (block >> 32) as u32;
            counters[2][i] = self.stream as u32;
            counters[3][i] = (self.stream >> 32) as u32;
            i += 1;
        }
        let mut key = self.key;
        let mut round = 0;
        while round < 10 {
            let mut i = 0;
            while i < N {
                let a = counters[0][i] as u64 * 0xD251_1F53;
                let b = counters[2][i] as u64 * 0xCD9E_8D57;
                counters[0][i] = (b >> 32) as u32 ^ counters[1][i] ^ key[0];
                counters[1][i] = b as u32;
                counters[2][i] = (a >> 32) as u32 ^ counters[3][i] ^ key[1];
                counters[3][i] = a as u32;
                i += 1;
            }
            key = [
                key[0].wrapping_add(0x9E37_79B9),
                key[1].wrapping_add(0xBB67_AE85),
            ];
            round += 1;
        }
        counters
    }

    /// The random byte of element `index`: 16 elements share a counter block.
    pub const fn byte(&self, index: u64) -> u8 {
        let words = self.block(index / 16);
        (words[(index / 4 % 4) as usize] >> (8 * (index % 4))) as u8
    }

    /// The random word of element `index`: 4 elements share a counter block.
    pub const fn word(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// A value in `0..bound` for element `index`, by multiply-and-shift over 64 random bits; 0 where
    /// the bound is 0.
    pub const fn below(&self, index: u64, bound: u64) -> u64 {
        let words = self.block(index);
        let bits = words[0] as u128 | (words[1] as u128) << 32;
        ((bits * bound as u128) >> 64) as u64
    }

    /// A value of the standard normal distribution for element `index` (Box-Muller in binary64,
    /// rounded once to binary32).
    pub fn normal(&self, index: u64) -> f32 {
        let words = self.block(index);
        // (0, 1]: the logarithm needs a positive argument.
        let u = (f64::from(words[0]) + 1.0) / 4_294_967_296.0;
        let v = f64::from(words[1]) / 4_294_967_296.0;
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_the_reference_implementation() {
        assert_eq!(
            Philox::new(0, 0).block(0),
            [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]
        );
        let ones = Philox::new(u64::MAX, u64::MAX);
        assert_eq!(
            ones.block(u64::MAX),
            [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]
        );
    }
}
