//! Value generators for laws: the families that break formats.

use lowp_format::Philox;

/// A family of source values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Standard normal.
    Normal,
    /// Normal with a few values a thousand times larger.
    Outliers,
    /// Magnitudes over the whole range of binary32.
    Wide,
    /// Values on and around rounding ties, zeros of both signs, infinities and NaN.
    Special,
    /// Zeros.
    Zeros,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 5] = [
        Family::Normal,
        Family::Outliers,
        Family::Wide,
        Family::Special,
        Family::Zeros,
    ];

    /// `len` values that depend on `seed` only.
    pub fn values(self, seed: u64, len: usize) -> Vec<f32> {
        const SPECIAL: [f32; 16] = [
            0.0,
            -0.0,
            0.25,
            -0.75,
            1.25,
            1.75,
            2.5,
            -3.5,
            5.0,
            448.0,
            464.0,
            61440.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            1e-42,
        ];
        let random = Philox::new(seed, self as u64);
        (0..len as u64)
            .map(|i| {
                let [a, b, c, _] = random.block(i);
                match self {
                    Family::Normal => random.normal(i),
                    Family::Outliers if a % 97 == 0 => random.normal(i) * 1000.0,
                    Family::Outliers => random.normal(i),
                    Family::Wide => random.normal(i) * ((b % 250) as f32 - 125.0).exp2(),
                    Family::Special if a % 4 == 0 => SPECIAL[(c % 16) as usize],
                    Family::Special => random.normal(i),
                    Family::Zeros => 0.0,
                }
            })
            .collect()
    }
}
