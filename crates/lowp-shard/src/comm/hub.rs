//! The rendezvous point of ranks that are threads of one process: posts, rounds, failures.
//!
//! A collective is two rendezvous. In the first every rank posts what it brings; when the last one
//! comes the posts are compared. Then each rank reads the others' posts. In the second rendezvous
//! every rank says that it is done, so nobody changes a buffer that is still read.
//!
//! A rank makes one call at a time, so one that waits will come to no other rendezvous. Ranks that
//! wait for each other in a circle, each in another group, are found when the last of them begins
//! to wait.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lowp_kernels::Backend;

use super::post::{Op, Payload, Post, excerpts};
use crate::ShardError;

/// The two rendezvous of a collective.
#[derive(Clone, Copy, Debug)]
enum Rendezvous {
    Posts,
    Done,
}

/// Where a rank waits.
#[derive(Clone, Copy, Debug)]
struct Wait {
    group: usize,
    /// The rank in the group.
    rank: usize,
    rendezvous: Rendezvous,
}

/// One group of ranks.
#[derive(Debug)]
pub(super) struct Group<B: Backend> {
    /// World ranks of the members, in group order.
    pub(super) members: Vec<usize>,
    posts: Vec<Option<Arc<Post<B>>>>,
    done: Vec<bool>,
    /// Collectives whose posts are all there.
    ready: u64,
    /// Collectives that all ranks are done with.
    finished: u64,
    /// Per member: the group and rank that the latest split gave it.
    pub(super) assigned: Vec<(usize, usize)>,
}

impl<B: Backend> Group<B> {
    fn new(members: Vec<usize>) -> Self {
        let n = members.len();
        Self {
            members,
            posts: (0..n).map(|_| None).collect(),
            done: vec![false; n],
            ready: 0,
            finished: 0,
            assigned: Vec::new(),
        }
    }

    /// How often `rendezvous` took place.
    fn round(&self, rendezvous: Rendezvous) -> u64 {
        match rendezvous {
            Rendezvous::Posts => self.ready,
            Rendezvous::Done => self.finished,
        }
    }

    /// The world ranks that `rendezvous` still needs.
    fn missing(&self, rendezvous: Rendezvous) -> impl Iterator<Item = usize> {
        let arrived = move |r: usize| match rendezvous {
            Rendezvous::Posts => self.posts[r].is_some(),
            Rendezvous::Done => self.done[r],
        };
        let members = self.members.iter().copied().enumerate();
        members
            .filter(move |&(r, _)| !arrived(r))
            .map(|(_, world)| world)
    }

    /// Compares the posts of all ranks.
    fn verify(&self) -> Result<(), ShardError> {
        let posts: Vec<&Post<B>> = self.posts.iter().flatten().map(|p| &**p).collect();
        let first = posts[0];
        let same_call =
            |p: &&Post<B>| p.op == first.op && p.items == first.items && p.lengths == first.lengths;
        if !posts.iter().all(same_call) {
            let near = posts.iter().find_map(|p| {
                let differs = |(a, b): (&usize, &usize)| a != b;
                p.lengths.iter().zip(&first.lengths).position(differs)
            });
            let near = near.unwrap_or(0);
            let calls = posts.iter().map(|p| p.describe(near)).collect();
            return Err(self.mismatch("the collective call", calls));
        }
        let texts: Vec<(&String, &String)> = posts
            .iter()
            .filter_map(|p| match &p.payload {
                Payload::Text { what, description } => Some((what, description)),
                _ => None,
            })
            .collect();
        if texts.iter().any(|t| t.0 != texts[0].0) {
            let calls = posts.iter().map(|p| p.describe(0)).collect();
            return Err(self.mismatch("the collective call", calls));
        }
        if texts.iter().any(|t| t.1 != texts[0].1) {
            let excerpts = excerpts(&texts.iter().map(|t| t.1.as_str()).collect::<Vec<_>>());
            return Err(self.mismatch(texts[0].0, excerpts));
        }
        Ok(())
    }

    /// Joins ranks that have the same text.
    fn mismatch(&self, what: &str, texts: Vec<String>) -> ShardError {
        let mut sets: Vec<(String, Vec<usize>)> = Vec::new();
        for (text, &rank) in texts.into_iter().zip(&self.members) {
            match sets.iter_mut().find(|set| set.0 == text) {
                Some(set) => set.1.push(rank),
                None => sets.push((text, vec![rank])),
            }
        }
        let descriptions = sets
            .into_iter()
            .map(|(text, ranks)| format!("ranks {ranks:?}: {text}"))
            .collect();
        ShardError::Mismatch {
            what: what.to_owned(),
            descriptions,
        }
    }

