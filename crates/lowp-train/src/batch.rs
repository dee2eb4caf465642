//! [`Batch`]: whole sequences of tokens with what follows each.

use std::sync::Arc;

/// Whole sequences of tokens with their next-token targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// `sequences * seq` tokens.
    pub inputs: Arc<[u32]>,
    /// The token that follows each, or [`Batch::IGNORED`].
    pub targets: Arc<[u32]>,
    /// For each token the first position of its sequence that it sees, where documents do not see those before them.
    pub first_seen: Option<Arc<[u32]>>,
}

impl Batch {
    /// A target that adds nothing to the loss.
    pub const IGNORED: u32 = u32::MAX;

    /// Sequences whose tokens see all before them.
    pub fn new(inputs: Vec<u32>, targets: Vec<u32>) -> Self {
        Self {
            inputs: inputs.into(),
            targets: targets.into(),
            first_seen: None,
        }
    }
}
