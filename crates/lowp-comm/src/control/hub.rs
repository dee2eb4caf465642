//! [`Hub`]: where the ranks of one world meet: posts, rounds, failures.
//!
//! In a round every rank of a group posts a call and what it brings; when the last one comes the calls
//! are compared, and each rank gets the posts of all.
//!
//! A rank makes one call at a time, so one that waits comes to no other round. Ranks that
//! wait for each other in a circle, each in another group, are found when the last of them begins
//! to wait.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::call::{Call, by_ranks};
use crate::CommError;
use crate::error::Departure;

/// The group that all ranks are in. It stays.
const WORLD: usize = 0;

/// A rank's part in a round.
#[derive(Clone, Debug)]
pub(crate) struct Post<P> {
    pub(crate) call: Call,
    pub(crate) payload: P,
}

/// The posts of all ranks of a group, in the group's order.
pub(crate) type Round<P> = Arc<Vec<Post<P>>>;

/// What hears of rounds and failures, for ranks that are not threads which wait here.
pub(crate) trait Listener<P>: Send + Sync + Debug {
    /// A round of the ranks `members` took place.
    fn met(&self, members: &[usize], round: &Round<P>);
}

/// A round that a rank waits for.
#[derive(Clone, Copy, Debug)]
struct Wait {
    group: usize,
    since: Instant,
}

/// One group of ranks.
#[derive(Debug)]
struct Group<P> {
    /// World ranks of the members, in group order.
    members: Arc<[usize]>,
    posts: Vec<Option<Post<P>>>,
    /// The posts of the latest round, until those that wait for them have taken them. The next round needs all ranks, so
    /// they have by then.
    latest: Round<P>,
    /// Ranks that wait here, and have not taken the posts of their round.
    takers: usize,
    /// Number of rounds.
    rounds: u64,
    /// The split that made it, until every member has opened it.
    split: Option<Split>,
    /// Members that have not opened it, and members that hold it or will.
    unopened: usize,
    holders: usize,
}

/// A parent, the number of the parent's round, and a color.
type Split = (usize, u64, usize);

impl<P> Group<P> {
    fn new(members: Arc<[usize]>, split: Option<Split>) -> Self {
        Self {
            posts: members.iter().map(|_| None).collect(),
            unopened: members.len(),
            holders: members.len(),
            split,
            members,
            latest: Arc::default(),
            takers: 0,
            rounds: 0,
        }
    }

    /// The world ranks that the next round still needs.
    fn missing(&self) -> impl Iterator<Item = usize> {
        let posts = self.posts.iter().zip(self.members.iter());
        posts
            .filter(|(post, _)| post.is_none())
            .map(|(_, &world)| world)
    }

    /// The call that a rank of the world waits in.
    fn call_of(&self, world_rank: usize) -> Option<&Call> {
        let at = self.members.iter().position(|&rank| rank == world_rank)?;
        Some(&self.posts[at].as_ref()?.call)
    }

    /// The posts of the latest round, for a rank that waited for it. The last one leaves nothing behind.
    fn take(&mut self) -> Round<P> {
        let round = Arc::clone(&self.latest);
        self.takers -= 1;
        if self.takers == 0 {
            self.latest = Arc::default();
        }
        round
    }

    /// Makes a round of the posts, which are all there.
    fn meet(&mut self) -> Result<Round<P>, CommError> {
        let posts: Vec<Post<P>> = self.posts.iter_mut().filter_map(Option::take).collect();
        let calls: Vec<&Call> = posts.iter().map(|post| &post.call).collect();
        if calls.iter().any(|call| *call != calls[0]) {
            return Err(CommError::Mismatch {
                what: "the collective call".to_owned(),
                descriptions: by_ranks(Call::describe_all(&calls), &self.members),
            });
        }
        let round = Arc::new(posts);
        if self.takers > 0 {
            self.latest = Arc::clone(&round);
        }
        self.rounds += 1;
        Ok(round)
    }
}

