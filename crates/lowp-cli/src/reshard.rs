//! The policy of `--reshard-after-forward` in JSON: `true`, `false`, or the number of ranks, as it is given.

use lowp_format::ReshardAfterForward;
use serde_json::Value;

pub(crate) fn value(policy: ReshardAfterForward) -> Value {
    match policy {
        ReshardAfterForward::Yes => Value::from(true),
        ReshardAfterForward::No => Value::from(false),
        ReshardAfterForward::Group(ranks) => Value::from(ranks),
    }
}
