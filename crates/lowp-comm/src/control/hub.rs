//! [`Hub`]: where the ranks of one world meet: posts, rounds, failures.
//!
//! In a round every rank of a group posts a call and what it brings; when the last one comes the calls
//! are compared, and [`Round`] says what comes of them.
//!
//! A rank makes one call at a time, so one that waits comes to no other round. Ranks that
//! wait for each other in a circle, each in another group, are found once they have waited for [`EVERY`].

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::call::{Call, by_ranks};
use super::outcome::Outcome;
use super::post::{Payload, Post};
use crate::CommError;
use crate::error::Departure;

mod waits;

/// The group that all ranks are in. It stays.
pub(crate) const WORLD: usize = 0;

/// Time between two looks at ranks that wait.
pub(crate) const EVERY: Duration = Duration::from_millis(50);

/// The posts of all ranks of a group, in the group's order, and what comes of them.
#[derive(Debug, Default)]
pub(crate) struct Met<P> {
    pub(crate) posts: Vec<Post<P>>,
    pub(crate) outcome: Outcome,
}

pub(crate) type Round<P> = Arc<Met<P>>;

/// What hears of rounds, for ranks that are not threads which wait here.
pub(crate) trait Listener<P>: Send + Sync + Debug {
    /// A round of the ranks `members` took place.
    fn met(&self, members: &Arc<[usize]>, round: &Round<P>);
}

/// One group of ranks.
#[derive(Debug)]
struct Group<P> {
    /// World ranks of the members, in group order.
    members: Arc<[usize]>,
    posts: Vec<Option<Post<P>>>,
    /// Number of posts that are there, and when the first of them came.
    posted: usize,
    /// Bytes that they brought.
    bytes: usize,
    since: Instant,
    /// The latest round, until those that wait for it have taken it. The next round needs all ranks, so
    /// they have by then.
    latest: Option<Round<P>>,
    /// Ranks that wait here, and have not taken their round.
    takers: usize,
    /// Number of rounds.
    rounds: u64,
    /// Which members hold it, or will.
    holders: Vec<bool>,
}

impl<P: Payload> Group<P> {
    fn new(members: Arc<[usize]>) -> Self {
        Self {
            posts: members.iter().map(|_| None).collect(),
            posted: 0,
            bytes: 0,
            since: Instant::now(),
            holders: vec![true; members.len()],
            members,
            latest: None,
            takers: 0,
            rounds: 0,
        }
    }

    fn post(&mut self, rank: usize, post: Post<P>) {
        if self.posted == 0 {
            self.since = Instant::now();
            self.bytes = 0;
        }
        self.bytes = self.bytes.saturating_add(post.payload.bytes().len());
        self.posted += usize::from(self.posts[rank].replace(post).is_none());
    }

    /// The world ranks that the next round still needs.
    fn missing(&self) -> impl Iterator<Item = usize> {
        let posts = self.posts.iter().zip(self.members.iter());
        posts
            .filter(|(post, _)| post.is_none())
            .map(|(_, &world)| world)
    }

    /// A world rank that waits here, and its call.
    fn first_waiting(&self) -> Option<(usize, &Call)> {
        let posts = self.members.iter().zip(&self.posts);
        let mut waiting = posts.filter_map(|(&rank, post)| Some((rank, &post.as_ref()?.call)));
        waiting.next()
    }

    /// The call that a rank of the world waits in.
    fn call_of(&self, world_rank: usize) -> Option<&Call> {
        let at = self.members.iter().position(|&rank| rank == world_rank)?;
        Some(&self.posts[at].as_ref()?.call)
    }

    /// The latest round, for a rank that waited for it. The last one leaves nothing behind.
    fn take(&mut self) -> Option<Round<P>> {
        self.takers -= 1;
        if self.takers == 0 {
            self.latest.take()
        } else {
            self.latest.clone()
        }
    }

    /// The posts, which are all there, if their calls are equal.
    fn meet(&mut self) -> Result<Vec<Post<P>>, CommError> {
        let posts: Vec<Post<P>> = self.posts.iter_mut().filter_map(Option::take).collect();
        self.posted = 0;
        if posts.iter().any(|post| post.call != posts[0].call) {
            let calls: Vec<&Call> = posts.iter().map(|post| &post.call).collect();
            return Err(CommError::Mismatch {
                what: "the collective call".to_owned(),
                descriptions: by_ranks(Call::describe_all(&calls), &self.members),
            });
        }
        self.rounds += 1;
        Ok(posts)
    }
}

