//! The meeting point of ranks that are threads of one process: posts, turns, failures.
//!
//! A collective is two meetings. In the first every rank posts what it brings; when the last one
//! comes the posts are compared. Then each rank reads the others' posts. In the second meeting
//! every rank says that it is done, so nobody changes a buffer that is still read.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lowp_kernels::Backend;

use super::post::{Op, Payload, Post, excerpts};
use crate::ShardError;

/// One group of ranks.
#[derive(Debug)]
pub(super) struct Group<B: Backend> {
    /// World ranks of the members, in group order.
    pub(super) members: Vec<usize>,
    posts: Vec<Option<Arc<Post<B>>>>,
    done: Vec<bool>,
    /// Number of first meetings that took place.
    ready: u64,
    /// Number of second meetings that took place.
    finished: u64,
    /// Per member: the group and rank that the latest split gave it.
    pub(super) seats: Vec<(usize, usize)>,
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
            seats: Vec::new(),
        }
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
        let mut wishes: Vec<(usize, usize, usize)> = Vec::new();
        for (member, post) in self.posts.iter().flatten().enumerate() {
            if let Payload::Seat { color, key } = post.payload {
                wishes.push((color, key, member));
            }
        }
        wishes.sort_unstable();
        self.seats = vec![(0, 0); self.members.len()];
        let mut made: Vec<Group<B>> = Vec::new();
        for block in wishes.chunk_by(|a, b| a.0 == b.0) {
            for (rank, &(_, _, member)) in block.iter().enumerate() {
                self.seats[member] = (base + made.len(), rank);
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
    pub(super) groups: Vec<Group<B>>,
}

impl<B: Backend> HubState<B> {
    /// Where `ranks` wait for others, in words.
    fn elsewhere(&self, ranks: &[usize]) -> Vec<String> {
        let mut found = Vec::new();
        for group in &self.groups {
            for (rank, post) in group.members.iter().zip(&group.posts) {
                if let (Some(post), true) = (post, ranks.contains(rank)) {
                    let (op, with) = (post.op.name(), &group.members);
                    found.push(format!("rank {rank} waits in {op} with ranks {with:?}"));
                }
            }
        }
        found
    }
}

/// The meeting point of one world. Group 0 is the world itself.
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

    /// The first meeting: posts, and returns the posts of all ranks.
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
        let turn = g.ready;
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
            self.wake.notify_all();
        } else {
            let came = |g: &Group<B>, r: usize| g.posts[r].is_some();
            guard = self.wait(guard, group, op, |g| g.ready > turn, came)?;
        }
        Ok(guard.groups[group]
            .posts
            .iter()
            .flatten()
            .cloned()
            .collect())
    }

    /// The second meeting: returns when all ranks are done with the posts.
    pub(super) fn finish(&self, group: usize, rank: usize, op: Op) -> Result<(), ShardError> {
        let mut guard = self.lock();
        let g = &mut guard.groups[group];
        let turn = g.finished;
        g.done[rank] = true;
        if g.done.iter().all(|&done| done) {
            g.posts.fill_with(|| None);
            g.finished += 1;
            self.wake.notify_all();
            return Ok(());
        }
        let came = |g: &Group<B>, r: usize| g.done[r];
        self.wait(guard, group, op, |g| g.finished > turn, came)
            .map(drop)
    }

    /// Waits until `complete`; `came` tells which ranks are not to blame.
    fn wait<'a>(
        &'a self,
        mut guard: MutexGuard<'a, HubState<B>>,
        group: usize,
        op: Op,
        complete: impl Fn(&Group<B>) -> bool,
        came: impl Fn(&Group<B>, usize) -> bool,
    ) -> Result<MutexGuard<'a, HubState<B>>, ShardError> {
        let started = Instant::now();
        loop {
            let state = &mut *guard;
            let g = &state.groups[group];
            // A meeting that took place counts, even if something failed right after it.
            if complete(g) {
                return Ok(guard);
            }
            if let Some(cause) = &state.failure {
                return Err(cause.clone());
            }
            let world_ranks = g.members.iter().copied().enumerate();
            let missing: Vec<usize> = world_ranks
                .filter(|&(r, _)| !came(g, r))
                .map(|(_, world)| world)
                .collect();
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
                    elsewhere: state.elsewhere(&missing),
                    missing,
                };
                return Err(self.fail_locked(state, error));
            };
            let woken = self.wake.wait_timeout(guard, left);
            guard = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
