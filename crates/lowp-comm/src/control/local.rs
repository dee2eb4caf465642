//! [`LocalControl`]: ranks as threads of one process.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Control;
use super::call::{Call, Kind};
use super::hub::{Hub, Round};
use super::outcome::{Outcome, request};
use super::post::{Payload, Post};
use crate::CommError;
use crate::error::Departure;

impl Payload for Arc<[u8]> {
    fn of_bytes(bytes: Vec<u8>) -> Self {
        bytes.into()
    }

    fn bytes(&self) -> &[u8] {
        self
    }
}

/// A rank's place in the world, shared by its groups.
#[derive(Debug)]
struct WorldRank<P: Payload> {
    hub: Arc<Hub<P>>,
    rank: usize,
    /// Locked for the length of a call in any group: the hub takes it that a rank which waits makes
    /// no other call.
    turn: Mutex<()>,
}

impl<P: Payload> Drop for WorldRank<P> {
    fn drop(&mut self) {
        let how = if std::thread::panicking() {
            Departure::Panicked
        } else {
            Departure::Dropped
        };
        self.hub.depart(self.rank, how);
    }
}

/// One rank of a group that meets in a hub of this process. A rank whose last handle is dropped while others
/// wait for it is an error on those.
#[derive(Debug)]
pub(crate) struct LocalControl<P: Payload> {
    world: Arc<WorldRank<P>>,
    group: usize,
    rank: usize,
    members: Arc<[usize]>,
}

impl<P: Payload> Drop for LocalControl<P> {
    fn drop(&mut self) {
        self.world.hub.close(self.group, self.rank);
    }
}

/// The ranks of a world of `n` threads, in rank order. Every wait ends after `limit`.
pub fn threads(n: usize, limit: Duration) -> Vec<Arc<dyn Control>> {
    let world = LocalControl::<Arc<[u8]>>::world(n, limit).into_iter();
    world
        .map(|rank| Arc::new(rank) as Arc<dyn Control>)
        .collect()
}

impl<P: Payload> LocalControl<P> {
    /// The ranks of a world, in rank order.
    pub(crate) fn world(n: usize, limit: Duration) -> Vec<Self> {
        let hub = Arc::new(Hub::new(n, limit, usize::MAX));
        (0..n).map(|rank| Self::of_hub(&hub, rank)).collect()
    }

    /// World rank `rank` of `hub`: to be made once.
    pub(crate) fn of_hub(hub: &Arc<Hub<P>>, rank: usize) -> Self {
        let world = WorldRank {
            hub: Arc::clone(hub),
            rank,
            turn: Mutex::default(),
        };
        Self::of_group(Arc::new(world), 0, rank, hub.members(0))
    }

    fn of_group(
        world: Arc<WorldRank<P>>,
        group: usize,
        rank: usize,
        members: Arc<[usize]>,
    ) -> Self {
        Self {
            world,
            group,
            rank,
            members,
        }
    }

    /// Whether the world is one rank, for which nobody can wait.
    pub(crate) fn is_solo(&self) -> bool {
        self.world.hub.is_solo()
    }

    /// Begins a call: until the guard is dropped no other thread of the rank makes one.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        let turn = self.world.turn.lock();
        turn.unwrap_or_else(PoisonError::into_inner)
    }

    /// One round, within a turn.
    pub(crate) fn meet(&self, call: Call, payload: P) -> Result<Round<P>, CommError> {
        self.world
            .hub
            .arrive(self.group, self.rank, Post { call, payload })
    }

    /// One round of bytes.
    fn call(&self, kind: Kind, tag: &str, bytes: Vec<u8>) -> Result<Round<P>, CommError> {
        let _turn = self.turn();
        self.meet(Call::of_kind(kind, tag), P::of_bytes(bytes))
    }

    /// See [`Control::split`].
    pub(crate) fn split_local(&self, color: usize, key: usize) -> Result<Self, CommError> {
        let round = self.call(Kind::Split, "split", request(color, key))?;
        let Outcome::Split(places) = &round.outcome else {
            return Err(self.unasked("split"));
        };
        let place = places[self.rank].clone();
        Ok(Self::of_group(
            Arc::clone(&self.world),
            place.group,
            place.rank,
            place.members,
        ))
    }

    /// Calls of a round are equal, so what comes of them is what was asked for.
    fn unasked(&self, tag: &str) -> CommError {
        let message = format!("{tag} brought what was not asked for");
        self.fail(CommError::Failed {
            rank: self.members[self.rank],
            message,
        })
    }
}

/// What all ranks brought.
fn all<P: Payload>(round: &Round<P>) -> Vec<Vec<u8>> {
    let bytes = |post: &Post<P>| post.payload.bytes().to_vec();
    round.posts.iter().map(bytes).collect()
}

impl<P: Payload> Control for LocalControl<P> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(all(&self.call(Kind::AllGather, tag, bytes)?))
    }

    fn broadcast(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<u8>, CommError> {
        let bytes = if self.rank == 0 { bytes } else { Vec::new() };
        let round = self.call(Kind::Broadcast, tag, bytes)?;
        Ok(round.posts[0].payload.bytes().to_vec())
    }

    fn gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, CommError> {
        let round = self.call(Kind::Gather, tag, bytes)?;
        Ok((self.rank == 0).then(|| all(&round)))
    }

    fn differing(
        &self,
        tag: &str,
        digest: u64,
        ranks: usize,
    ) -> Result<Option<Vec<u64>>, CommError> {
        let round = self.call(Kind::Equal { ranks }, tag, digest.to_le_bytes().to_vec())?;
        Ok(match round.outcome {
            Outcome::Equal(true) => None,
            _ => Some(super::digests(&all(&round))),
        })
    }

    fn sum(&self, values: &mut [f64]) -> Result<(), CommError> {
        let tag = super::sum_tag(values);
        let round = self.call(Kind::Sum, &tag, super::to_bytes(values))?;
        match &round.outcome {
            Outcome::Sum(sum) => super::from_bytes(sum, values),
            _ => return Err(self.unasked(&tag)),
        }
        Ok(())
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        Ok(Arc::new(self.split_local(color, key)?))
    }

    fn fail(&self, cause: CommError) -> CommError {
        self.world.hub.fail(cause)
    }

    fn failure(&self) -> Option<CommError> {
        self.world.hub.failure()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks that split again and again leave nothing behind, whoever drops its handle first.
    #[test]
    fn a_group_ends_with_its_last_handle() {
        let world = LocalControl::<Arc<[u8]>>::world(3, Duration::from_secs(20));
        let hub = Arc::clone(&world[0].world.hub);
        std::thread::scope(|scope| {
            for control in &world {
                scope.spawn(move || {
                    let mut kept = Vec::new();
                    for round in 0..40 {
                        let color = usize::from(control.rank == round % 3);
                        let group = control.split_local(color, 0).expect("a group");
                        let within = group.split_local(0, 0).expect("a group of it");
                        drop(group);
                        within.all_gather("it", Vec::new()).expect("a round");
                        if round % 2 == control.rank % 2 {
                            kept.push(within);
                        }
                    }
                });
            }
        });
        assert_eq!(hub.groups(), 1);
    }
}