/// Everything that ranks share, under one lock.
#[derive(Debug)]
struct HubState<P> {
    failure: Option<CommError>,
    /// Per world rank: how it went, if it is gone.
    departed: Vec<Option<Departure>>,
    /// Per world rank: the round that it waits for.
    waits: Vec<Option<Wait>>,
    /// Those that some rank holds, and the world. No number comes twice.
    groups: BTreeMap<usize, Group<P>>,
    /// Groups that were ever made.
    made: usize,
}

impl<P> HubState<P> {
    /// Where those of `ranks` that wait do so, in words.
    fn places(&self, ranks: impl IntoIterator<Item = usize>) -> Vec<String> {
        let place = |rank: usize| {
            let group = self.groups.get(&self.waits[rank]?.group)?;
            let call = group.call_of(rank)?.describe(0);
            let with = &group.members;
            Some(format!("rank {rank} waits in {call} with ranks {with:?}"))
        };
        ranks.into_iter().filter_map(place).collect()
    }

    /// The shortest circle of waits through `rank`, which begins to wait: it needs a rank that
    /// waits elsewhere for one that ... needs `rank`. A round needs all members, so no round of
    /// a circle can take place.
    fn circle(&self, rank: usize) -> Option<CommError> {
        // Ranks that wait, nearest first, each with the place of the one that needs it.
        let mut reached: Vec<(usize, usize)> = Vec::new();
        let mut seen = vec![false; self.waits.len()];
        let mut at = 0;
        let mut wait = self.waits[rank]?;
        loop {
            for needed in self.groups.get(&wait.group)?.missing() {
                if needed == rank {
                    let mut ranks = vec![rank];
                    // `at` counts from 1 in `reached`; 0 is `rank` itself.
                    while at > 0 {
                        let (waiting, by) = reached[at - 1];
                        ranks.push(waiting);
                        at = by;
                    }
                    ranks.sort_unstable();
                    return Some(CommError::Mismatch {
                        what: "the next collective call".to_owned(),
                        descriptions: self.places(ranks),
                    });
                }
                if self.waits[needed].is_some() && !seen[needed] {
                    seen[needed] = true;
                    reached.push((needed, at));
                }
            }
            wait = self.waits[reached.get(at)?.0]?;
            at += 1;
        }
    }

    /// What keeps the round that `rank` waits for from taking place.
    fn trouble(&self, rank: usize, limit: Duration) -> Option<CommError> {
        let wait = self.waits[rank]?;
        let group = self.groups.get(&wait.group)?;
        let op = || {
            group
                .call_of(rank)
                .map_or_else(Box::default, |c| c.name.as_str().into())
        };
        let gone = group.missing().find_map(|r| Some((r, self.departed[r]?)));
        if let Some((rank, how)) = gone {
            return Some(CommError::Departed {
                op: op(),
                rank,
                how,
            });
        }
        let waited = wait.since.elapsed();
        (waited >= limit).then(|| {
            let missing: Vec<usize> = group.missing().collect();
            CommError::Timeout {
                op: op(),
                waited_s: waited.as_secs_f64(),
                elsewhere: self.places(missing.iter().copied()),
                missing,
            }
        })
    }
}

/// The meeting point of one world.
#[derive(Debug)]
pub(crate) struct Hub<P> {
    limit: Duration,
    state: Mutex<HubState<P>>,
    wake: Condvar,
    listener: OnceLock<Arc<dyn Listener<P>>>,
}

impl<P: Debug> Hub<P> {
    /// A world of `world` ranks, each of whose waits ends after `limit`.
    pub(crate) fn new(world: usize, limit: Duration) -> Self {
        let state = HubState {
            failure: None,
            departed: vec![None; world],
            waits: vec![None; world],
            groups: BTreeMap::from([(WORLD, Group::new((0..world).collect(), None))]),
            made: 1,
        };
        Self {
            limit,
            state: Mutex::new(state),
            wake: Condvar::new(),
            listener: OnceLock::new(),
        }
    }

    /// Has `listener` hear of every round.
    pub(crate) fn listen(&self, listener: Arc<dyn Listener<P>>) {
        // One per hub: its maker sets it.
        let _first = self.listener.set(listener);
    }