    /// The groups that a split makes, and every member's place; `base` is the next free group.
    fn split(&mut self, base: usize) -> Vec<Group<B>> {
        let mut requests: Vec<(usize, usize, usize)> = Vec::new();
        for (member, post) in self.posts.iter().flatten().enumerate() {
            if let Payload::Split { color, key } = post.payload {
                requests.push((color, key, member));
            }
        }
        requests.sort_unstable();
        self.assigned = vec![(0, 0); self.members.len()];
        let mut made: Vec<Group<B>> = Vec::new();
        for block in requests.chunk_by(|a, b| a.0 == b.0) {
            for (rank, &(_, _, member)) in block.iter().enumerate() {
                self.assigned[member] = (base + made.len(), rank);
            }
            made.push(Group::new(
                block.iter().map(|w| self.members[w.2]).collect(),
            ));
        }
        made
    }
}

/// Everything that ranks share, under one lock.
#[derive(Debug)]
pub(super) struct HubState<B: Backend> {
    failure: Option<ShardError>,
    /// Per world rank: gone, and whether in a panic.
    departed: Vec<Option<bool>>,
    /// Per world rank: the rendezvous that it waits for.
    waits: Vec<Option<Wait>>,
    pub(super) groups: Vec<Group<B>>,
}

impl<B: Backend> HubState<B> {
    /// Where those of `ranks` that wait do so, in words.
    fn places(&self, ranks: impl IntoIterator<Item = usize>) -> Vec<String> {
        let place = |rank: usize| {
            let wait = self.waits[rank]?;
            let group = &self.groups[wait.group];
            let call = group.posts[wait.rank].as_ref()?.describe(0);
            let with = &group.members;
            Some(format!("rank {rank} waits in {call} with ranks {with:?}"))
        };
        ranks.into_iter().filter_map(place).collect()
    }

    /// Nobody waits for this rendezvous of `group` any more.
    fn release(&mut self, group: usize) {
        for &rank in &self.groups[group].members {
            self.waits[rank] = None;
        }
    }

    /// The shortest circle of waits through `rank`, which begins to wait: it needs a rank that
    /// waits elsewhere for one that ... needs `rank`. A rendezvous needs all members, so no rendezvous of
    /// a circle can take place.
    fn circle(&self, rank: usize) -> Option<ShardError> {
        // Ranks that wait, nearest first, each with the place of the one that needs it.
        let mut reached: Vec<(usize, usize)> = Vec::new();
        let mut at = 0;
        let mut wait = self.waits[rank]?;
        loop {
            for needed in self.groups[wait.group].missing(wait.rendezvous) {
                if needed == rank {
                    let mut ranks = vec![rank];
                    // `at` counts from 1 in `reached`; 0 is `rank` itself.
                    while at > 0 {
                        let (waiting, by) = reached[at - 1];
                        ranks.push(waiting);
                        at = by;
                    }
                    ranks.sort_unstable();
                    return Some(ShardError::Mismatch {
                        what: "the next collective call".to_owned(),
                        descriptions: self.places(ranks),
                    });
                }
                if self.waits[needed].is_some() && !reached.iter().any(|r| r.0 == needed) {
                    reached.push((needed, at));
                }
            }
            wait = self.waits[reached.get(at)?.0]?;
            at += 1;
        }
    }
}

/// The rendezvous point of one world. Group 0 is the world itself.
#[derive(Debug)]
pub(super) struct Hub<B: Backend> {
    timeout: Duration,
    state: Mutex<HubState<B>>,
    wake: Condvar,
}

impl<B: Backend> Hub<B> {
    pub(super) fn new(world: usize, timeout: Duration) -> Self {
        let state = HubState {
            failure: None,
            departed: vec![None; world],
            waits: vec![None; world],
            groups: vec![Group::new((0..world).collect())],
        };
        Self {
            timeout,
            state: Mutex::new(state),
            wake: Condvar::new(),
        }
    }

    /// The state. Nothing panics while it is locked, so a poisoned lock cannot hold half a change.
    pub(super) fn lock(&self) -> MutexGuard<'_, HubState<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the world is one rank, for which nobody can wait.
    pub(super) fn is_solo(&self) -> bool {
        self.lock().departed.len() == 1
    }

