//! [`Control`]: what ranks tell each other on the host.
//!
//! Small values, agreement, and failure. Ranks are threads of one process, or processes that speak TCP
//! ([`join`]). Device data goes through a [`Communicator`](crate::Communicator).

use std::fmt::{Debug, Display};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use self::call::{by_ranks, excerpts};
use crate::CommError;

pub(crate) mod call;
pub(crate) mod hub;
mod launch;
pub(crate) mod local;
mod message;
mod outcome;
pub(crate) mod post;
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

    /// The bytes that rank 0 of the group gives, on every rank.
    ///
    /// # Errors
    /// As the trait says.
    fn broadcast(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<u8>, CommError> {
        let bytes = if self.rank() == 0 { bytes } else { Vec::new() };
        let mut all = self.all_gather(tag, bytes)?;
        Ok(std::mem::take(&mut all[0]))
    }

    /// Gives `bytes` to rank 0 of the group, which gets those of all, in the group's order.
    ///
    /// # Errors
    /// As the trait says.
    fn gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, CommError> {
        let all = self.all_gather(tag, bytes)?;
        Ok((self.rank() == 0).then_some(all))
    }

    /// `None` where every `ranks` ranks that follow each other give the same `digest`, and the digests of all ranks where
    /// they do not.
    ///
    /// # Errors
    /// As the trait says.
    fn differing(
        &self,
        tag: &str,
        digest: u64,
        ranks: usize,
    ) -> Result<Option<Vec<u64>>, CommError> {
        let all = digests(&self.all_gather(tag, digest.to_le_bytes().to_vec())?);
        let same = |set: &[u64]| set.iter().all(|digest| *digest == set[0]);
        Ok((!all.chunks(ranks.max(1)).all(same)).then_some(all))
    }

    /// The sum of every value over the ranks, in rank order: the same on each.
    ///
    /// # Errors
    /// As the trait says.
    fn sum(&self, values: &mut [f64]) -> Result<(), CommError> {
        let all = self.all_gather(&sum_tag(values), to_bytes(values))?;
        let sum = sum_in_order(all.iter().map(Vec::as_slice), self.members());
        from_bytes(&sum.map_err(|error| self.fail(error))?, values);
        Ok(())
    }

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

    /// The first rank that gives another `code` than 0, which says how it failed, and that code. Collective.
    ///
    /// # Errors
    /// As the trait says.
    pub fn first_failed(&self, what: &str, code: u8) -> Result<Option<(usize, u8)>, CommError> {
        let codes = self.all_gather(what, vec![code])?;
        let code = |code: &Vec<u8>| code.first().copied().filter(|code| *code != 0);
        let mut failed = codes.iter().zip(self.members());
        Ok(failed.find_map(|(own, &rank)| Some((rank, code(own)?))))
    }

    /// The first rank that gives an error, as it counts in the world, and its text; none where no rank does, and then one number of each
    /// travels. Collective.
    ///
    /// # Errors
    /// As the trait says.
    pub fn first_error(
        &self,
        what: &str,
        own: Option<&dyn Display>,
    ) -> Result<Option<(usize, String)>, CommError> {
        let mut errors = [f64::from(own.is_some())];
        self.sum(&mut errors)?;
        if errors == [0.0] {
            return Ok(None);
        }
        // An error without a text is one, too.
        let text = own.map_or_else(Vec::new, |error| format!("{error}\n").into_bytes());
        let all = self.all_gather(what, text)?;
        let mut given = all.iter().zip(self.members());
        let first = given.find(|(text, _)| !text.is_empty());
        Ok(first.map(|(text, &rank)| {
            let text = text.strip_suffix(b"\n").unwrap_or(text);
            (rank, String::from_utf8_lossy(text).into_owned())
        }))
    }

    /// Checks that all ranks give the same `description` of `what`. Only a digest of it travels while they
    /// do.
    ///
    /// # Errors
    /// As the trait says; [`CommError::Mismatch`] on every rank if descriptions differ.
    pub fn all_equal(&self, what: &str, description: &str) -> Result<(), CommError> {
        let (digest, ranks) = (digest_of(description), self.world_size());
        self.all_equal_in_groups(what, digest, ranks, || description.to_owned())
    }

    /// `all_equal` of several descriptions of one kind, each after its name, in one round while they are the same. Where they are
    /// not, the error is about the first that differs, and has the name that rank 0 gave it.
    ///
    /// # Errors
    /// As there.
    pub fn each_equal(&self, what: &str, descriptions: &[[String; 2]]) -> Result<(), CommError> {
        let tag = format!("agree on {what}");
        let digests = descriptions.iter().map(|[_, text]| digest_of(text));
        let digests: Vec<u64> = digests.collect();
        let same = self.differing(&tag, digest_of(&digests), self.world_size())?;
        if same.is_none() {
            return Ok(());
        }
        let own = digests.iter().flat_map(|digest| digest.to_le_bytes());
        let all = self.all_gather(&tag, own.collect())?;
        let all: Vec<_> = all.iter().map(|bytes| bytes.as_chunks::<8>().0).collect();
        let differ = |at: usize| all.iter().any(|theirs| theirs.get(at) != all[0].get(at));
        let most = all.iter().map(|theirs| theirs.len()).max().unwrap_or(0);
        let first = (0..most).find(|&at| differ(at)).unwrap_or(0);
        let nothing = ["one more", "nothing"].map(str::to_owned);
        let [name, text] = descriptions.get(first).unwrap_or(&nothing);
        let name = self.broadcast(&tag, name.clone().into_bytes())?;
        let name = String::from_utf8_lossy(&name);
        self.all_equal(&format!("{what} of {name}"), text)
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
        /// Most texts that travel: one of each set of ranks that have the same.
        const MOST: usize = 8;
        let tag = format!("agree on {what}");
        let Some(digests) = self.differing(&tag, digest, ranks)? else {
            return Ok(());
        };
        let ranks = ranks.max(1);
        let differ = |set: &[u64]| set.iter().any(|digest| *digest != set[0]);
        let from = ranks * digests.chunks(ranks).position(differ).unwrap_or(0);
        let of = from..digests.len().min(from.saturating_add(ranks));
        let mut first: Vec<(u64, usize)> = Vec::new();
        for (rank, &digest) in of.clone().zip(&digests[of.clone()]) {
            if first.len() < MOST && first.iter().all(|known| known.0 != digest) {
                first.push((digest, rank));
            }
        }
        let own = first.iter().any(|&(_, rank)| rank == self.rank());
        let own = if own { text() } else { String::new() };
        let texts = self.all_gather(&tag, own.into_bytes())?;
        let texts = first
            .iter()
            .map(|&(_, rank)| String::from_utf8_lossy(&texts[rank]));
        let texts: Vec<_> = texts.collect();
        let texts = excerpts(&texts.iter().map(AsRef::as_ref).collect::<Vec<_>>());
        let text = |digest: &u64| {
            let known = first.iter().position(|known| known.0 == *digest);
            known.map_or_else(|| format!("digest {digest:016x}"), |at| texts[at].clone())
        };
        let texts = digests[of.clone()].iter().map(text).collect();
        Err(self.fail(CommError::Mismatch {
            what: what.to_owned(),
            descriptions: by_ranks(texts, &self.members()[of]),
        }))
    }

    /// Says that this rank failed: ends the world with [`CommError::Failed`] ([`Control::fail`]). A backtrace in `message` stays here
    /// ([`without_backtraces`]).
    pub fn abort(&self, message: &str) {
        let (rank, message) = (self.world_rank(), without_backtraces(message));
        self.fail(CommError::Failed { rank, message });
    }
}

