//! What processes send each other: frames of a length, a message, and the bytes that belong to it.

use std::io;
#[cfg(test)]
use std::io::Read;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::CommError;
use crate::control::MAX_ALL_GATHER;
use crate::control::call::Call;
use crate::error::Departure;

/// What a connection begins with, whatever the version of the rest.
pub(super) const GREETING: [u8; 8] = *b"lowp\0\x03\0\0";

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
}

/// What a rank tells rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Its part in a round of a group, as this rank of it; behind it what it brings.
    Post {
        group: usize,
        rank: usize,
        call: Call,
    },
    /// It holds the group no more.
    Close {
        group: usize,
    },
    /// As [`CommError::told`] makes it.
    Fail(CommError),
    Leave(Departure),
}

/// What rank 0 tells a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// All ranks are there.
    Ready,
    /// The rank was started later than this rank 0, which ends: another one will listen.
    Later,
    /// What the ranks of the group brought, in these lengths, is behind it.
    All(Vec<usize>),
    /// All brought what is behind it.
    Same,
    /// What comes of the call is behind it.
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
}

/// The frame of `message` with `parts` behind it.
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

/// The message of a body, and what is behind it.
pub(super) fn open<T: DeserializeOwned>(body: &[u8]) -> io::Result<(T, &[u8])> {
    postcard::take_from_bytes(body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

#[cfg(test)]
/// Reads a frame of at most `longest` bytes: its message, and what is behind it.
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
