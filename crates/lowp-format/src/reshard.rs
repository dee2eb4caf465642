//! [`ReshardAfterForward`]: what becomes of gathered weights between forward and backward.

use std::fmt;
use std::str::FromStr;

use crate::FormatError;

/// What becomes of gathered weights between forward and backward (FSDP2's `reshard_after_forward`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReshardAfterForward {
    /// They are freed, and backward gathers what it needs from the shards: the least memory. `true`.
    #[default]
    Yes,
    /// They are kept: backward gathers nothing. `false`.
    No,
    /// Each rank keeps one of this many parts of them, and backward gathers the parts among as many neighbouring ranks, for
    /// example those of one host. The number must divide the ranks that share out a replica. Written as the number.
    Group(usize),
}

impl ReshardAfterForward {
    /// The policy among `world` ranks: a group of one keeps everything, and a group of all shards again.
    ///
    /// # Errors
    /// A group that does not divide the world.
    pub fn among(self, world: usize) -> Result<Self, FormatError> {
        match self {
            ReshardAfterForward::Group(1) => Ok(ReshardAfterForward::No),
            ReshardAfterForward::Group(ranks) if ranks == world => Ok(ReshardAfterForward::Yes),
            ReshardAfterForward::Group(ranks) if ranks == 0 || !world.is_multiple_of(ranks) => {
                Err(FormatError::ReshardGroup { ranks, world })
            }
            policy => Ok(policy),
        }
    }
}

impl From<bool> for ReshardAfterForward {
    fn from(reshard: bool) -> Self {
        if reshard {
            ReshardAfterForward::Yes
        } else {
            ReshardAfterForward::No
        }
    }
}

impl fmt::Display for ReshardAfterForward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReshardAfterForward::Yes => f.pad("true"),
            ReshardAfterForward::No => f.pad("false"),
            ReshardAfterForward::Group(ranks) => f.pad(&ranks.to_string()),
        }
    }
}

impl FromStr for ReshardAfterForward {
    type Err = FormatError;

    /// Parses `true`, `false`, or a number of ranks.
    fn from_str(text: &str) -> Result<Self, FormatError> {
        match text {
            "true" => Ok(ReshardAfterForward::Yes),
            "false" => Ok(ReshardAfterForward::No),
            number => match number.parse() {
                Ok(ranks) if ranks > 0 => Ok(ReshardAfterForward::Group(ranks)),
                _ => Err(FormatError::BadReshard {
                    text: text.to_owned(),
                }),
            },
        }
    }
}
