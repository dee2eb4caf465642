//! A place that breaks an invariant: what the checks return.

use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Violation {
    pub(super) path: String,
    /// Counted from 1. A violation of the whole file is at 1.
    pub(super) line: usize,
    pub(super) message: String,
}

impl Violation {
    pub(super) fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            line,
            message: message.into(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.message)
    }
}

/// What the tests of the checks share.
#[cfg(test)]
pub(super) mod testing {
    use super::Violation;

    /// `path:line` of each violation: what a test of a check compares.
    pub(in crate::tidy) fn places(violations: &[Violation]) -> Vec<String> {
        violations
            .iter()
            .map(|v| format!("{}:{}", v.path, v.line))
            .collect()
    }
}
