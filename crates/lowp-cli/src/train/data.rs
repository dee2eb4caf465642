//! [`DataArg`]: a value of `--data`: where data are, and their weight among others.

use std::convert::Infallible;
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

    /// What is there under the whole name has no weight.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let parts = text.rsplit_once('=').filter(|_| !Path::new(text).exists());
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
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a=3");
        std::fs::write(&path, "").expect("a file");
        let text = path.to_str().expect("UTF-8");
        assert_eq!(
            text.parse(),
            Ok(DataArg {
                path: path.clone(),
                weight: None
            })
        );
    }
}
