//! [`CallLog`]: what a rank did since the last step, one thing after the other, so that a step can compare it over the ranks.

use std::sync::Arc;

use crate::{CommError, Control};

/// Who must have done the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompareAmong {
    /// All ranks of the world.
    World,
    /// The ranks that share out the weights of a replica.
    Shards,
}

/// What a rank did since the last step, in its order: which gradients it sent, or which
/// gathers it made. Where collectives are only enqueued no rank sees at the call what the
/// others do; the digest travels with something that a step exchanges anyway, and the rest only where digests differ.
#[derive(Clone, Debug)]
#[must_use = "ranks that did different things are found where it is compared: give it to the optimizer's step"]
pub struct CallLog {
    /// What was done: "the gradients of a step".
    pub what: &'static str,
    /// Who must have done the same.
    pub among: CompareAmong,
    /// What was done, in its order.
    pub order: CallOrder,
    /// What the numbers stand for.
    pub names: CallNames,
}

/// What the numbers of a [`CallOrder`] stand for.
#[derive(Clone, Debug)]
pub enum CallNames {
    /// Parameters, by their place; others end a bucket.
    Params(Arc<[String]>),
    /// The gathers of groups.
    Gathers(fn(u64) -> String),
}

impl CallLog {
    /// A number that ranks have in common if they did the same.
    pub fn digest(&self) -> u64 {
        self.order.digest
    }

    /// Compares it over the world of `control`, replica after replica of `shards` ranks. Collective.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] on every rank, which names the ranks and the first thing in which they differ; or a rank failed.
    pub fn compare(&self, control: &dyn Control, shards: usize) -> Result<(), CommError> {
        let ranks = match self.among {
            CompareAmong::World => control.world_size(),
            CompareAmong::Shards => shards,
        };
        control.all_equal_in_groups(self.what, self.digest(), ranks, || self.text())
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for &item in &self.order.first {
            match &self.names {
                CallNames::Params(names) => match names.get(item as usize) {
                    Some(name) if text.is_empty() || text.ends_with("; ") => text.push_str(name),
                    Some(name) => text.extend([", ", name]),
                    None => text.push_str("; "),
                },
                CallNames::Gathers(name) => text.extend([name(item).as_str(), ", "]),
            }
        }
        let listed = text.trim_end_matches([',', ';', ' ']);
        match self.order.len - self.order.first.len() as u64 {
            0 if listed.is_empty() => "none".to_owned(),
            0 => listed.to_owned(),
            more => format!(
                "{listed} and {more} more, digest {:016x}",
                self.order.digest
            ),
        }
    }
}

/// Numbers in their order: all of them in a digest, and the first ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallOrder {
    digest: u64,
    first: Vec<u64>,
    len: u64,
}

impl CallOrder {
    /// Most numbers that are kept: a step of thousands of layers and micro-batches has fewer.
    const MOST: usize = 1 << 14;

    /// Adds `item`.
    pub fn push(&mut self, item: u64) {
        self.digest = fold(self.digest, item);
        self.len += 1;
        if self.first.len() < Self::MOST {
            self.first.push(item);
        }
    }
}

/// One number of all `values`, in their order.
pub fn digest(values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(0, fold)
}

/// The digest with one more `value`: a bijection of 64 bits of which every bit depends on every bit (splitmix64).
fn fold(digest: u64, value: u64) -> u64 {
    let x = (digest ^ value).wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(items: &[u64]) -> CallOrder {
        let mut order = CallOrder::default();
        items.iter().for_each(|&item| order.push(item));
        order
    }

    proptest! {
        /// Also of the first parameter, whose number is 0, and of what is a part of the other.
        #[test]
        fn what_differs_has_another_digest(
            a in prop::collection::vec(0u64..3, 0..6),
            b in prop::collection::vec(0u64..3, 0..6),
        ) {
            prop_assert_eq!(order(&a).digest == order(&b).digest, a == b);
            prop_assert_eq!(order(&a).digest, digest(a));
        }
    }

    #[test]
    fn a_text_lists_what_was_done_and_counts_the_rest() {
        let names: Arc<[String]> = ["w0", "w1", "w2"].map(str::to_owned).into();
        let done = |items: &[u64]| CallLog {
            what: "the gradients of a step",
            among: CompareAmong::World,
            order: order(items),
            names: CallNames::Params(Arc::clone(&names)),
        };
        let end = u64::MAX;
        assert_eq!(done(&[]).text(), "none");
        assert_eq!(done(&[0, 2, end, 1, end]).text(), "w0, w2; w1");
        let many = vec![0; CallOrder::MOST + 3];
        assert!(done(&many).text().contains("w0, w0 and 3 more, digest "));
    }
}