    /// The state. Nothing panics while it is locked, so a poisoned lock cannot hold half a change.
    fn lock(&self) -> MutexGuard<'_, HubState<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the world is one rank.
    pub(crate) fn is_solo(&self) -> bool {
        self.lock().departed.len() == 1
    }

    /// The world ranks of a group; none of one that is not there.
    pub(crate) fn members(&self, group: usize) -> Arc<[usize]> {
        let state = self.lock();
        let group = state.groups.get(&group);
        group.map_or_else(Arc::default, |group| Arc::clone(&group.members))
    }

    /// The group that a split of `parent` makes of `members` for `color`: made for the first rank that
    /// asks; each member asks once. `round` is the number of calls that the parent's ranks made before the split.
    pub(crate) fn open(&self, parent: usize, round: u64, color: usize, members: &[usize]) -> usize {
        let mut state = self.lock();
        let split = (parent, round, color);
        // New ones are at the end.
        let mut known = state.groups.iter().rev();
        let known = known.find(|(_, group)| group.split == Some(split));
        let number = known.map_or(state.made, |(&number, _)| number);
        state.made = state.made.max(number + 1);
        let new = || Group::new(members.into(), Some(split));
        let group = state.groups.entry(number).or_insert_with(new);
        group.unopened = group.unopened.saturating_sub(1);
        if group.unopened == 0 {
            group.split = None;
        }
        number
    }

    /// A member of `group` holds it no more. The last one ends it; the world stays.
    pub(crate) fn close(&self, group: usize) {
        let mut state = self.lock();
        let Some(open) = state.groups.get_mut(&group).filter(|_| group != WORLD) else {
            return;
        };
        open.holders = open.holders.saturating_sub(1);
        if open.holders == 0 {
            state.groups.remove(&group);
        }
    }

    /// Number of groups that some rank holds, the world among them.
    #[cfg(test)]
    pub(crate) fn groups(&self) -> usize {
        self.lock().groups.len()
    }

    /// The cause of failure.
    pub(crate) fn failure(&self) -> Option<CommError> {
        self.lock().failure.clone()
    }

    /// Makes `error` the cause of failure, unless there is one, and wakes everybody. Returns the
    /// cause.
    fn fail_locked(&self, state: &mut HubState<P>, error: CommError) -> CommError {
        let cause = state.failure.get_or_insert(error).clone();
        self.wake.notify_all();
        cause
    }

    /// See [`Hub::fail_locked`]. The only rank of a world may try again.
    pub(crate) fn fail(&self, error: CommError) -> CommError {
        let mut state = self.lock();
        if state.departed.len() == 1 {
            return error;
        }
        self.fail_locked(&mut state, error)
    }

    /// World rank `rank` is gone.
    pub(crate) fn depart(&self, rank: usize, how: Departure) {
        self.lock().departed[rank].get_or_insert(how);
        self.wake.notify_all();
    }

    /// Posts without waiting: the listener hears of the round.
    pub(crate) fn post(&self, group: usize, rank: usize, post: Post<P>) -> Result<(), CommError> {
        self.post_for(group, rank, post, false).map(drop)
    }

