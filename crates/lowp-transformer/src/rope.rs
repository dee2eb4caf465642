//! [`Rope`]: the frequencies of rotary positions.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// Rotary positions: of a head of `d` values the pair `i` turns by `position * theta^(-2 i / d)`, and slower where that is scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// How they are scaled.
    pub scaling: RopeScaling,
}

/// How frequencies are scaled for sequences that are longer than those of the first training; names and keys are those of transformers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    Default,
    /// All by one factor.
    Linear {
        /// What they are divided by.
        factor: f64,
    },
    /// As in Llama 3.1: low frequencies by a factor, high ones not, and those between in proportion.
    Llama3 {
        /// What low frequencies are divided by.
        factor: f64,
        /// Turns over the original length below which a frequency is low.
        low_freq_factor: f64,
        /// Turns over the original length above which a frequency is high.
        high_freq_factor: f64,
        /// Positions of the first training.
        original_max_position_embeddings: usize,
    },
}

impl Default for Rope {
    /// A base of 10,000, unscaled.
    fn default() -> Self {
        Self {
            theta: 10_000.0,
            scaling: RopeScaling::Default,
        }
    }
}

impl Rope {
    /// Radians per position of each pair of a head of `head_dim` values.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let plain = |i: usize| self.theta.powf(-2.0 * i as f64 / head_dim as f64);
        (0..head_dim / 2)
            .map(|i| self.scaling.scaled(plain(i)))
            .collect()
    }

    /// Cosine and sine of the angle of each pair at positions below `seq`, position by position.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "angles of late positions are large, so they are rounded at the end"
    )]
    pub fn angles(&self, head_dim: usize, seq: usize) -> Vec<[f32; 2]> {
        let frequencies = self.frequencies(head_dim);
        let of = |position: usize| {
            let angles = frequencies.iter().map(move |f| position as f64 * f);
            angles.map(|angle| [angle.cos() as f32, angle.sin() as f32])
        };
        (0..seq).flat_map(of).collect()
    }
}

impl RopeScaling {
    /// Whether sequences may have more than the `positions` of a configuration: they are scaled, and that number is one of before.
    pub fn extends(self, positions: usize) -> bool {
        match self {
            Self::Default => false,
            Self::Linear { factor } => factor > 1.0,
            Self::Llama3 {
                factor,
                original_max_position_embeddings,
                ..
            } => factor > 1.0 && original_max_position_embeddings >= positions,
        }
    }

    /// Whether frequencies stay positive numbers.
    pub(crate) fn is_sound(self) -> bool {
        match self {
            Self::Default => true,
            Self::Linear { factor } => factor > 0.0,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                factor > 0.0
                    && high_freq_factor > low_freq_factor
                    && original_max_position_embeddings > 0
            }
        }
    }

    fn scaled(self, frequency: f64) -> f64 {
        match self {
            Self::Default => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let turns = original_max_position_embeddings as f64 * frequency / (2.0 * PI);
                let high = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let high = high.clamp(0.0, 1.0);
                (1.0 - high) * frequency / factor + high * frequency
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA3: Rope = Rope {
        theta: 500_000.0,
        scaling: RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        },
    };

    /// High frequencies stay, low ones are divided, and none is outside of the two.
    #[test]
    fn llama3_scales_low_frequencies_alone() {
        let plain = Rope {
            scaling: RopeScaling::Default,
            ..LLAMA3
        };
        let pairs = plain.frequencies(128).into_iter();
        let pairs: Vec<_> = pairs.zip(LLAMA3.frequencies(128)).collect();
        assert_eq!(pairs[0].0, pairs[0].1);
        let (last, scaled) = pairs[63];
        assert_eq!(last / 8.0, scaled);
        for (plain, scaled) in pairs {
            assert!(
                (plain / 8.0..=plain).contains(&scaled),
                "{plain} to {scaled}"
            );
        }
    }

    #[test]
    fn factors_of_frequencies_that_make_none_are_not_sound() {
        let linear = |factor| RopeScaling::Linear { factor };
        let llama3 = |factor, low_freq_factor, high_freq_factor, original| RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: original,
        };
        for scaling in [RopeScaling::Default, linear(0.5), llama3(8.0, 1.0, 4.0, 1)] {
            assert!(scaling.is_sound(), "{scaling:?}");
        }
        for scaling in [
            linear(0.0),
            linear(-2.0),
            linear(f64::NAN),
            llama3(0.0, 1.0, 4.0, 1),
            llama3(8.0, 4.0, 4.0, 1),
            llama3(8.0, 1.0, 4.0, 0),
        ] {
            assert!(!scaling.is_sound(), "{scaling:?}");
        }
    }

    /// A number of positions from before the scaling is no limit; one that the scaling made is.
    #[test]
    fn scaling_goes_beyond_the_positions_of_before() {
        assert!(!RopeScaling::Default.extends(64));
        assert!(RopeScaling::Linear { factor: 2.0 }.extends(64));
        assert!(!RopeScaling::Linear { factor: 1.0 }.extends(64));
        assert!(LLAMA3.scaling.extends(8192));
        assert!(!LLAMA3.scaling.extends(65_536));
    }

    #[test]
    fn angles_are_of_positions_in_order() {
        let angles = Rope::default().angles(4, 3);
        assert_eq!(angles.len(), 3 * 2);
        assert_eq!(angles[..2], [[1.0, 0.0]; 2]);
        assert_eq!(angles[4], [2f64.cos() as f32, 2f64.sin() as f32]);
    }
}
