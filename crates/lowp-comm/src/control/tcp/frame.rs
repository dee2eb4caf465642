//! What processes send each other: frames of a length and a message.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::CommError;
use crate::control::MAX_ALL_GATHER;
use crate::control::call::Call;
use crate::error::Departure;

/// What a connection begins with, whatever the version of the rest.
pub(super) const GREETING: [u8; 8] = *b"lowp\0\x02\0\0";

/// The longest frame before a rank is known, and after: what a call brings, with the lengths of its parts and the call.
pub(super) const SHORT: usize = 1 << 12;
pub(super) const LONG: usize = MAX_ALL_GATHER + (1 << 24);

/// Who connects.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) build: String,
}

/// What a rank tells rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Its part in a round of a group, as this rank of it.
    Post {
        group: usize,
        rank: usize,
        call: Call,
        bytes: Vec<u8>,
    },
    /// Which number has the group that a split made?
    Open {
        parent: usize,
        round: u64,
        color: usize,
        members: Vec<usize>,
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
    /// What the ranks of the group brought.
    Round(Vec<Vec<u8>>),
    Opened(usize),
    /// The same.
    Failed(CommError),
}

/// The bytes of a frame that holds `message`.
pub(super) fn frame(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let len = u32::try_from(body.len())
        .ok()
        .filter(|&len| len as usize <= LONG);
    let len = len.ok_or_else(|| {
        io::Error::other(format!(
            "{} bytes would travel at once between processes, all ranks' together, and {MAX_ALL_GATHER} are the most; GPUs move them by NCCL, and ranks that are threads of one process by themselves",
            body.len()
        ))
    })?;
    let mut bytes = len.to_le_bytes().to_vec();
    bytes.extend(body);
    Ok(bytes)
}

pub(super) fn write(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    to.write_all(&frame(message)?)
}

/// Reads a frame of at most `longest` bytes.
pub(super) fn read<T: DeserializeOwned>(mut from: impl Read, longest: usize) -> io::Result<T> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > longest {
        let why = format!("a message of {len} bytes, longer than {longest}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    // A length alone takes no memory: it grows with what arrives.
    let mut body = Vec::new();
    from.take(len as u64).read_to_end(&mut body)?;
    if body.len() < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    postcard::from_bytes(&body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}
