//! [`Outcome`]: what comes of the posts of a round.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::call::Kind;
use super::post::{Payload, Post};
use super::sum_in_order;
use crate::CommError;

/// The place of a rank in a group that a split made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) group: usize,
    pub(crate) rank: usize,
    pub(crate) members: Arc<[usize]>,
}

/// What each rank gets beside the posts, or of them.
#[derive(Debug, Default)]
pub(crate) enum Outcome {
    /// All posts.
    #[default]
    All,
    /// The post of the first rank.
    First,
    /// All posts, on the first rank alone.
    ToFirst,
    /// Whether the posts are equal; all of them if not.
    Equal(bool),
    Sum(Vec<u8>),
    /// In the order of the ranks that split.
    Split(Vec<Place>),
}

impl Outcome {
    /// Of equal calls of the ranks `members`. `made` is the number of the next group.
    pub(crate) fn of<P: Payload>(
        posts: &[Post<P>],
        members: &[usize],
        made: &mut usize,
    ) -> Result<Self, CommError> {
        let bytes = || posts.iter().map(|post| post.payload.bytes());
        let Some(first) = posts.first() else {
            return Ok(Self::All);
        };
        Ok(match first.call.kind {
            Kind::AllGather => Self::All,
            Kind::Broadcast => Self::First,
            Kind::Gather => Self::ToFirst,
            Kind::Equal { ranks } => {
                let same = |set: &[Post<P>]| {
                    let bytes = |post: &Post<P>| post.payload.bytes() == set[0].payload.bytes();
                    set.iter().all(bytes)
                };
                Self::Equal(posts.chunks(ranks.max(1)).all(same))
            }
            Kind::Sum => Self::Sum(sum_in_order(bytes(), members)?),
            Kind::Split => Self::Split(places(bytes(), members, made)),
        })
    }

    /// One place of each group that it makes.
    pub(crate) fn new_groups(&self) -> impl Iterator<Item = &Place> {
        let places = match self {
            Self::Split(places) => places.as_slice(),
            _ => &[],
        };
        places.iter().filter(|place| place.rank == 0)
    }
}

/// What a rank asks of a split, as it travels.
pub(crate) fn request(color: usize, key: usize) -> Vec<u8> {
    let words = [color, key].map(|n| (n as u64).to_le_bytes());
    words.concat()
}

/// The places in the groups that a split makes, one for each color: its members in the order of their keys, those of one key
/// in the order of the group.
fn places<'a>(
    requests: impl Iterator<Item = &'a [u8]>,
    members: &[usize],
    made: &mut usize,
) -> Vec<Place> {
    let mut colors: BTreeMap<u64, Vec<(u64, usize)>> = BTreeMap::new();
    for (at, request) in requests.enumerate() {
        let (words, _) = request.as_chunks::<8>();
        let word = |at: usize| words.get(at).map_or(0, |&word| u64::from_le_bytes(word));
        colors.entry(word(0)).or_default().push((word(1), at));
    }
    let mut places = vec![None; members.len()];
    for mut asked in colors.into_values() {
        asked.sort_unstable();
        let group: Arc<[usize]> = asked.iter().map(|&(_, at)| members[at]).collect();
        for (rank, (_, at)) in asked.into_iter().enumerate() {
            places[at] = Some(Place {
                group: *made,
                rank,
                members: Arc::clone(&group),
            });
        }
        *made += 1;
    }
    places.into_iter().flatten().collect()
}
