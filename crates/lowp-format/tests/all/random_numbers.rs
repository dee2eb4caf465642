//! What is drawn from a Philox block: bytes, numbers below a bound, normal values.

use lowp_format::Philox;

/// A generator whose seed and stream use all of their bits.
const RANDOM: Philox = Philox::new(0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210);

/// docs/numerics.md 7.5: 16 elements share a block, each word gives its lowest byte first.
#[test]
fn bytes_are_those_of_the_block_in_order() {
    for block in [0, 1, 7, u64::MAX / 16] {
        let bytes = RANDOM.block(block).map(u32::to_le_bytes).concat();
        let drawn: Vec<u8> = (0..16).map(|i| RANDOM.byte(16 * block + i)).collect();
        assert_eq!(drawn, bytes, "block {block}");
    }
}

#[test]
fn a_number_below_a_bound_is_the_share_of_64_random_bits() {
    for bound in [0, 1, 2, 3, 1000, 1 << 40, u64::MAX] {
        for index in 0..200 {
            let [low, high, ..] = RANDOM.block(index);
            let bits = u128::from(high) * (1 << 32) + u128::from(low);
            let share = bits * u128::from(bound) / (1 << 64);
            let drawn = RANDOM.below(index, bound);
            assert_eq!(u128::from(drawn), share, "{index} below {bound}");
            assert!(drawn < bound || bound == 0);
        }
    }
}

#[test]
fn numbers_below_a_bound_are_spread_evenly() {
    let mut counts = [0u32; 10];
    for index in 0..100_000 {
        counts[RANDOM.below(index, 10) as usize] += 1;
    }
    // A count has a standard deviation of 95.
    assert!(
        counts.iter().all(|&n| n.abs_diff(10_000) < 500),
        "{counts:?}"
    );
}

/// Box-Muller from the first two words, over enough elements that some have a word near 0, where
/// the logarithm is steep.
#[test]
fn normal_values_are_box_muller_in_binary64_rounded_once() {
    for index in 0..1 << 16 {
        let [first, second, ..] = RANDOM.block(index).map(f64::from);
        // (0, 1] and [0, 1).
        let (u, v) = ((first + 1.0) / 2f64.powi(32), second / 2f64.powi(32));
        let expected = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
        let drawn = RANDOM.normal(index);
        assert_eq!(drawn.to_bits(), (expected as f32).to_bits(), "{index}");
    }
}

#[test]
fn normal_values_have_the_moments_and_tails_of_the_distribution() {
    let n = 200_000;
    let values: Vec<f64> = (0..n).map(|i| f64::from(RANDOM.normal(i))).collect();
    let moment = |power| values.iter().map(|x| x.powi(power)).sum::<f64>() / n as f64;
    let beyond = |x: f64| values.iter().filter(|v| v.abs() > x).count() as f64 / n as f64;
    // Five standard deviations of each estimate.
    for (name, found, expected, error) in [
        ("mean", moment(1), 0.0, 0.012),
        ("variance", moment(2), 1.0, 0.016),
        ("third moment", moment(3), 0.0, 0.044),
        ("fourth moment", moment(4), 3.0, 0.11),
        ("share beyond 1", beyond(1.0), 0.3173, 0.0053),
        ("share beyond 3", beyond(3.0), 0.0027, 0.0006),
    ] {
        assert!((found - expected).abs() < error, "{name}: {found}");
    }
}
