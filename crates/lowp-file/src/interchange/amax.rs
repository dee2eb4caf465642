//! The amax that a number was made of, for files that do not say the amax.

use lowp_format::{Orientation, Recipe};

/// Neighbors on either side of the first guess that are tried.
const NEIGHBORS: u32 = 64;

/// An amax of which `quotient` makes `stored`: the nearest to `guess` whose quotient has the same bits. Where no amax has it,
/// the one whose quotient is nearest, the smaller of two. A guess that is no positive finite number is taken as it is.
///
/// Neither `fl(c / amax)` nor `fl(amax / c)` has one amax for every value: over an interval of one binary order they have
/// more amaxes than values, or fewer. That is why files that lowp exports say the amax.
pub(crate) fn nearest(stored: f32, guess: f32, quotient: impl Fn(f32) -> f32) -> f32 {
    if !(guess.is_finite() && guess > 0.0) {
        return guess;
    }
    let distance = |amax: f32| quotient(amax).to_bits().abs_diff(stored.to_bits());
    let bits = guess.to_bits();
    let mut best = (distance(guess), guess);
    for step in 1..=NEIGHBORS {
        for other in [bits.saturating_sub(step), bits + step] {
            let amax = f32::from_bits(other);
            let candidate = (distance(amax), amax);
            if amax.is_finite() && candidate.0 < best.0 {
                best = candidate;
            }
        }
    }
    best.1
}

/// An amax of which `recipe` makes the decode scale `decode` of a tensor.
pub(crate) fn amax_of_scale(decode: f32, recipe: &impl Recipe) -> f32 {
    let largest = recipe.kernel(Orientation::Rowwise).element.max_finite();
    nearest(decode, decode * largest, |amax| 1.0 / (largest / amax))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quotient_of_what_is_found_is_the_stored_one() {
        let mut state = 1u32;
        for _ in 0..20_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let amax = f32::from_bits(0x2000_0000 + (state >> 2));
            for c in [2688.0, 1536.0, 448.0] {
                let down = |amax: f32| c / amax;
                let stored = down(amax);
                assert_eq!(down(nearest(stored, c / stored, down)), stored, "{amax}");
                let up = |amax: f32| amax / c;
                let stored = up(amax);
                assert_eq!(up(nearest(stored, stored * c, up)), stored, "{amax}");
            }
        }
    }

    #[test]
    fn a_quotient_does_not_tell_its_amax() {
        // Two amaxes with one quotient: the reason for what exported files say.
        let quotient = |amax: f32| amax / 2688.0;
        let twins = (0..1000u32)
            .map(|step| f32::from_bits(1.5f32.to_bits() + step))
            .filter(|amax| quotient(*amax) == quotient(amax.next_up()))
            .count();
        assert!(twins > 100, "{twins}");
    }

    #[test]
    fn what_is_no_amax_stays() {
        for guess in [0.0, f32::INFINITY, -1.0] {
            assert_eq!(nearest(1.0, guess, |x| x), guess);
        }
        assert!(nearest(1.0, f32::NAN, |x| x).is_nan());
    }
}
