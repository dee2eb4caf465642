//! What processes send each other: frames of a length, a message, and the bytes that belong to it.

use std::io;
#[cfg(test)]
use std::io::Read;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::CommError;
use crate::control::MAX_ALL_GATHER;
use crate::control::call::Call;
use crate::error::Departure;

/// What a connection begins with, whatever the version of the rest.
pub(super) const GREETING: [u8; 8] = *b"lowp\0\x04\0\0";

/// The longest frame before a rank is known, and after: what a call brings, with the lengths of its parts and the call.
pub(super) const SHORT: usize = 1 << 12;
pub(super) const LONG: usize = MAX_ALL_GATHER + (1 << 24);

/// Bytes of the length that a frame begins with.
pub(super) const LENGTH: usize = 4;

/// Who connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) build: String,
    pub(super) run: String,
    pub(super) restart: u64,
    pub(super) local_rank: usize,
    /// Where its machine reaches it as a relay; 0 if it can be none.
    pub(super) port: u16,
}

/// What a rank tells rank 0, itself or by its relay.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// The part of these ranks of a group in its round. After it comes what each rank brings, in these lengths; one length is of what all bring.
    Post {
        group: usize,
        ranks: Vec<usize>,
        call: Call,
        lens: Vec<usize>,
    },
    /// This rank of the group holds it no more.
    Close { group: usize, rank: usize },
    /// As [`CommError::told`] makes it.
    Fail(CommError),
    /// This rank of the world is gone.
    Leave(usize, Departure),
    /// Of a relay: this rank of the world came to it.
    Serves(usize),
    /// Of a rank that does not reach its relay: it stays with rank 0.
    Stays,
}

/// What rank 0 tells a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// All ranks are there.
    Ready,
    /// The rank was started later than this rank 0, which ends: another one will listen.
    Later,
    /// What the ranks of the group brought, in these lengths, follows.
    All(Vec<usize>),
    /// All brought what follows.
    Same,
    /// The result of the call follows.
    Bytes,
    /// All are there; there is nothing to say.
    Done,
    /// The group that a split made; without members if they are those of the group that was split.
    Group {
        group: usize,
        members: Option<Vec<usize>>,
    },
    /// The same.
    Failed(CommError),
    /// The calls of the rank go by the relay that this rank is, at this port of the machine.
    Relay(usize, u16),
    /// To a relay: the frame that follows is for these ranks of the world, which may not know its group yet.
    Pass {
        ranks: Vec<usize>,
        opens: Option<usize>,
    },
    /// From a relay: it is that of another run, build or world. The rank stays with rank 0.
    NotHere,
}

/// The frame of `message` with `parts` after it.
pub(super) fn frame<'a>(
    message: &impl Serialize,
    parts: impl Iterator<Item = &'a [u8]>,
) -> io::Result<Vec<u8>> {
    let mut bytes = postcard::to_extend(message, vec![0; LENGTH]).map_err(io::Error::other)?;
    parts.for_each(|part| bytes.extend_from_slice(part));
    let body = bytes.len() - LENGTH;
    let len = u32::try_from(body).ok().filter(|_| body <= LONG);
    let len = len.ok_or_else(|| {
        io::Error::other(format!(
            "{body} bytes would travel at once between processes, all ranks' together, and {MAX_ALL_GATHER} are the most; GPUs move them by NCCL, and ranks that are threads of one process by themselves",
        ))
    })?;
    bytes[..LENGTH].copy_from_slice(&len.to_le_bytes());
    Ok(bytes)
}

/// The beginning of a frame with a message, for a part of `following` bytes that is sent after it.
pub(super) fn before(message: &impl Serialize, following: usize) -> io::Result<Vec<u8>> {
    let mut bytes = to_frame(message)?;
    let len = u32::try_from(bytes.len() - LENGTH + following).map_err(io::Error::other)?;
    bytes[..LENGTH].copy_from_slice(&len.to_le_bytes());
    Ok(bytes)
}

/// The frame of a message alone.
pub(super) fn to_frame(message: &impl Serialize) -> io::Result<Vec<u8>> {
    frame(message, std::iter::empty())
}

/// The length of the body that follows, if it is at most `longest`.
pub(super) fn length(bytes: [u8; LENGTH], longest: usize) -> io::Result<usize> {
    let len = u32::from_le_bytes(bytes) as usize;
    if len > longest {
        let why = format!("a message of {len} bytes, longer than {longest}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(len)
}

/// The message of a body, and the bytes after it.
pub(super) fn open<T: DeserializeOwned>(body: &[u8]) -> io::Result<(T, &[u8])> {
    postcard::take_from_bytes(body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// What `ranks` ranks brought, of the bytes after a [`Request::Post`]; `None` where `lens` are not theirs.
pub(super) fn split_up(
    bytes: &[u8],
    lens: &[usize],
    ranks: usize,
) -> Option<impl Iterator<Item = Arc<[u8]>>> {
    let all = lens
        .iter()
        .try_fold(0usize, |sum, &len| sum.checked_add(len));
    let valid = all == Some(bytes.len()) && (lens.len() == 1 || lens.len() == ranks);
    let mut rest = bytes;
    let mut next = move |&len: &usize| {
        let (part, others) = rest.split_at(len);
        rest = others;
        Arc::from(part)
    };
    let mut parts: Vec<Arc<[u8]>> = if valid {
        lens.iter().map(&mut next).collect()
    } else {
        Vec::new()
    };
    if let [same] = &*parts {
        parts = vec![Arc::clone(same); ranks];
    }
    valid.then(|| parts.into_iter())
}

/// What the thread of `server` says of `rank`, whose words mean nothing.
pub(super) fn nonsense(server: usize, rank: usize, what: &str) -> CommError {
    let message = format!("rank {server} heard {what} from it; install one build everywhere");
    CommError::Failed { rank, message }
}

#[cfg(test)]
/// Reads a frame of at most `longest` bytes: its message, and the bytes after it.
pub(super) fn read<T: DeserializeOwned>(
    mut from: impl Read,
    longest: usize,
) -> io::Result<(T, Vec<u8>)> {
    let mut len = [0; LENGTH];
    from.read_exact(&mut len)?;
    let len = length(len, longest)?;
    // A length alone takes no memory: it grows with what arrives.
    let mut body = Vec::new();
    from.take(len as u64).read_to_end(&mut body)?;
    if body.len() < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let (message, rest) = open(&body)?;
    let message_len = len - rest.len();
    body.drain(..message_len);
    Ok((message, body))
}