    /// Posts. The round, if this post was the last one; else the number of rounds so far, and the caller takes the round if
    /// it `waits`.
    fn post_for(
        &self,
        group: usize,
        rank: usize,
        post: Post<P>,
        waits: bool,
    ) -> Result<Result<Round<P>, u64>, CommError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(cause) = &state.failure {
            return Err(cause.clone());
        }
        let g = state.groups.get_mut(&group);
        let g = g.ok_or_else(|| left(group, rank))?;
        g.posts[rank] = Some(post);
        if g.posts.iter().any(Option::is_none) {
            let (rounds, world_rank) = (g.rounds, g.members[rank]);
            let since = Instant::now();
            state.waits[world_rank] = Some(Wait { group, since });
            g.takers += usize::from(waits);
            let trouble = state.circle(world_rank);
            return match trouble.or_else(|| state.trouble(world_rank, self.limit)) {
                Some(error) => Err(self.fail_locked(state, error)),
                None => Ok(Err(rounds)),
            };
        }
        let round = match g.meet() {
            Ok(round) => round,
            Err(error) => return Err(self.fail_locked(state, error)),
        };
        let members = Arc::clone(&g.members);
        for &member in &*members {
            state.waits[member] = None;
        }
        self.wake.notify_all();
        drop(guard);
        if let Some(listener) = self.listener.get() {
            listener.met(&members, &round);
        }
        Ok(Ok(round))
    }

    /// Posts, and waits for the posts of all ranks of the group.
    pub(crate) fn arrive(
        &self,
        group: usize,
        rank: usize,
        post: Post<P>,
    ) -> Result<Round<P>, CommError> {
        let before = match self.post_for(group, rank, post, true)? {
            Ok(round) => return Ok(round),
            Err(before) => before,
        };
        let mut guard = self.lock();
        loop {
            let state = &mut *guard;
            // It is there for as long as this rank's handle.
            let g = state.groups.get_mut(&group);
            let g = g.ok_or_else(|| left(group, rank))?;
            let world_rank = g.members[rank];
            // A round that took place counts, even if something failed right after it.
            if g.rounds > before {
                return Ok(g.take());
            }
            if let Some(cause) = &state.failure {
                return Err(cause.clone());
            }
            if let Some(error) = state.trouble(world_rank, self.limit) {
                return Err(self.fail_locked(state, error));
            }
            let since = state.waits[world_rank].map_or_else(Instant::now, |wait| wait.since);
            guard = self.sleep(guard, self.limit.saturating_sub(since.elapsed()));
        }
    }

    fn sleep<'a>(
        &'a self,
        guard: MutexGuard<'a, HubState<P>>,
        time: Duration,
    ) -> MutexGuard<'a, HubState<P>> {
        let woken = self.wake.wait_timeout(guard, time);
        woken.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Looks after ranks that wait elsewhere: returns when the world has failed, with the cause, or when
    /// all ranks are gone.
    pub(crate) fn watch(&self) -> Option<CommError> {
        const EVERY: Duration = Duration::from_millis(100);
        let mut guard = self.lock();
        loop {
            let state = &mut *guard;
            if let Some(cause) = &state.failure {
                return Some(cause.clone());
            }
            let ranks = 0..state.waits.len();
            if let Some(error) = ranks.clone().find_map(|r| state.trouble(r, self.limit)) {
                return Some(self.fail_locked(state, error));
            }
            if state.departed.iter().all(Option::is_some) {
                return None;
            }
            guard = self.sleep(guard, EVERY);
        }
    }

    /// Waits until all ranks are gone, at most `time`.
    pub(crate) fn wait_for_departures(&self, time: Duration) {
        let begun = Instant::now();
        let mut guard = self.lock();
        while guard.departed.iter().any(Option::is_none) {
            let left = time.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return;
            }
            guard = self.sleep(guard, left);
        }
    }
}

/// A rank calls in a group whose handle it dropped.
fn left(group: usize, rank: usize) -> CommError {
    let message = format!("member {rank} of group {group} calls in it and has left it");
    CommError::Failed { rank, message }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// What ranks told each other ends with the round, and a group with its last handle ([`super::super::local`]).
    #[test]
    fn nothing_is_left_of_a_round_that_all_have_taken() {
        let hub = Hub::<Vec<u8>>::new(3, Duration::from_secs(20));
        for round in 0..3 {
            thread::scope(|scope| {
                for rank in 0..3 {
                    let hub = &hub;
                    scope.spawn(move || {
                        let (call, payload) = (Call::named("a test"), vec![round; 1000]);
                        let taken = hub.arrive(0, rank, Post { call, payload });
                        let taken = taken.expect("a round");
                        assert!(taken.iter().all(|post| post.payload == [round; 1000]));
                    });
                }
            });
            let state = hub.lock();
            let group = &state.groups[&WORLD];
            assert!(group.latest.is_empty() && group.posts.iter().all(Option::is_none));
            assert_eq!(group.takers, 0);
        }
    }
}
