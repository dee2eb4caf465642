//! [`Control`]: what ranks tell each other on the host.
//!
//! Small values, agreement, and failure. Ranks are threads of one process, or processes that speak TCP
//! ([`join`]). Device data goes through a [`Communicator`](crate::Communicator).

use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use self::call::{by_ranks, excerpts};
use crate::CommError;

pub(crate) mod call;
pub(crate) mod hub;
mod launch;
pub(crate) mod local;
mod message;
mod tcp;

pub use launch::Launch;
pub use local::threads;
pub use message::without_backtraces;
pub use tcp::join;

/// Most bytes that the ranks of a call can give each other, all together, where they are processes.
pub const MAX_ALL_GATHER: usize = 1 << 30;

/// One rank of a group of ranks, on the host. The calls below are collective: all ranks of the group make
/// the same ones in the same order. A rank makes one call at a time, whatever group it is in.
///
/// # Errors
/// A rank that fails, departs, calls something else, or does not come in time is an error on
/// every rank, never a hang; every later call fails at once with the same cause.
pub trait Control: Send + Sync + Debug {
    /// This rank in the group.
    fn rank(&self) -> usize;

    /// The ranks of the world that form the group, in its order.
    fn members(&self) -> &[usize];

    /// Gives `bytes` to all ranks of the group, and returns those of all, in the group's order: at most [`MAX_ALL_GATHER`]. `tag` says
    /// what they are, the same on every rank.
    ///
    /// # Errors
    /// As the trait says.
    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError>;

    /// Splits the group: ranks that give the same `color` form a new group, ordered by `key`.
    ///
    /// # Errors
    /// As the trait says.
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError>;

    /// Ends the world with `cause`, unless it has ended, and returns what it ended with: wakes all ranks,
    /// whatever group they wait in. Not collective. In a world of one rank nobody waits, and the rank may try
    /// again.
    fn fail(&self, cause: CommError) -> CommError;

    /// What the world ended with. Not collective.
    fn failure(&self) -> Option<CommError>;
}

impl dyn Control + '_ {
    /// Number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.members().len()
    }

    /// This rank in the world.
    pub fn world_rank(&self) -> usize {
        self.members()[self.rank()]
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// As the trait says.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.all_gather("barrier", Vec::new()).map(drop)
    }

    /// Checks that all ranks give the same `description` of `what`. Only a digest of it travels while they
    /// do.
    ///
    /// # Errors
    /// As the trait says; [`CommError::Mismatch`] on every rank if descriptions differ.
    pub fn all_equal(&self, what: &str, description: &str) -> Result<(), CommError> {
        let mut digest = DefaultHasher::new();
        description.hash(&mut digest);
        let (digest, ranks) = (digest.finish(), self.world_size());
        self.all_equal_in_groups(what, digest, ranks, || description.to_owned())
    }

    /// Checks that every `ranks` ranks that follow each other give the same `digest` of `what`. Where they do not, `text` of them says
    /// what they have.
    ///
    /// # Errors
    /// As the trait says; [`CommError::Mismatch`] on every rank where digests differ, with the texts.
    pub fn all_equal_in_groups(
        &self,
        what: &str,
        digest: u64,
        ranks: usize,
        text: impl FnOnce() -> String,
    ) -> Result<(), CommError> {
        let tag = format!("agree on {what}");
        let digests = self.all_gather(&tag, digest.to_le_bytes().to_vec())?;
        let differ = |digests: &[Vec<u8>]| digests.iter().any(|digest| *digest != digests[0]);
        let ranks = ranks.max(1);
        let Some(first) = digests.chunks(ranks).position(differ) else {
            return Ok(());
        };
        let texts = self.all_gather(&tag, text().into_bytes())?;
        let of = ranks * first..texts.len().min(ranks * (first + 1));
        let texts: Vec<_> = texts[of.clone()]
            .iter()
            .map(|t| String::from_utf8_lossy(t))
            .collect();
        let texts: Vec<&str> = texts.iter().map(AsRef::as_ref).collect();
        Err(self.fail(CommError::Mismatch {
            what: what.to_owned(),
            descriptions: by_ranks(excerpts(&texts), &self.members()[of]),
        }))
    }

    /// The sum of every value over the ranks, in rank order: the same on each.
    ///
    /// # Errors
    /// As the trait says.
    pub fn sum(&self, values: &mut [f64]) -> Result<(), CommError> {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let all = self.all_gather(&format!("sum of {} values", values.len()), bytes)?;
        for (rank, bytes) in all.iter().enumerate() {
            let (theirs, _) = bytes.as_chunks::<8>();
            if theirs.len() != values.len() {
                let message = format!(
                    "it gave {} values of {} to a sum",
                    theirs.len(),
                    values.len()
                );
                let rank = self.members()[rank];
                return Err(self.fail(CommError::Failed { rank, message }));
            }
            for (sum, &x) in values.iter_mut().zip(theirs) {
                let x = f64::from_le_bytes(x);
                *sum = if rank == 0 { x } else { *sum + x };
            }
        }
        Ok(())
    }

    /// The bytes that rank 0 of the group gives.
    ///
    /// # Errors
    /// As the trait says.
    pub fn broadcast(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<u8>, CommError> {
        let bytes = if self.rank() == 0 { bytes } else { Vec::new() };
        let mut all = self.all_gather(tag, bytes)?;
        Ok(std::mem::take(&mut all[0]))
    }

    /// Says that this rank failed: ends the world with [`CommError::Failed`] ([`Control::fail`]). A backtrace in `message` stays here
    /// ([`without_backtraces`]).
    pub fn abort(&self, message: &str) {
        let (rank, message) = (self.world_rank(), without_backtraces(message));
        self.fail(CommError::Failed { rank, message });
    }
}

/// The place of a rank in the group that a split makes of the ranks that gave its color: the members by
/// world rank, in the order of their keys. `requests` are `color, key` of every rank of `members`.
fn place(requests: &[[usize; 2]], members: &[usize], rank: usize) -> (Arc<[usize]>, usize) {
    let color = requests[rank][0];
    let mut same: Vec<usize> = (0..members.len()).collect();
    same.retain(|&other| requests[other][0] == color);
    same.sort_by_key(|&other| requests[other][1]);
    let at = same.iter().position(|&other| other == rank);
    let members = same.iter().map(|&other| members[other]).collect();
    // The rank gave the color itself.
    (members, at.unwrap_or_default())
}

/// What a rank asks of a split, as it travels.
fn request_to_bytes(color: usize, key: usize) -> Vec<u8> {
    [color, key]
        .iter()
        .flat_map(|&n| (n as u64).to_le_bytes())
        .collect()
}

fn requests_from_bytes(all: &[Vec<u8>]) -> Vec<[usize; 2]> {
    let number = |bytes: &[u8], at: usize| -> usize {
        let (words, _) = bytes.as_chunks::<8>();
        words
            .get(at)
            .map_or(0, |&word| u64::from_le_bytes(word) as usize)
    };
    all.iter()
        .map(|bytes| [number(bytes, 0), number(bytes, 1)])
        .collect()
}
