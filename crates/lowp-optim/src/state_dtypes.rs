//! [`StateDtypes`]: what AdamW stores of each element, as data.

use std::fmt;
use std::str::FromStr;

use lowp_kernels::FloatDtype;
use thiserror::Error;

/// The dtypes of both moments: `exp_avg_sq` is bf16 only if `exp_avg` is (docs/numerics.md 12.3). Written as
/// `exp_avg=bf16,exp_avg_sq=f32`; read back, a moment that is not named is f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StateDtypes {
    /// Of the first moment.
    pub exp_avg: FloatDtype,
    /// Of the second moment.
    pub exp_avg_sq: FloatDtype,
}

impl StateDtypes {
    /// What is stored of an element beside its codes.
    pub const NAMES: [&str; 3] = ["master", "exp_avg", "exp_avg_sq"];

    /// Those of `exp_avg` and of `exp_avg_sq`.
    pub const fn moments(self) -> [FloatDtype; 2] {
        [self.exp_avg, self.exp_avg_sq]
    }

    /// What is stored of an element beside its codes, with its dtype.
    pub const fn parts(self) -> [(&'static str, FloatDtype); 3] {
        let [master, exp_avg, exp_avg_sq] = Self::NAMES;
        [
            (master, FloatDtype::F32),
            (exp_avg, self.exp_avg),
            (exp_avg_sq, self.exp_avg_sq),
        ]
    }

    /// Bytes that the moments of an element take.
    pub const fn moment_bytes(self) -> usize {
        self.exp_avg.bytes() + self.exp_avg_sq.bytes()
    }
}

impl fmt::Display for StateDtypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second] = self.moments().map(FloatDtype::name);
        write!(f, "exp_avg={first},exp_avg_sq={second}")
    }
}

/// Text that names no dtypes of moments.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{part:?} {why}; write exp_avg=bf16 or exp_avg=bf16,exp_avg_sq=bf16")]
pub struct StateDtypesError {
    part: String,
    why: &'static str,
}

impl FromStr for StateDtypes {
    type Err = StateDtypesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mut exp_avg, mut exp_avg_sq) = (None, None);
        for part in text.split(',') {
            let wrong = |why| StateDtypesError {
                part: part.to_owned(),
                why,
            };
            let (name, dtype) = part.split_once('=').ok_or_else(|| wrong("has no `=`"))?;
            let dtype = match dtype {
                "f32" => FloatDtype::F32,
                "bf16" => FloatDtype::Bf16,
                _ => return Err(wrong("is not f32 or bf16")),
            };
            let found = match name {
                "exp_avg" => exp_avg.replace(dtype),
                "exp_avg_sq" => exp_avg_sq.replace(dtype),
                _ => return Err(wrong("is neither of exp_avg and exp_avg_sq")),
            };
            if found.is_some() {
                return Err(wrong("names a moment twice"));
            }
        }
        let dtypes = Self {
            exp_avg: exp_avg.unwrap_or_default(),
            exp_avg_sq: exp_avg_sq.unwrap_or_default(),
        };
        match dtypes.moments() {
            [FloatDtype::F32, FloatDtype::Bf16] => Err(StateDtypesError {
                part: text.to_owned(),
                why: "has bf16 for exp_avg_sq alone",
            }),
            _ => Ok(dtypes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_dtypes_again() {
        use FloatDtype::{Bf16, F32};
        for [exp_avg, exp_avg_sq] in [[F32, F32], [Bf16, F32], [Bf16, Bf16]] {
            let dtypes = StateDtypes {
                exp_avg,
                exp_avg_sq,
            };
            assert_eq!(dtypes.to_string().parse(), Ok(dtypes));
        }
        let one = StateDtypes::from_str("exp_avg=bf16");
        assert_eq!(one, "exp_avg=bf16,exp_avg_sq=f32".parse());
    }

    #[test]
    fn other_text_is_an_error() {
        for (text, why) in [
            ("", "has no `=`"),
            ("bf16", "has no `=`"),
            ("exp_avg=f16", "is not f32 or bf16"),
            ("master=bf16", "is neither"),
            ("exp_avg=f32,exp_avg=f32", "twice"),
            ("exp_avg_sq=bf16", "alone"),
            ("exp_avg_sq=bf16,exp_avg=f32", "alone"),
        ] {
            let error = StateDtypes::from_str(text).expect_err(text);
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
