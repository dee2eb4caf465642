//! What ranks that are processes hear of a round: each answer is encoded once, whoever gets it.

use std::io;
use std::sync::Arc;

use super::frame::{Answer, frame, to_frame};
use crate::control::hub::Round;
use crate::control::outcome::Outcome;

/// What travels in rounds.
pub(super) type Bytes = Arc<[u8]>;

/// Gives the answers of a `round` of `members` to `tell`, with the ranks of the world that get each, and the group that they hear of by it.
pub(super) fn answers(
    members: &[usize],
    round: &Round<Bytes>,
    mut tell_of: impl FnMut(&[usize], Option<usize>, &Bytes),
) -> io::Result<()> {
    let mut tell = |ranks: &[usize], frame: &Bytes| tell_of(ranks, None, frame);
    let posts = &round.posts;
    let all = || {
        let lens = posts.iter().map(|post| post.payload.len()).collect();
        let parts = posts.iter().map(|post| &*post.payload);
        frame(&Answer::All(lens), parts).map(Bytes::from)
    };
    let same = || {
        posts
            .windows(2)
            .all(|pair| pair[0].payload == pair[1].payload)
    };
    let done = || to_frame(&Answer::Done).map(Bytes::from);
    let bytes = |bytes: &[u8]| frame(&Answer::Bytes, [bytes].into_iter()).map(Bytes::from);
    let (first, others) = members.split_at(1.min(members.len()));
    match &round.outcome {
        Outcome::All if same() => {
            let bytes = posts.first().map(|post| &*post.payload);
            tell(members, &frame(&Answer::Same, bytes.into_iter())?.into());
        }
        Outcome::All | Outcome::Equal(false) => tell(members, &all()?),
        Outcome::Equal(true) => tell(members, &done()?),
        Outcome::First => {
            tell(first, &done()?);
            tell(others, &bytes(&posts[0].payload)?);
        }
        Outcome::ToFirst => {
            // Whom nobody sends it to need not be told.
            if first != [0] {
                tell(first, &all()?);
            }
            tell(others, &done()?);
        }
        Outcome::Sum(sum) => tell(members, &bytes(sum)?),
        Outcome::Split(_) => {
            for place in round.outcome.new_groups() {
                let same = *place.members == *members;
                let answer = Answer::Group {
                    group: place.group,
                    members: (!same).then(|| place.members.to_vec()),
                };
                tell_of(
                    &place.members,
                    Some(place.group),
                    &to_frame(&answer)?.into(),
                );
            }
        }
    }
    Ok(())
}
