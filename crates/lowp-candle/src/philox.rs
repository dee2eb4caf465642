//! Philox4x32-10 (Salmon et al., 2011): random numbers as a pure function of a key and a counter.

/// Four 32-bit words for one key and one counter.
pub fn philox4x32(key: u64, counter: [u32; 4]) -> [u32; 4] {
    let [mut k0, mut k1] = halves(key);
    let mut c = counter;
    for _ in 0..10 {
        let [lo0, hi0] = halves(u64::from(c[0]) * 0xD251_1F53);
        let [lo1, hi1] = halves(u64::from(c[2]) * 0xCD9E_8D57);
        c = [hi1 ^ c[1] ^ k0, lo1, hi0 ^ c[3] ^ k1, lo0];
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    c
}

/// A value in `0..bound` for `(seed, stream, index)`, by multiply-and-shift over 64 random bits.
pub fn uniform_index(seed: u64, stream: u64, index: u64, bound: u64) -> u64 {
    let ([s0, s1], [i0, i1]) = (halves(stream), halves(index));
    let r = philox4x32(seed, [i0, i1, s0, s1]);
    let bits = u64::from(r[0]) | (u64::from(r[1]) << 32);
    let high = (u128::from(bits) * u128::from(bound)) >> 64;
    u64::try_from(high).unwrap_or(0) // always fits: high < bound
}

/// Low and high half of a 64-bit word.
pub(crate) fn halves(x: u64) -> [u32; 2] {
    #[allow(clippy::cast_possible_truncation)] // the two halves, by definition
    [x as u32, (x >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // Random123's kat_vectors for philox4x32-10.
        assert_eq!(
            philox4x32(0, [0; 4]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32(u64::MAX, [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn indices_stay_below_the_bound() {
        assert!((0..1000).all(|i| uniform_index(1, 2, i, 7) < 7));
        assert_eq!(uniform_index(1, 2, 3, 0), 0);
    }
}