    /// The cause of failure.
    pub(super) fn failure(&self) -> Option<ShardError> {
        self.lock().failure.clone()
    }

    /// Makes `error` the cause of failure, unless there is one, and wakes everybody. Returns the
    /// cause.
    fn fail_locked(&self, state: &mut HubState<B>, error: ShardError) -> ShardError {
        let cause = state.failure.get_or_insert(error).clone();
        self.wake.notify_all();
        cause
    }

    /// See [`Hub::fail_locked`].
    pub(super) fn fail(&self, error: ShardError) -> ShardError {
        self.fail_locked(&mut self.lock(), error)
    }

    /// World rank `rank` is gone.
    pub(super) fn depart(&self, rank: usize, panicked: bool) {
        self.lock().departed[rank] = Some(panicked);
        self.wake.notify_all();
    }

    /// The first rendezvous: posts, and returns the posts of all ranks.
    pub(super) fn arrive(
        &self,
        group: usize,
        rank: usize,
        post: Post<B>,
    ) -> Result<Vec<Arc<Post<B>>>, ShardError> {
        let op = post.op;
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(cause) = &state.failure {
            return Err(cause.clone());
        }
        let base = state.groups.len();
        let g = &mut state.groups[group];
        g.posts[rank] = Some(Arc::new(post));
        if g.posts.iter().all(Option::is_some) {
            if let Err(error) = g.verify() {
                return Err(self.fail_locked(state, error));
            }
            g.done.fill(false);
            g.ready += 1;
            if op == Op::Split {
                let made = g.split(base);
                state.groups.extend(made);
            }
            state.release(group);
            self.wake.notify_all();
        } else {
            let rendezvous = Rendezvous::Posts;
            let wait = Wait {
                group,
                rank,
                rendezvous,
            };
            guard = self.wait(guard, wait, op)?;
        }
        Ok(guard.groups[group]
            .posts
            .iter()
            .flatten()
            .cloned()
            .collect())
    }

    /// The second rendezvous: returns when all ranks are done with the posts.
    pub(super) fn finish(&self, group: usize, rank: usize, op: Op) -> Result<(), ShardError> {
        let mut guard = self.lock();
        let g = &mut guard.groups[group];
        g.done[rank] = true;
        if g.done.iter().all(|&done| done) {
            g.posts.fill_with(|| None);
            g.finished += 1;
            guard.release(group);
            self.wake.notify_all();
            return Ok(());
        }
        let rendezvous = Rendezvous::Done;
        let wait = Wait {
            group,
            rank,
            rendezvous,
        };
        self.wait(guard, wait, op).map(drop)
    }

    /// Waits for the next rendezvous of the kind that `wait` names.
    fn wait<'a>(
        &'a self,
        mut guard: MutexGuard<'a, HubState<B>>,
        wait: Wait,
        op: Op,
    ) -> Result<MutexGuard<'a, HubState<B>>, ShardError> {
        let started = Instant::now();
        let Wait {
            group, rendezvous, ..
        } = wait;
        let state = &mut *guard;
        let g = &state.groups[group];
        let (round, world_rank) = (g.round(rendezvous), g.members[wait.rank]);
        state.waits[world_rank] = Some(wait);
        if let Some(error) = state.circle(world_rank) {
            return Err(self.fail_locked(state, error));
        }
        loop {
            let state = &mut *guard;
            let g = &state.groups[group];
            // A rendezvous that took place counts, even if something failed right after it.
            if g.round(rendezvous) > round {
                return Ok(guard);
            }
            if let Some(cause) = &state.failure {
                return Err(cause.clone());
            }
            let missing: Vec<usize> = g.missing(rendezvous).collect();
            let gone = missing
                .iter()
                .find_map(|&r| state.departed[r].map(|p| (r, p)));
            let op = op.name();
            if let Some((rank, panicked)) = gone {
                return Err(self.fail_locked(state, ShardError::Departed { op, rank, panicked }));
            }
            let waited = started.elapsed();
            let Some(left) = self
                .timeout
                .checked_sub(waited)
                .filter(|left| !left.is_zero())
            else {
                let error = ShardError::Timeout {
                    op,
                    waited_s: waited.as_secs_f64(),
                    elsewhere: state.places(missing.iter().copied()),
                    missing,
                };
                return Err(self.fail_locked(state, error));
            };
            let woken = self.wake.wait_timeout(guard, left);
            guard = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
