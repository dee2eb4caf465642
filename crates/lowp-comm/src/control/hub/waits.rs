//! What keeps rounds from taking place: ranks that are gone, that do not come in time, or that wait for each other.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{EVERY, Group, HubState, Met, Round, left};
use crate::CommError;
use crate::control::call::some_lines;
use crate::control::outcome::Outcome;
use crate::control::post::Payload;
use crate::error::list_of_ranks;

impl<P: Payload> HubState<P> {
    /// Makes a round of the posts of `group`, which are all there. Returns it with the ranks.
    pub(super) fn meet(&mut self, group: usize) -> Result<(Round<P>, Arc<[usize]>), CommError> {
        let Some(g) = self.groups.get_mut(&group) else {
            return Err(left(group, 0));
        };
        let members = Arc::clone(&g.members);
        let posts = g.meet()?;
        let outcome = Outcome::of(&posts, &members, &mut self.made)?;
        for place in outcome.new_groups() {
            let new = Group::new(Arc::clone(&place.members));
            self.groups.insert(place.group, new);
        }
        for &member in &*members {
            self.waits[member] = None;
        }
        let round = Arc::new(Met { posts, outcome });
        if let Some(g) = self.groups.get_mut(&group)
            && g.takers > 0
        {
            g.latest = Some(Arc::clone(&round));
        }
        Ok((round, members))
    }

    /// Where those of `ranks` that wait do so, in words.
    fn places(&self, ranks: impl IntoIterator<Item = usize>) -> Vec<String> {
        let place = |rank: usize| {
            let group = self.groups.get(&self.waits[rank]?)?;
            let call = group.call_of(rank)?.describe(0);
            let with = list_of_ranks(&group.members);
            Some(format!("rank {rank} waits in {call} with ranks {with}"))
        };
        some_lines(ranks.into_iter().filter_map(place))
    }

    /// The shortest circle of waits through the group that `rank` waits in: it needs a rank that
    /// waits in another group, which needs one that ... waits in the first. A round needs all members, so no round of
    /// a circle can take place.
    pub(super) fn circle(&self, rank: usize) -> Option<CommError> {
        let first = self.waits[rank]?;
        // Groups, nearest first, each with the rank that waits there and is needed, and the place of the group that needs it.
        let mut reached = vec![(first, rank, 0)];
        let mut seen = BTreeSet::from([first]);
        let mut at = 0;
        while let Some(&(group, ..)) = reached.get(at) {
            for needed in self.groups.get(&group)?.missing() {
                let Some(elsewhere) = self.waits[needed] else {
                    continue;
                };
                if elsewhere == first {
                    let mut ranks = vec![needed];
                    while at > 0 {
                        let (_, waiting, by) = reached[at];
                        ranks.push(waiting);
                        at = by;
                    }
                    ranks.sort_unstable();
                    return Some(CommError::Mismatch {
                        what: "the next collective call".to_owned(),
                        descriptions: self.places(ranks),
                    });
                }
                if seen.insert(elsewhere) {
                    reached.push((elsewhere, needed, at));
                }
            }
            at += 1;
        }
        None
    }

    /// What keeps the round that some of `group` wait for from taking place.
    pub(super) fn trouble(&self, group: usize, limit: Duration) -> Option<CommError> {
        let group = self.groups.get(&group)?;
        let op = || {
            let waiting = group.first_waiting();
            waiting.map_or_else(Box::default, |(_, call)| call.name.as_str().into())
        };
        let departed = |rank| Some((rank, self.departed[rank]?));
        if self.gone > 0
            && let Some((rank, how)) = group.missing().find_map(departed)
        {
            return Some(CommError::Departed {
                op: op(),
                rank,
                how,
            });
        }
        let waited = group.since.elapsed();
        (waited >= limit).then(|| {
            let missing: Vec<usize> = group.missing().collect();
            let mut elsewhere = self.places(missing.iter().copied());
            elsewhere.extend(self.silent_relays(group));
            CommError::Timeout {
                op: op(),
                waited_s: waited.as_secs_f64(),
                elsewhere,
                missing,
            }
        })
    }

    /// Relays that bring no call of their ranks in `group`, in words: where a relay is stuck, its other ranks need not be.
    fn silent_relays(&self, group: &Group<P>) -> Vec<String> {
        let members: BTreeSet<usize> = group.members.iter().copied().collect();
        let silent = self.relays.iter().filter_map(|(relay, ranks)| {
            let ranks = ranks.iter().copied().filter(|rank| members.contains(rank));
            let mut ranks: Vec<usize> = ranks.collect();
            ranks.sort_unstable();
            // A rank whose call came waits for the round of some group.
            let is_silent = ranks.iter().all(|&rank| self.waits[rank].is_none());
            (is_silent && !ranks.is_empty()).then(|| {
                let ranks = list_of_ranks(&ranks);
                format!("rank {relay} brings the calls of ranks {ranks}")
            })
        });
        some_lines(silent)
    }

    /// The same of any group, and circles among those that have waited for a while.
    pub(super) fn any_trouble(&self, limit: Duration) -> Option<CommError> {
        let waiting = self.groups.iter().filter(|(_, group)| group.posted > 0);
        waiting.into_iter().find_map(|(&number, group)| {
            self.trouble(number, limit).or_else(|| {
                let (rank, _) = group.first_waiting()?;
                (group.since.elapsed() >= EVERY).then(|| self.circle(rank))?
            })
        })
    }
}
