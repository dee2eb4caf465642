//! The factor that clips the gradient norm.

/// The factor that brings `norm` down to `max_norm`: `max_norm / (norm + 1e-6)`, at most 1.
/// Evaluated in binary64 and rounded once.
pub fn clip_factor(norm: f64, max_norm: f32) -> f32 {
    (f64::from(max_norm) / (norm + 1e-6)).min(1.0) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_norms_are_left_alone() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(0.0, 1.0), 1.0);
    }

    #[test]
    fn large_norms_come_down_to_the_bound() {
        let factor = clip_factor(8.0, 2.0);
        assert!((f64::from(factor) * 8.0 - 2.0).abs() < 1e-5);
    }
}