/// Everything that ranks share, under one lock.
#[derive(Debug)]
struct HubState<P> {
    failure: Option<CommError>,
    /// Per world rank: how it went, if it is gone; and how many are.
    departed: Vec<Option<Departure>>,
    gone: usize,
    /// The ranks whose posts a relay brings, by its rank.
    relays: BTreeMap<usize, Vec<usize>>,
    /// Per world rank: the group whose round it waits for.
    waits: Vec<Option<usize>>,
    /// Those that some rank holds, and the world. No number comes twice.
    groups: BTreeMap<usize, Group<P>>,
    /// Groups that were ever made.
    made: usize,
}

/// The meeting point of one world.
#[derive(Debug)]
pub(crate) struct Hub<P> {
    limit: Duration,
    /// Most bytes that ranks bring to a round.
    most: usize,
    state: Mutex<HubState<P>>,
    wake: Condvar,
    listener: OnceLock<Arc<dyn Listener<P>>>,
}

impl<P: Payload> Hub<P> {
    /// A world of `world` ranks, each of whose waits ends after `limit`.
    pub(crate) fn new(world: usize, limit: Duration, most: usize) -> Self {
        let state = HubState {
            failure: None,
            departed: vec![None; world],
            gone: 0,
            relays: BTreeMap::new(),
            waits: vec![None; world],
            groups: BTreeMap::from([(WORLD, Group::new((0..world).collect()))]),
            made: 1,
        };
        Self {
            limit,
            most,
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

    /// Member `rank` of `group` holds it no more. The last one ends it; the world stays.
    pub(crate) fn close(&self, group: usize, rank: usize) {
        let mut state = self.lock();
        let Some(open) = state.groups.get_mut(&group).filter(|_| group != WORLD) else {
            return;
        };
        if let Some(holds) = open.holders.get_mut(rank) {
            *holds = false;
        }
        if !open.holders.contains(&true) {
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
        let mut state = self.lock();
        if let Some(departed @ None) = state.departed.get_mut(rank) {
            *departed = Some(how);
            state.gone += 1;
        }
        self.wake.notify_all();
    }

    /// The relay `relay` brings the posts of `rank` from now on.
    pub(crate) fn relayed(&self, rank: usize, relay: usize) {
        let mut state = self.lock();
        state.relays.entry(relay).or_default().push(rank);
    }

    /// Posts for ranks of a group, without waiting: the listener hears of the round.
    pub(crate) fn post(
        &self,
        group: usize,
        posts: impl IntoIterator<Item = (usize, Post<P>)>,
    ) -> Result<(), CommError> {
        self.post_for(group, posts, false).map(drop)
    }

    /// Posts. The round, if these posts were the last ones; else the number of rounds so far, and the caller takes the round if
    /// it `waits`.
    fn post_for(
        &self,
        group: usize,
        posts: impl IntoIterator<Item = (usize, Post<P>)>,
        waits: bool,
    ) -> Result<Result<Round<P>, u64>, CommError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(cause) = &state.failure {
            return Err(cause.clone());
        }
        let g = state.groups.get_mut(&group);
        let mut posts = posts.into_iter().peekable();
        let first = posts.peek().map_or(0, |&(rank, _)| rank);
        let g = g.ok_or_else(|| left(group, first))?;
        for (rank, post) in posts {
            g.post(rank, post);
            let world_rank = g.members[rank];
            state.waits[world_rank] = Some(group);
            if g.bytes > self.most {
                let cause = too_much(world_rank, g.bytes, self.most);
                return Err(self.fail_locked(state, cause));
            }
        }
        if g.posted < g.members.len() {
            let rounds = g.rounds;
            g.takers += usize::from(waits);
            return match state.trouble(group, self.limit) {
                Some(error) => Err(self.fail_locked(state, error)),
                None => Ok(Err(rounds)),
            };
        }
        let (round, members) = match state.meet(group) {
            Ok(met) => met,
            Err(error) => return Err(self.fail_locked(state, error)),
        };
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
        let before = match self.post_for(group, [(rank, post)], true)? {
            Ok(round) => return Ok(round),
            Err(before) => before,
        };
        let begun = Instant::now();
        let mut searched = false;
        let mut guard = self.lock();
        loop {
            let state = &mut *guard;
            // It is there for as long as this rank's handle.
            let g = state.groups.get_mut(&group);
            let g = g.ok_or_else(|| left(group, rank))?;
            let (since, world_rank) = (g.since, g.members[rank]);
            // A round that took place counts, even if something failed right after it.
            if g.rounds > before {
                return g.take().ok_or_else(|| left(group, rank));
            }
            if let Some(cause) = &state.failure {
                return Err(cause.clone());
            }
            let mut trouble = state.trouble(group, self.limit);
            if trouble.is_none() && !searched && begun.elapsed() >= EVERY {
                // The last rank of a circle looks when all wait.
                searched = true;
                trouble = state.circle(world_rank);
            }
            if let Some(error) = trouble {
                return Err(self.fail_locked(state, error));
            }
            let left = self.limit.saturating_sub(since.elapsed());
            guard = self.sleep(guard, if searched { left } else { left.min(EVERY) });
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

    /// Looks after ranks that wait elsewhere, for who does so again and again: what the world has failed with.
    pub(crate) fn look(&self) -> Option<CommError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.failure.is_none()
            && let Some(error) = state.any_trouble(self.limit)
        {
            return Some(self.fail_locked(state, error));
        }
        state.failure.clone()
    }

    /// Waits until all ranks are gone, at most `time`.
    pub(crate) fn wait_for_departures(&self, time: Duration) {
        let begun = Instant::now();
        let mut guard = self.lock();
        while guard.gone < guard.departed.len() {
            let left = time.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return;
            }
            guard = self.sleep(guard, left);
        }
    }
}

/// Ranks that are processes bring more to a round than can travel.
fn too_much(rank: usize, bytes: usize, most: usize) -> CommError {
    let message = format!(
        "{bytes} bytes would travel at once between processes, all ranks' together, and {most} are the most; GPUs move them by NCCL, and ranks that are threads of one process by themselves"
    );
    CommError::Failed { rank, message }
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
        let hub = Hub::<Arc<[u8]>>::new(3, Duration::from_secs(20), usize::MAX);
        for round in 0..3 {
            thread::scope(|scope| {
                for rank in 0..3 {
                    let hub = &hub;
                    scope.spawn(move || {
                        let (call, payload) = (Call::named("a test"), [round; 1000].into());
                        let taken = hub.arrive(0, rank, Post { call, payload });
                        let taken = taken.expect("a round");
                        let same = |post: &Post<Arc<[u8]>>| *post.payload == [round; 1000];
                        assert!(taken.posts.iter().all(same));
                    });
                }
            });
            let state = hub.lock();
            let group = &state.groups[&WORLD];
            assert!(group.latest.is_none() && group.posts.iter().all(Option::is_none));
            assert_eq!(group.takers, 0);
        }
    }

    /// Of ranks that are all missing by one relay it may be the only one that is stuck.
    #[test]
    fn a_relay_that_brings_nothing_is_named() {
        const PART: usize = 1;
        let waits = "rank 3 waits in a test with ranks [0, 1, 2, 3]";
        // The ranks that called in the world, and those that called in a group of ranks 1 and 3 by their places in it: its round is looked at, or else
        // that of the world.
        for (world, part, expected) in [
            (
                vec![0, 1],
                vec![],
                vec!["rank 2 brings the calls of ranks [2, 3]"],
            ),
            (vec![0, 1, 3], vec![], vec![]),
            // Rank 2 is not in the group.
            (
                vec![],
                vec![0],
                vec!["rank 2 brings the calls of ranks [3]"],
            ),
            (vec![3], vec![0], vec![waits]),
            (vec![], vec![1], vec![]),
        ] {
            let limit = Duration::from_millis(10);
            let hub = Hub::<Arc<[u8]>>::new(4, limit, usize::MAX);
            [2, 3].iter().for_each(|&rank| hub.relayed(rank, 2));
            let members = [1, 3].into();
            hub.lock().groups.insert(PART, Group::new(members));
            let group = if part.is_empty() { WORLD } else { PART };
            for (group, ranks) in [(PART, part), (WORLD, world)] {
                if ranks.is_empty() {
                    continue;
                }
                let post = |rank| {
                    let (call, payload) = (Call::named("a test"), [].into());
                    (rank, Post { call, payload })
                };
                hub.post(group, ranks.into_iter().map(post))
                    .expect("no end yet");
            }
            thread::sleep(2 * limit);
            match hub.lock().trouble(group, limit) {
                Some(CommError::Timeout { elsewhere, .. }) => assert_eq!(elsewhere, expected),
                other => panic!("{other:?}"),
            }
        }
    }
}
