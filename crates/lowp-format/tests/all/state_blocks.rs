//! Laws of optimizer state in 8 bits.

use half::bf16;
use lowp_format::{Philox, STATE_BLOCK, StateBits, StateCode, state_bytes};
use proptest::prelude::*;

const CODES: [StateCode; 2] = [StateCode::E4M3, StateCode::UE4M4];

fn encode(code: StateCode, values: &[f32], bits: impl Fn(usize) -> u16) -> (Vec<u8>, u8, Vec<f32>) {
    let (mut codes, mut decoded) = (vec![0; values.len()], vec![0.0; values.len()]);
    let scale = code.encode_block(values, bits, &mut codes);
    code.decode_block(&codes, scale, &mut decoded);
    (codes, scale, decoded)
}

/// Values of up to a block, below 2^127, over the exponents of binary32; second moments are not below zero.
fn blocks() -> impl Strategy<Value = (StateCode, Vec<f32>)> {
    let finite = |bits: u32| f32::from_bits(bits & 0xFEFF_FFFF);
    let value = prop_oneof![
        4 => (-30i32..10, 1f32..2.0, any::<bool>()).prop_map(|(e, x, sign)| 2f32.powi(e) * if sign { -x } else { x }),
        1 => any::<u32>().prop_map(finite),
        1 => Just(0.0),
    ];
    let values = prop::collection::vec(value, 1..=STATE_BLOCK);
    (0..2usize, values).prop_map(|(which, values)| {
        let code = CODES[which];
        let of = |x: f32| if code == StateCode::UE4M4 { x.abs() } else { x };
        (code, values.into_iter().map(of).collect())
    })
}

/// The distance of the values of a code next to `x`, with `scale`.
fn step(code: StateCode, x: f32, scale: u8) -> f64 {
    let (mantissa, lowest) = match code {
        StateCode::E4M3 => (3, -6),
        StateCode::UE4M4 => (4, -14),
    };
    let scale = i32::from(scale) - 127;
    let exponent = match x {
        0.0 => lowest,
        _ => f64::from(x.abs()).log2().floor() as i32 - scale,
    };
    2f64.powi(exponent.max(lowest) - mantissa + scale)
}

proptest! {
    /// Each value becomes one of its two neighbours, none saturates, and none that is above zero becomes zero as a square.
    #[test]
    fn values_become_their_neighbours((code, values) in blocks(), seed: u64) {
        let random = Philox::new(seed, 0);
        let (_, scale, decoded) = encode(code, &values, |i| random.word(i as u64) as u16);
        for (&x, &y) in values.iter().zip(&decoded) {
            let (error, step) = ((f64::from(x) - f64::from(y)).abs(), step(code, x, scale));
            match code {
                StateCode::UE4M4 => {
                    prop_assert_eq!(x == 0.0, y == 0.0);
                    prop_assert!(error <= step, "{} became {}", x, y);
                }
                StateCode::E4M3 => prop_assert!(error < step || x == y, "{} became {}", x, y),
            }
        }
    }

    /// What was decoded is encoded to the same values again, whatever the random bits, and bfloat16 has all of them.
    #[test]
    fn decoded_values_stay((code, values) in blocks(), seeds: [u64; 2]) {
        let [first, second] = seeds.map(|seed| Philox::new(seed, 0));
        let (.., decoded) = encode(code, &values, |i| first.word(i as u64) as u16);
        let (.., again) = encode(code, &decoded, |i| second.word(i as u64) as u16);
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&again), bits(&decoded));
        let halves: Vec<f32> = decoded.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        prop_assert_eq!(bits(&halves), bits(&decoded));
    }

    /// A block of zeros is one of zeros; powers of two in a block change its scale and no code.
    #[test]
    fn scales_are_powers_of_two((code, values) in blocks(), by in -20i32..20) {
        // Neither end of the scales is near.
        let moderate = |x: f32| x == 0.0 || (1e-12..1e12).contains(&x.abs());
        let values: Vec<f32> = values.into_iter().map(|x| if moderate(x) { x } else { 1.0 }).collect();
        let scaled: Vec<f32> = values.iter().map(|x| x * 2f32.powi(by)).collect();
        let bits = |i: usize| (i * 4099) as u16;
        let ((codes, ..), (of_scaled, ..)) = (encode(code, &values, bits), encode(code, &scaled, bits));
        prop_assert_eq!(codes, of_scaled);
    }
}

#[test]
fn special_values() {
    for code in CODES {
        let (codes, _, decoded) = encode(code, &[0.0; 3], |_| u16::MAX);
        assert_eq!((codes, decoded), (vec![0; 3], vec![0.0; 3]));
    }
    // A NaN does not count for the scale, an infinity has the largest one.
    let (codes, scale, _) = encode(StateCode::E4M3, &[f32::NAN, 448.0], |_| 0);
    assert_eq!((codes, scale), (vec![0x7F, 0x7E], 127));
    let (codes, scale, _) = encode(StateCode::UE4M4, &[f32::INFINITY, 1.0], |_| 0);
    assert_eq!((codes, scale), (vec![0xFF, 1], 0xFE));
    assert_eq!([0, 1, 32, 33].map(state_bytes), [0, 2, 33, 35]);
}

/// Of the three numbers of an element any two are independent: all pairs of their upper bits occur as often.
#[test]
fn random_bits_are_independent_in_pairs() {
    let random = Philox::new(1, 2);
    let mut counts = [[0u32; 4]; 3];
    for index in 0..40_000 {
        let StateBits {
            master,
            e4m3,
            ue4m4,
        } = StateBits::new(&random, index);
        let pairs = [(master, e4m3), (master, ue4m4), (e4m3, ue4m4)];
        for (counts, (a, b)) in counts.iter_mut().zip(pairs) {
            counts[usize::from(a >> 15) * 2 + usize::from(b >> 15)] += 1;
        }
    }
    // Five standard deviations.
    assert!(
        counts.iter().flatten().all(|&n| n.abs_diff(10_000) < 435),
        "{counts:?}"
    );
}
