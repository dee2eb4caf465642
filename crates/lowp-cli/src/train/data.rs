//! [`DataArg`]: a value of `--data`: where data are, and their weight among others.

use lowp_train::Tokens;
use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A path, or `PATH=WEIGHT`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DataArg {
    pub(crate) path: PathBuf,
    pub(crate) weight: Option<f64>,
}

impl FromStr for DataArg {
    type Err = Infallible;

    /// If a file of the whole name exists, the `=` is part of the name.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let whole = Path::new(text);
        let there = whole.exists() || Tokens::are_at(whole);
        let parts = text.rsplit_once('=').filter(|_| !there);
        let weighted = parts.and_then(|(path, weight)| Some((path, weight.parse::<f64>().ok()?)));
        Ok(match weighted {
            Some((path, weight)) => Self {
                path: path.into(),
                weight: Some(weight),
            },
            None => Self {
                path: text.into(),
                weight: None,
            },
        })
    }
}

impl fmt::Display for DataArg {
    /// As it was given.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.weight.map_or(Ok(()), |weight| write!(f, "={weight}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_after_the_last_sign_is_a_weight() {
        for (text, path, weight) in [
            ("a", "a", None),
            ("a=0.5", "a", Some(0.5)),
            ("a=b=2", "a=b", Some(2.0)),
            ("a=b", "a=b", None),
        ] {
            let expected = DataArg {
                path: path.into(),
                weight,
            };
            assert_eq!(text.parse(), Ok(expected.clone()), "{text}");
            assert_eq!(expected.to_string(), text);
        }
        let folder = tempfile::tempdir().expect("a folder");
        // A file, and two of Megatron-LM.
        for file in ["a=3", "b=3.bin", "b=3.idx"] {
            std::fs::write(folder.path().join(file), "").expect("a file");
        }
        for name in ["a=3", "b=3"] {
            let path = folder.path().join(name);
            let text = path.to_str().expect("UTF-8");
            let expected = DataArg {
                path: path.clone(),
                weight: None,
            };
            assert_eq!(text.parse(), Ok(expected));
        }
    }
}