fn digest_of(description: &(impl Hash + ?Sized)) -> u64 {
    let mut digest = DefaultHasher::new();
    description.hash(&mut digest);
    digest.finish()
}

/// What ranks call the sum of `values`: sums of other lengths are other calls.
fn sum_tag(values: &[f64]) -> String {
    format!("sum of {} values", values.len())
}

fn to_bytes(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn from_bytes(bytes: &[u8], values: &mut [f64]) {
    let (words, _) = bytes.as_chunks::<8>();
    for (value, &word) in values.iter_mut().zip(words) {
        *value = f64::from_le_bytes(word);
    }
}

/// The sum of the f64 values that the ranks `members` brought, in their order.
fn sum_in_order<'a>(
    all: impl Iterator<Item = &'a [u8]>,
    members: &[usize],
) -> Result<Vec<u8>, CommError> {
    let mut sum: Option<Vec<f64>> = None;
    for (bytes, &rank) in all.zip(members) {
        let (words, _) = bytes.as_chunks::<8>();
        let theirs = words.iter().map(|&word| f64::from_le_bytes(word));
        let Some(sum) = &mut sum else {
            sum = Some(theirs.collect());
            continue;
        };
        if words.len() != sum.len() {
            let message = format!("it gave {} values of {} to a sum", words.len(), sum.len());
            return Err(CommError::Failed { rank, message });
        }
        sum.iter_mut().zip(theirs).for_each(|(sum, x)| *sum += x);
    }
    Ok(to_bytes(&sum.unwrap_or_default()))
}

/// The digests that ranks gave.
fn digests(all: &[Vec<u8>]) -> Vec<u64> {
    let digest = |bytes: &Vec<u8>| {
        let (words, _) = bytes.as_chunks::<8>();
        words.first().map_or(0, |&word| u64::from_le_bytes(word))
    };
    all.iter().map(digest).collect()
}
